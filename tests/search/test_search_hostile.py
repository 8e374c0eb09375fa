"""Hostile files, options and places: one line on standard error, the right exit code, and nothing written."""

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from command_calls import call

from shardwright_search.cli import APP

SECONDS = 10
"""In which every command must have refused; most take milliseconds."""


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with the inputs of every command, and a plan with its prediction."""
    from made_up import make_cluster, make_hardware, make_model, make_profile, make_request

    from shardwright.io import write_document
    from shardwright.types.hardware_profile import write_hardware_profile
    from shardwright.types.model_profile import write_model_profile

    folder = tmp_path_factory.mktemp("given")
    model, cluster = make_model(4), make_cluster()
    write_document(folder / "cluster.json", cluster)
    write_document(folder / "model.json", model)
    write_document(folder / "search.json", make_request(memory_gib=4 / 1024))
    write_hardware_profile(folder / "hardware.h5", make_hardware(cluster))
    write_model_profile(folder / "profile.h5", make_profile(model))
    ended = call(APP, "plan", *PLAN.format(folder).split(), "--out", folder / "plan.json")
    assert ended.exit_code == 0, ended.output
    return folder


FILES = {"cluster": "cluster.json", "model": "model.json", "hardware": "hardware.h5", "profile": "profile.h5"}
PLAN = " ".join(f"--{role} {{0}}/{name}" for role, name in (FILES | {"search": "search.json"}).items())
PRICED = "--hardware {0}/hardware.h5 --profile {0}/profile.h5"
COMMANDS = {
    "plan": f"plan {PLAN}",
    "evaluate": f"evaluate {{0}}/plan.json {PRICED}",
    "uniform": "uniform --model {0}/model.json --cluster {0}/cluster.json --global-batch-size 8",
    "export": "export {0}/plan.json --to megatron",
    "simulate": f"simulate {{0}}/plan.json {PRICED}",
    "explain": f"explain {{0}}/plan.json {PRICED}",
}
WRITING = ("plan", "evaluate", "uniform", "export")


@contextmanager
def in_time():
    """Raise where a command takes longer than it may: no OSError, which the command would tell as a fault."""

    def late(*_):
        raise AssertionError(f"takes more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(folder, command, *more, searches=False):
    """The one line with which a command refuses, at once or after a search; nothing new may lie in the folder."""
    before = sorted(folder.rglob("*"))
    with in_time():
        ended = call(APP, *COMMANDS[command].format(folder).split(), *more)
    assert (ended.exit_code, ended.stdout) == (2, ""), ended
    *progress, line = ended.stderr.splitlines()
    assert line.startswith("error: ") and len(line) < 2000
    assert not progress or searches
    assert sorted(folder.rglob("*")) == before
    return line


def _tree(folder):
    """Places where nothing can be written, by what they are called."""
    (folder / "folder").mkdir(exist_ok=True)
    (folder / "file").touch()
    if not (folder / "pipe").exists():
        os.mkfifo(folder / "pipe")
        (folder / "circle").symlink_to("circle")
        (folder / "device").symlink_to("/dev/full")
    return folder


PLACES = {
    "a folder": "{0}/folder",
    "below a file": "{0}/file/out.json",
    "name of 256 bytes": "{0}/" + "x" * 256,
    "name of 300 two-byte letters": "{0}/" + "é" * 300,
    "path of 5000 bytes": "{0}" + "/yyyyyyyyy" * 500,
    "unencodable name": "{0}/a\udcff",
    "a device": "{0}/device",  # by a link: a mistake must replace that, never the machine's own /dev/full
    "/proc": "/proc/out.json",
    "a pipe": "{0}/pipe",
    "below a circle of links": "{0}/circle/out.json",
    "empty": "",
}


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize("place", PLACES)
def test_a_place_that_cannot_be_written_is_refused(given, command, place):
    _tree(given)
    refused(given, command, "--out", PLACES[place].format(given))


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_while_writing_leaves_nothing(given, monkeypatch, command, fault):
    def fail(*_):
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(os, "fsync", fail)
    line = refused(given, command, "--out", given / "new.json", searches=command == "plan")
    assert os.strerror(fault) in line and "new" in line


def test_pictures_and_traces_are_all_or_nothing(given):
    _tree(given)
    for place in PLACES.values():
        refused(given, "simulate", "--svg", given / "t.svg", "--trace", place.format(given))


DEEP = "[" * 100_000 + "]" * 100_000
CONTENTS = {
    "empty": b"",
    "no JSON": b"{",
    "not UTF-8": b"\xff\xfe\x00",
    "nested 100,000 deep": DEEP.encode(),
    "nested object 100,000 deep": (b'{"a":' * 100_000) + b"1" + b"}" * 100_000,
    "one line of 3 MB": b'{"format": "' + b"x" * 3_000_000 + b'"}',
    "a number of 10,000 digits": b'{"version": ' + b"9" * 10_000 + b"}",
    "Infinity": b'{"memory": Infinity}',
    "1e999": b'{"memory": 1e999}',
    "a list": b"[]",
    "a key twice": b'{"format": 1, "format": 2}',
    "other format": b'{"format": "shardwright.unknown", "version": 1}',
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(100),
}


@pytest.mark.parametrize("role", ["cluster", "model", "search"])
@pytest.mark.parametrize("content", CONTENTS)
def test_a_document_of_hostile_content_is_refused(given, tmp_path, role, content):
    path = tmp_path / "hostile"
    path.write_bytes(CONTENTS[content])
    assert str(path) in refused(given, "plan", f"--{role}", path, "--out", given / "new.json")


@pytest.mark.parametrize("role", ["cluster", "model", "search", "hardware", "profile", "correction"])
@pytest.mark.parametrize(
    "place",
    ["/dev/zero", "/dev/null", "/dev/full", "{0}/pipe", "{0}/folder", "{0}/nowhere", "{0}/circle", "{0}/" + "x" * 300],
)
def test_an_input_that_is_no_regular_file_is_refused(given, role, place):
    path = place.format(_tree(given))
    assert path in refused(given, "plan", f"--{role}", path, "--out", given / "new.json")


VALUES = {
    "a batch of 10^18": ("search", {"global_batch_size": 10**18}),
    "a batch of 10^30": ("search", {"global_batch_size": 10**30}),
    "a batch range of 10^12 sizes": ("search", {"global_batch_size": {"min": 1, "max": 10**12, "step": 1}}),
    "microbatches of 10^12": ("search", {"num_microbatches": [10**12]}),
    "a budget of 1e300": ("search", {"memory_gib": 1e300}),
    "a budget of 0": ("search", {"memory_gib": 0}),
    "a reserve of 1e300": ("search", {"reserve_gib": 1e300}),
    "tensor parallelism of 10^9": ("search", {"tp_sizes": [10**9]}),
    "chunks of 10^9": ("search", {"schedules": ["interleaved_1f1b"], "chunks_per_stage": [10**9]}),
    "a cluster of 10^9 nodes": ("cluster", {"nodes": [{"node_type": "n", "count": 10**9}]}),
    "a cluster of 10^9 groups": ("cluster", {"nodes": [{"node_type": "n", "count": 2**20}] * 3}),
    "nodes of 10^9 devices": (
        "cluster",
        {"node_types": {"n": {"device": "cpu", "devices_per_node": 10**9, "memory_bytes": 2**30}}},
    ),
    "a device of 1e300 bytes": (
        "cluster",
        {"node_types": {"n": {"device": "cpu", "devices_per_node": 2, "memory_bytes": 10**300}}},
    ),
    "a price of 1e300": (
        "cluster",
        {"node_types": {"n": {"device": "cpu", "devices_per_node": 2, "memory_bytes": 1, "usd_per_hour": 1e300}}},
    ),
    "a sequence of 10^12": ("model", {"sequence_length": 10**12}),
    "no layers": ("model", {"layers": []}),
    "a name that is no text": ("model", {"name": "\ud800"}),
    "a name of 1 MB": ("search", {"name": "x" * 10**6}),
}


@pytest.mark.parametrize("value", VALUES)
def test_a_value_beyond_all_measure_is_refused(given, tmp_path, value):
    role, changes = VALUES[value]
    path = tmp_path / f"{role}.json"
    path.write_text(json.dumps(json.loads((given / f"{role}.json").read_text()) | changes))
    line = refused(given, "plan", f"--{role}", path, "--out", given / "new.json", searches=role == "model")
    assert str(path) in line or str(given / "profile.h5") in line  # whose profile knows no such model


def test_a_vocabulary_of_10_12_is_refused_or_priced(given, tmp_path):
    raw = json.loads((given / "model.json").read_text())
    raw["types"]["embedding"]["parameters"][0]["shape"][0] = 10**12
    (tmp_path / "model.json").write_text(json.dumps(raw))
    refused(given, "plan", "--model", tmp_path / "model.json", "--out", given / "new.json")


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("plan", "--time-limit inf"),
        ("plan", "--time-limit nan"),
        ("plan", "--time-limit 1e300"),
        ("plan", "--time-limit -1"),
        ("uniform", "--tp 0"),
        ("uniform", "--tp 1000000000000"),
        ("uniform", "--pp 1.5"),
        ("uniform", "--global-batch-size 1000000000000000000"),
        ("uniform", "--global-batch-size 2147483647"),
        ("uniform", "--num-microbatches 1e18"),
        ("uniform", "--num-microbatches 2147483647 --global-batch-size 2147483647"),
        ("uniform", "--layer-ranges 2147483647"),
        ("uniform", "--precision-compute int8"),
        ("uniform", "--schedule ONE_F_ONE_B"),
        ("uniform", "--name a\udcff"),
        ("uniform", "--imbalance 2"),
        ("export", "--to nowhere"),
        ("evaluate", "--time-model none"),
        ("evaluate", "--unknown 1"),
    ],
)
def test_an_option_beyond_all_measure_is_refused(given, command, options):
    refused(given, command, "--out", given / "new.json", *options.split(" "))


@pytest.mark.parametrize("redirection", [">/dev/full", ">&-"])
@pytest.mark.parametrize("command", ["plan", "export", "explain"])
def test_no_success_is_claimed_that_nobody_can_read(given, tmp_path, command, redirection):
    out = f"--out {tmp_path}/new.json" if command in WRITING else ""
    line = f"{sys.executable} -m shardwright_search.cli {COMMANDS[command].format(given)} {out} {redirection}"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300, env=buffered)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("error: standard output: ")
    assert list(tmp_path.iterdir()) == []
