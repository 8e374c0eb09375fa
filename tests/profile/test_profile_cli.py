import json
import subprocess
import sys

import pytest

from shardwright.io import BadInput, read_document, write_document
from shardwright.types import Measurement, Plans
from shardwright.types.model_profile import read_model_profile
from shardwright_profile.hardware.start import start_sweep
from shardwright_profile.options import HardwareOptions


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hardware", ["in seconds", "in bytes", "HOST:PORT"]),
        ("probes", ["shardwright.model", "shardwright.profile_settings"]),
        ("fit", ["shardwright.measurement"]),
        ("show", ["KiB", "MB/s"]),
    ],
)
def test_help_says_units_and_formats(command, name, words):
    finished = command(name, "--help")
    assert finished.returncode == 0
    for word in words:
        assert word in " ".join(finished.stdout.split())


def test_only_the_ranks_of_a_sweep_import_torch():
    parts = {"": "analytic, cli, show", ".hardware": "start, profile", ".model": "probes, fit"}
    imports = "".join(f"from shardwright_profile{part} import {modules}\n" for part, modules in parts.items())
    code = f"import sys\n{imports}assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_torch_the_sweep_says_what_to_install(make_cluster, tmp_path, monkeypatch):
    write_document(tmp_path / "cluster.json", make_cluster((1, 2)))
    monkeypatch.setitem(sys.modules, "torch", None)
    request = HardwareOptions(cluster=tmp_path / "cluster.json", time_budget=1.0, max_bytes=4096, out=tmp_path / "h.h5")
    with pytest.raises(BadInput, match=r"torch is not installed here: pip install 'shardwright\[profile\]'"):
        start_sweep(request)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not valid JSON"),
        ('{"format": "shardwright.plan", "version": 1}', "format is 'shardwright.plan', not shardwright.cluster"),
        ('{"format": "shardwright.cluster", "version": 1, "nodes": []}', "$.nodes"),
    ],
)
def test_a_bad_cluster_file_is_one_line_and_no_output(command, one_error_line, tmp_path, text, problem):
    (tmp_path / "cluster.json").write_text(text)
    before = set(tmp_path.iterdir())
    finished = command(
        "hardware", "--cluster", tmp_path / "cluster.json", "--time-budget", 1, "--out", tmp_path / "h.h5"
    )
    assert problem in one_error_line(finished, 2, tmp_path, before)


@pytest.mark.parametrize(
    ("nodes", "device", "options", "problem"),
    [
        (
            (2, 1),
            "cpu",
            ("--nnodes", "3", "--rendezvous", "h:1"),
            "is for 2 nodes, --nnodes is 3: start it on every node with",
        ),
        ((2, 1), "cpu", ("--nnodes", 2), "2 nodes need a place to meet"),
        (
            (2, 1),
            "cpu",
            ("--nnodes", 2, "--rendezvous", "h"),
            "--rendezvous: 'h' is not HOST:PORT: give a port of 1 to",
        ),
        ((2, 1), "cpu", ("--nnodes", 2, "--rendezvous", "h:99999999"), "'h:99999999' is not HOST:PORT: give a port"),
        (
            (2, 1),
            "cpu",
            ("--nnodes", 2, "--node-rank", 2, "--rendezvous", "h:1"),
            "--node-rank: 2 is not below --nnodes 2",
        ),
        ((1, 2), "cpu", ("--max-bytes", 512), "512 is below --min-bytes 1024"),
        ((1, 2), "cpu", ("--max-bytes", 2**32), "exceed a device's 4294967296 bytes"),
    ],
)
def test_options_that_do_not_go_with_the_cluster_are_refused(
    command, one_error_line, make_cluster, tmp_path, nodes, device, options, problem
):
    write_document(tmp_path / "cluster.json", make_cluster(nodes))
    before = set(tmp_path.iterdir())
    arguments = ("--cluster", tmp_path / "cluster.json", "--time-budget", 1, "--out", tmp_path / "h.h5")
    assert problem in one_error_line(command("hardware", *arguments, *options), 2, tmp_path, before)


def test_a_cluster_of_devices_that_are_not_here_is_refused_before_a_rank_is_started(
    command, one_error_line, make_cluster, tmp_path
):
    write_document(tmp_path / "cluster.json", make_cluster((1, 1)))
    named = json.loads((tmp_path / "cluster.json").read_text())
    named["node_types"]["cpu-1"]["device"] = "Imaginary-9000"
    (tmp_path / "cluster.json").write_text(json.dumps(named))
    before = set(tmp_path.iterdir())
    finished = command(
        "hardware", "--cluster", tmp_path / "cluster.json", "--time-budget", 1, "--out", tmp_path / "h.h5"
    )
    line = one_error_line(finished, 2, tmp_path, before)
    assert "cluster.json: is for Imaginary-9000, but this machine has no GPU driver: start it on" in line


def test_probes_are_written_measured_fitted_and_shown(
    command, make_model, make_cluster, make_measurement, make_constants, tmp_path
):
    write_document(tmp_path / "model.json", make_model())
    write_document(tmp_path / "cluster.json", make_cluster((1, 2)))
    (tmp_path / "settings.json").write_text(
        '{"format": "shardwright.profile_settings", "version": 1, "tp_sizes": [1, 2, 3],'
        ' "sequence_parallel": ["megatron"], "recompute": ["none", "full"], "micro_batch_sizes": [1]}'
    )
    inputs = [part for name in ("model", "cluster", "settings") for part in (f"--{name}", tmp_path / f"{name}.json")]
    finished = command("probes", *inputs, "--node-type", "cpu-2", "--out", tmp_path / "probes.json")
    assert finished.returncode == 0, finished.stderr
    assert "left out: tp_size=3 sequence_parallel=megatron: tp_size 3 does not divide the 2 devices" in finished.stderr
    plans = read_document(tmp_path / "probes.json", Plans).plans
    assert len(plans) == 2 * 2 * 2 + 2  # and one each under ZeRO-2 and ZeRO-3

    write_document(tmp_path / "measured.json", make_measurement(plans, make_constants()))
    assert read_document(tmp_path / "measured.json", Measurement).device == "cpu"
    finished = command("fit", "--measurements", tmp_path / "measured.json", "--out", tmp_path / "profile.h5")
    assert finished.returncode == 0, finished.stderr
    assert read_model_profile(tmp_path / "profile.h5").origin.model == "toy"

    finished = command("show", tmp_path / "profile.h5")
    assert finished.returncode == 0, finished.stderr
    for words in ("model profile of toy", "megatron", "embedding", "2 ms", "4 ms", "640 B", "step overhead s"):
        assert words in finished.stdout


def test_a_fit_that_noise_spoilt_is_one_line_and_no_output(
    command, one_error_line, make_model, make_cluster, make_measurement, make_constants, tmp_path
):
    write_document(tmp_path / "model.json", make_model())
    write_document(tmp_path / "cluster.json", make_cluster((1, 1)))
    (tmp_path / "settings.json").write_text(
        '{"format": "shardwright.profile_settings", "version": 1, "tp_sizes": [1], "sequence_parallel": ["none"],'
        ' "recompute": ["none"], "micro_batch_sizes": [1]}'
    )
    inputs = [part for name in ("model", "cluster", "settings") for part in (f"--{name}", tmp_path / f"{name}.json")]
    command("probes", *inputs, "--node-type", "cpu-1", "--out", tmp_path / "probes.json")
    plans = read_document(tmp_path / "probes.json", Plans).plans
    write_document(tmp_path / "measured.json", make_measurement(plans, make_constants(layer_s={"block": 0.0})))
    before = set(tmp_path.iterdir())
    finished = command("fit", "--measurements", tmp_path / "measured.json", "--out", tmp_path / "profile.h5")
    line = one_error_line(finished, 2, tmp_path, before)
    assert "block=1" in line
    assert "block=3" in line
