"""A sweep that is killed goes on, and its file is as one of an unbroken sweep."""

import time
from pathlib import Path

import h5py
import pytest
from forked_command import PROFILE, Command, Fault, forked_command
from sweep_faults import stop_once_written

from shardwright.io import read_document, write_document
from shardwright.io.versions import versions_text
from shardwright.launch.journal import Journal, Kept, journal_path
from shardwright.types import Cluster
from shardwright.types.hardware_profile import read_hardware_profile
from shardwright_profile.hardware.profile import JOURNAL, StartEntry, SweepIdentity

_POINTS = 5 * 4
_PAIRS = 2
_OVERLAPS = 4 * 2 * 3
_LINES = 1 + 1 + 2 + 2 + _POINTS + _PAIRS + _OVERLAPS
"""Of a whole journal: header, start-up, rates, layers, points, pairs, overlaps."""


@pytest.fixture(scope="module")
def cluster(make_cluster, tmp_path_factory):
    path = tmp_path_factory.mktemp("cluster") / "cluster.json"
    write_document(path, make_cluster((1, 2)))
    return path


def _start(cluster: Path, out: Path, *options: object, fault: Fault | None = None) -> Command:
    # 64 KiB and 5 repeats: whatever the machine does, every sweep has the same points and repeats.
    arguments = ["--cluster", cluster, "--time-budget", 0.1, "--max-bytes", 65536, "--max-repeats", 5, "--out", out]
    variables = {"OMP_NUM_THREADS": "1", "TMPDIR": str(out.parent)}
    return forked_command(["hardware", *arguments, *options], variables, fault, package=PROFILE)


def _finished(sweep: Command) -> str:
    _, errors = sweep.communicate(timeout=300)
    assert sweep.returncode == 0, errors
    return errors


def _killed_after(sweep: Command, journal: Path, lines: int) -> bytes:
    """Kill the launcher when the journal has so many lines, and return what is in it when its ranks are gone too."""
    until = time.monotonic() + 150
    while not journal.exists() or journal.read_bytes().count(b"\n") < lines:
        assert sweep.poll() is None
        assert time.monotonic() < until
        time.sleep(0.0005)
    sweep.kill()
    sweep.communicate(timeout=300)
    while sweep.ranks():
        assert time.monotonic() < until
        time.sleep(0.01)
    return journal.read_bytes()


def _outline(path: Path) -> dict[str, object]:
    """Every dataset with its dtype, shape and attributes, and the file's attributes but for day and findings."""
    with h5py.File(path) as file:
        found: dict[str, object] = {name: value for name, value in file.attrs.items() if name not in ("date", "notes")}
        found["attributes"] = sorted(file.attrs)

        def note(name: str, item: h5py.Group | h5py.Dataset) -> None:
            shape = (item.dtype, item.shape, item.fletcher32) if isinstance(item, h5py.Dataset) else ()
            found[name] = (*shape, dict(item.attrs))

        file.visititems(note)
    return found


@pytest.fixture(scope="module")
def unbroken(cluster, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "hardware.h5"
    _finished(_start(cluster, out))
    return _outline(out)


def test_an_unbroken_sweep_has_every_table(unbroken):
    rows = {name: value[1][0] for name, value in unbroken.items() if name.endswith(("/source", "/time_s"))}
    assert rows == {
        "points/source": _POINTS,
        "repeats/time_s": 5 * _POINTS,
        "pairs/source": _PAIRS,
        "pairs/time_s": _PAIRS,
        "overlap/source": _OVERLAPS,
        "ranks/source": 2 * 4,
        "rates/source": 5,
    }


# In the rates, in the points, among the overlaps, and torn in the middle of a line besides.
@pytest.mark.parametrize(("lines", "torn"), [(3, False), (11, True), (_LINES - 12, False)])
def test_a_killed_sweep_goes_on_and_ends_as_an_unbroken_one(cluster, unbroken, tmp_path, lines, torn):
    out = tmp_path / "hardware.h5"
    journal = tmp_path / "hardware.h5.journal"
    kept = _killed_after(_start(cluster, out), journal, lines)
    assert not out.exists()
    if torn:
        kept = kept[: kept.rindex(b"\n", 0, -1) + 20]
        journal.write_bytes(kept)
    errors = _finished(_start(cluster, out))
    entries = kept.count(b"\n") - 1
    assert f"{entries} measurements of a killed sweep are kept" in errors
    assert not journal.exists()
    assert _outline(out) == unbroken
    _assert_what_was_kept_is_in_the_profile(kept, out)


def _assert_what_was_kept_is_in_the_profile(journal: bytes, out: Path) -> None:
    times = set(read_hardware_profile(out).repeats["time_s"].tolist())
    whole_lines = journal[: journal.rindex(b"\n")].decode()
    for line in whole_lines.splitlines():
        if '"type":"point"' in line:
            listed = line.split('"times_s":[')[1].split("]")[0].split(",")
            assert {float(time_s) for time_s in listed} <= times


def test_the_journal_of_another_sweep_is_one_line_and_nothing_is_started(
    cluster, command, one_error_line, make_cluster, tmp_path
):
    out = tmp_path / "hardware.h5"
    identity = SweepIdentity(
        cluster=read_document(cluster, Cluster),
        backend="gloo",
        min_bytes=1024,
        max_bytes=65536,
        max_repeats=5,
        versions=versions_text(("torch",), on_gpu=False),
    )
    Journal(journal_path(out), JOURNAL, identity, Kept()).add([StartEntry(time_s=1.0)])
    write_document(tmp_path / "other.json", make_cluster((1, 1)))
    before = set(tmp_path.iterdir())
    arguments = ("--cluster", tmp_path / "other.json", "--time-budget", 1, "--out", out)
    line = one_error_line(command("hardware", *arguments), 2, tmp_path, before)
    assert line == (
        f"error: {out}.journal: belongs to a killed sweep with another cluster, max_bytes, max_repeats: "
        "delete it to measure again"
    )


def test_a_sweep_stopped_once_its_file_is_written_says_so(cluster, tmp_path):
    sweep = _start(cluster, tmp_path / "hardware.h5", fault=Fault(0, stop_once_written))
    assert "error" not in _finished(sweep)
    assert read_hardware_profile(tmp_path / "hardware.h5").cluster == "toys"
    assert not journal_path(tmp_path / "hardware.h5").exists()
