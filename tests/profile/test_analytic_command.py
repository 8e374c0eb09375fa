"""`shardwright profile analytic`: what it writes, what the files say, and what it refuses."""

import json
import subprocess
import sys
from cProfile import Profile
from pathlib import Path

import numpy as np
import pytest
from command_calls import call
from forked_command import forked_command

from shardwright.estimate.hardware import NETWORK_STEP_S, START_S
from shardwright.estimate.machines import Efficiencies
from shardwright.estimate.notes import SEEN_ERROR, SEEN_LINK_ERROR, Process
from shardwright.estimate.settings import ProfileSettings
from shardwright.io import write_document
from shardwright.models.registry import read_presets
from shardwright.plan.sweep_plan import collective_kinds
from shardwright.types import Cluster, NodeGroup, NodeType, Precision, Recompute, SequenceParallel
from shardwright.types.hardware_profile import Collective, CollectiveKey, read_hardware_profile
from shardwright.types.model_profile import read_model_profile
from shardwright_profile.cli import APP
from shardwright_profile.options import AnalyticOptions

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "NVIDIA A100-SXM4-80GB"
MIXED = Precision(parameters="float32", compute="bfloat16", reduce="float32")


def train(*arguments):
    command = forked_command(arguments)
    _, errors = command.communicate(timeout=300)
    assert command.returncode == 0, errors


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Llama 7B at two lengths, two nodes of A100, and settings with everything."""
    folder = tmp_path_factory.mktemp("analytic")
    config = read_presets()["llama-7b"].config
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    for length in (1024, 2048):
        train("describe", folder, "--name", "llama", "--sequence-length", length, "--out", folder / f"{length}.json")
    write_document(folder / "cluster.json", a_cluster(2))
    write_document(
        folder / "settings.json",
        ProfileSettings(
            tp_sizes=(1, 2, 8, 3),
            sequence_parallel=tuple(SequenceParallel),
            recompute=tuple(Recompute),
            micro_batch_sizes=(1, 2, 4),
            precision=MIXED,
        ),
    )
    return folder


def a_cluster(nodes, device=DEVICE, devices=8):
    node = NodeType(device=device, devices_per_node=devices, memory_bytes=80 << 30, usd_per_hour=40.0)
    return Cluster(name="some", nodes=(NodeGroup(node_type="a", count=nodes),), node_types={"a": node})


@pytest.fixture(scope="module")
def written(inputs, command):
    finished = command(
        "analytic", "--model", inputs / "2048.json", "--model", inputs / "1024.json",
        "--settings", inputs / "settings.json", "--cluster", inputs / "cluster.json", "--inter-node-gbit-s", 800,
        "--out", inputs / "m.h5", "--hardware-out", inputs / "h.h5",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    return inputs, finished.stderr


def test_a_model_profile_has_every_combination_and_marks_all_of_it(written):
    folder, said = written
    profile = read_model_profile(folder / "m.h5")
    layers = profile.layers
    # tp 1 without, 2 and 8 with each kind of sequence parallelism; tp 3, which divides neither heads nor lengths, of
    # embedding and head without any.
    blocks, ends = 7 * len(Recompute) * 3, 2 * (7 + 1) * 3
    assert len(layers["type"]) == 2 * (blocks + ends)
    assert set(layers["type"][layers["tp_size"] == 3]) == {b"embedding", b"head"}
    assert "left out: tp_size=3 sequence_parallel=none: tp_size 3 does not divide" in said
    assert set(layers["sequence_length"]) == {1024, 2048} and profile.origin.device == DEVICE
    sources = [name for name in layers.columns if name.endswith("_source")]
    assert len(sources) == 4 and all(set(layers[name]) == {b"analytic"} for name in sources)
    assert set(profile.states["optimizer_source"]) == {b"analytic"}
    assert profile.process["process_source"][0] == b"assumed"
    assert profile.process["step_overhead_source"][0] == b"absent"
    assert profile.origin.precision == "float32/bfloat16/float32"
    state = profile.states["optimizer_bytes"] == 2 * profile.states["parameter_bytes"]
    assert state.all() and (profile.states["parameter_bytes"] > 0).all()


def test_the_notes_state_assumptions_sources_and_the_error_that_was_seen(written):
    folder, said = written
    for path, seen in ((folder / "m.h5", SEEN_ERROR), (folder / "h.h5", SEEN_LINK_ERROR)):
        read = read_model_profile if path.name == "m.h5" else read_hardware_profile
        notes = read(path).provenance.notes
        assert notes.splitlines()[0] == f"analytic, nothing was measured: {seen}."
        assert notes.splitlines()[0] in said
        assert "x 0.75 reached" in notes and "A100 80GB Tensor Core GPU datasheet, NVIDIA, 2021" in notes


def test_other_efficiencies_do_not_borrow_the_error_of_the_defaults(inputs, command, tmp_path):
    finished = command(
        "analytic", "--model", inputs / "1024.json", "--settings", inputs / "settings.json", "--device", "A100-80",
        "--matrix-efficiency", 0.3, "--out", tmp_path / "m.h5",
    )  # fmt: skip
    assert finished.returncode == 0 and "(with the default efficiencies, which these are not)" in finished.stderr
    notes = read_model_profile(tmp_path / "m.h5").provenance.notes
    assert "3.12e+14 FLOP/s x 0.3 reached bfloat16" in notes


def test_the_same_inputs_give_the_same_bytes(written, command, tmp_path):
    folder, _ = written
    again = command(
        "analytic", "--cluster", folder / "cluster.json", "--inter-node-gbit-s", 800,
        "--hardware-out", tmp_path / "h.h5",
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "h.h5").read_bytes() == (folder / "h.h5").read_bytes()


def test_twenty_thousand_nodes_take_few_calls_each(tmp_path):
    write_document(tmp_path / "cluster.json", a_cluster(20_000))
    told = ("--cluster", tmp_path / "cluster.json", "--inter-node-gbit-s", 800)
    with Profile() as calls:
        called = call(APP, "analytic", *told, "--hardware-out", tmp_path / "h.h5")
    assert called.exit_code == 0, called.stderr
    assert sum(each.callcount for each in calls.getstats()) < 300 * 20_000


def test_hardware_has_every_kind_of_message_by_the_alpha_beta_model(written):
    folder, _ = written
    profile = read_hardware_profile(folder / "h.h5")
    cluster = a_cluster(2)
    assert set(profile.curves) == {kind.key for kind in collective_kinds(cluster)}
    assert set(profile.points["source"]) == {b"analytic"}
    link, node = 0.75 * 300e9, 0.75 * 100e9

    def time_s(collective, size, on_a_node, consecutive, message):
        sizes, times = profile.curves[CollectiveKey(collective, size, on_a_node, consecutive)]
        return float(times[list(sizes).index(message)])

    mib = 1 << 20
    inside = time_s(Collective.ALL_REDUCE, 8, 8, True, mib)
    assert inside == pytest.approx(START_S + 14 * 3e-6 + 14 / 8 * mib / link)
    assert time_s(Collective.ALL_GATHER, 8, 8, True, mib) == pytest.approx(START_S + 7 * 3e-6 + 7 / 8 * mib / link)
    # One ring over both nodes leaves each once, in two steps of 30; eight strided pairs share what a node has.
    whole = time_s(Collective.ALL_REDUCE, 16, 8, True, mib)
    assert whole == pytest.approx(START_S + 2 * NETWORK_STEP_S + 28 * 3e-6 + 30 / 16 * mib / node)
    pairs = time_s(Collective.REDUCE_SCATTER, 2, 1, False, mib)
    assert pairs == pytest.approx(START_S + NETWORK_STEP_S + 8 * mib / 2 / node)
    # Of the groups that two-way tensor parallelism leaves, each has four ranks on either node: two leave each.
    two = time_s(Collective.ALL_REDUCE, 8, 4, False, mib)
    assert two == pytest.approx(START_S + 2 * NETWORK_STEP_S + 12 * 3e-6 + 2 * 14 / 8 * mib / node)
    # Of an exchange among all, each of a node's eight ranks sends half to the other node, to all of them at once.
    exchange = time_s(Collective.ALL_TO_ALL, 16, 8, True, mib)
    assert exchange == pytest.approx(START_S + NETWORK_STEP_S + 8 * mib / 2 / node)
    assert time_s(Collective.P2P, 2, 1, False, mib) == pytest.approx(START_S + NETWORK_STEP_S + 8 * mib / node)
    for sizes, times in profile.curves.values():
        assert len(sizes) > 8 and (np.diff(times) > 0).all()


def test_a_process_takes_what_is_told_of_it_and_the_rest_is_assumed(inputs, command, tmp_path):
    given = (
        "analytic", "--model", inputs / "1024.json", "--settings", inputs / "settings.json", "--device", "A100-80",
        "--out", tmp_path / "m.h5",
    )  # fmt: skip
    mib = 1 << 20
    told = [
        ((), 512, 480, "{} for CUDA's context, 0 that the allocator keeps unused, {} more for each NCCL communicator"),
        (("--context-mib", 600, "--allocator-slack-mib", 2048), 600 + 2048, 480,
         "{} for CUDA's context (given), 2147483648 that the allocator keeps unused (given), {} more for each NCCL"),
        (("--communicator-mib", 0), 512, 0, "{} for CUDA's context, 0 that the allocator keeps unused, {} more for"),
    ]  # fmt: skip
    for options, size, of_each, words in told:
        assert command(*given, *options).returncode == 0
        profile = read_model_profile(tmp_path / "m.h5")
        assert profile.process["process_bytes"][0] == size * mib
        assert profile.process["communicator_bytes"][0] == of_each * mib
        context = (600 if "--context-mib" in options else 512) * mib
        note = f"assumed: {size * mib} bytes a process: {words.format(context, of_each * mib)}"
        assert note in profile.provenance.notes


def test_a_search_can_plan_with_analytic_profiles(written, tmp_path):
    folder, _ = written
    search = {
        "format": "shardwright.search", "version": 1, "name": "s", "global_batch_size": 16, "num_microbatches": [2],
        "pp_sizes": [2], "tp_sizes": [2], "data_parallel": ["zero3"], "sequence_parallel": ["megatron"],
        "recompute": ["none", "full"],
        "precision": {"parameters": "float32", "compute": "bfloat16", "reduce": "float32"},
    }  # fmt: skip
    (tmp_path / "search.json").write_text(json.dumps(search))
    files = {"cluster": "cluster.json", "model": "2048.json", "hardware": "h.h5", "profile": "m.h5"}
    options = [part for role, name in files.items() for part in (f"--{role}", str(folder / name))]
    command = [
        sys.executable, "-c", "from shardwright_search.cli import main; main()", "plan", *options,
        "--search", str(tmp_path / "search.json"), "--out", str(tmp_path / "plan.json"),
    ]  # fmt: skip
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    warnings = json.loads((tmp_path / "plan.prediction.json").read_text())["warnings"]
    said = [(warning.partition(":")[0], name) for warning in warnings for name in ("m.h5", "h.h5") if name in warning]
    assert said == [("analytic", "m.h5"), ("assumed", "m.h5"), ("analytic", "h.h5"), ("absent", "h.h5")]
    assert SEEN_ERROR in warnings[0] and SEEN_LINK_ERROR in warnings[2] and f"{Process().bytes} bytes" in warnings[1]
    assert warnings[3].endswith("are counted as if nothing were computed beside them")
    assert warnings[4:] == ["absent: step_overhead_s: counted as 0"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "--out: no profile is requested"),
        (("--out", "m.h5"), "--out: a model profile needs --model and --settings"),
        (("--hardware-out", "h.h5"), "--hardware-out: a hardware profile needs --cluster"),
        (("--hardware-out", "h.h5", "--cluster", "cluster.json"), "--inter-node-gbit-s: the cluster has several nodes"),
        (("--out", "m.h5", "MODEL"), "--device: no device is given"),
        (("--out", "m.h5", "MODEL", "--device", "H1000"), "--device: 'H1000' is not in the table of devices"),
        (("--out", "m.h5", "MODEL", "--device", "V100-16"), "device Tesla V100-SXM2-16GB: the table has no rate for"),
        (("--out", "m.h5", "MODEL", "MODEL", "--device", "L4"), "sequence length 1024 is given twice"),
        (("--out", "m.h5", "MODEL", "--cluster", "cluster.json", "--node-type", "b"), "--node-type: 'b' is not one of"),
        (("--out", "m.h5", "MODEL", "--device", "L4", "--devices", "cluster.json"), "is not valid TOML"),
    ],
)
def test_what_cannot_be_estimated_is_refused_in_one_line(inputs, command, one_error_line, tmp_path, options, problem):
    given = []
    for option in options:
        if option == "MODEL":
            given += ["--model", inputs / "1024.json"]
        elif option == "cluster.json":
            given.append(inputs / option)
        else:
            given.append(tmp_path / option if option.endswith(".h5") else option)
    if "MODEL" in options:
        given += ["--settings", inputs / "settings.json"]
    line = one_error_line(command("analytic", *given), 2, tmp_path, set())
    assert problem in line


def test_the_host_bounds_small_blocks_as_it_is_told_to_launch_kernels(inputs, command, tmp_path):
    def block(out, settings, *options):
        asked = ["--model", inputs / "1024.json", "--settings", settings, "--cluster", inputs / "cluster.json"]
        called = command("analytic", *asked, "--out", tmp_path / out, *options)
        assert called.returncode == 0, called.stderr
        profile = read_model_profile(tmp_path / out)
        of_type = [row for row in profile.layers.rows if row.type == "block" and row.recompute is Recompute.NONE]
        fewest = next(row for row in of_type if (row.tp_size, row.micro_batch_size) == (8, 1))
        return fewest.forward_s, fewest.activation_bytes, profile.origin.precision, profile.provenance.notes

    (tmp_path / "compiled.json").write_text(
        json.dumps(json.loads((inputs / "settings.json").read_text()) | {"compile": True})
    )
    plain = inputs / "settings.json"
    eager, kept, precision, notes = block("eager.h5", plain)
    assert eager == pytest.approx(35 * 42e-6)
    assert "takes the host 42 us (fitted to published layer times), and that blocks are eager" in notes
    told, _, _, notes = block("told.h5", plain, "--launch-us", 100)
    assert told == pytest.approx(35 * 100e-6) and "takes the host 100 us (given)" in notes
    graphs, _, _, notes = block("graphs.h5", plain, "--launch-us", 0)
    assert 35 * 5e-6 < graphs < eager and "0 us (given: CUDA graphs replay kernels)" in notes
    compiled, fewer, marked, notes = block("compiled.h5", tmp_path / "compiled.json")
    assert 13 * 42e-6 <= compiled < eager / 2 and fewer < kept and "blocks are compiled" in notes
    assert (precision, marked) == (MIXED.text, f"{MIXED.text} compiled")


def test_the_command_has_the_efficiencies_that_the_error_was_seen_with():
    for name, value in Efficiencies()._asdict().items():
        assert getattr(AnalyticOptions(), f"{name}_efficiency") == value


def test_the_error_that_profiles_state_is_that_of_the_benchmark():
    sets = {one["set"]: one for one in json.loads((ROOT / "benchmarks/results/analytic.json").read_text())["sets"]}
    for name, sentence in (("all layer times", SEEN_ERROR), ("all all_reduce", SEEN_LINK_ERROR)):
        found = sets[name]
        figures = f"median error {100 * found['median_error']:.0f} %, worst {100 * found['worst_error']:.0f} %"
        assert sentence.endswith(figures) and f"against {found['points']} measured" in sentence


@pytest.mark.long
def test_the_benchmark_still_finds_what_its_results_say(tmp_path):
    reference = ROOT.parent / "shared" / "reference"
    if not all((reference / name).is_dir() for name in ("fasop", "sailor", "vtrain")):
        pytest.skip("the measured data of FASOP, Sailor and vTrain is not here")
    out = tmp_path / "found.json"
    command = [sys.executable, ROOT / "benchmarks/analytic.py", "--reference", reference, "--out", out]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    kept = json.loads((ROOT / "benchmarks/results/analytic.json").read_text())
    found = json.loads(out.read_text())
    assert [one["set"] for one in found["sets"]] == [one["set"] for one in kept["sets"]]
    for one, other in zip(found["sets"], kept["sets"], strict=True):
        assert one["median_error"] == pytest.approx(other["median_error"], rel=1e-6)
