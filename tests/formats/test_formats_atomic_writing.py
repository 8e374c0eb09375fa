"""A file is whole, or what it was before."""

import os
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from shardwright.io import BadInput, atomic_path, check_writable, write_bytes, write_document
from shardwright.types import Cluster, NodeGroup, NodeType
from shardwright.types.hardware_profile import read_hardware_profile, write_hardware_profile

EXAMPLES = Path(__file__).parents[2] / "core" / "examples"
CLUSTER = Cluster(
    name="one",
    nodes=(NodeGroup(node_type="n", count=1),),
    node_types={"n": NodeType(device="cpu", devices_per_node=1, memory_bytes=1)},
)


def test_a_crash_in_the_middle_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    with pytest.raises(ZeroDivisionError), atomic_path(path) as temporary:
        temporary.write_bytes(b"half of the n")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_is_on_the_disk_before_it_takes_its_name_and_its_name_is_on_the_disk_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, synced, renamed = list[str](), os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        done.append("folder" if Path(f"/proc/self/fd/{descriptor}").resolve() == tmp_path else "file")
        synced(descriptor)

    def replace(source: Path, target: Path) -> None:
        done.append("name")
        renamed(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_bytes(tmp_path / "file", b"new")
    assert done == ["file", "name", "folder"]


def test_two_long_names_that_begin_alike_are_written_at_once(tmp_path: Path) -> None:
    one, other = tmp_path / f"{'a' * 64}.json", tmp_path / f"{'a' * 64}.prediction.json"
    with atomic_path(one) as first, atomic_path(other) as second:
        first.write_bytes(b"one")
        second.write_bytes(b"other")
    assert (one.read_bytes(), other.read_bytes()) == (b"one", b"other")


def test_a_crash_while_an_hdf5_file_is_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = read_hardware_profile(EXAMPLES / "hardware_profile.h5")
    write, written = h5py.Group.create_dataset, []

    def crash_later(group: h5py.Group, name: str, **how: object) -> h5py.Dataset:
        written.append(name)
        if len(written) > 5:
            raise ZeroDivisionError
        return write(group, name, **how)

    monkeypatch.setattr(h5py.Group, "create_dataset", crash_later)
    with pytest.raises(ZeroDivisionError):
        write_hardware_profile(tmp_path / "p.h5", profile)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("limit", [0, 512, 4096, 9000])
def test_an_hdf5_file_that_does_not_fit_is_one_line_and_leaves_nothing(tmp_path: Path, limit: int) -> None:
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from shardwright.io.errors import one_line_errors\n"
        "from shardwright.types.hardware_profile import read_hardware_profile, write_hardware_profile\n"
        "profile = read_hardware_profile(Path(sys.argv[1]))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)\n"
        "with one_line_errors():\n"
        "    write_hardware_profile(Path(sys.argv[2]), profile)\n"
    )
    arguments = [str(EXAMPLES / "hardware_profile.h5"), str(tmp_path / "h.h5"), str(limit)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"error: {tmp_path / 'h.h5'}: File too large: ")
    assert os.listdir(tmp_path) == []


def test_the_new_file_is_not_seen_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_rename_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(BadInput, match=r"c\.json: no space"):
        write_document(tmp_path / "c.json", CLUSTER)
    assert os.listdir(tmp_path) == []


def test_a_document_with_nan_is_not_written(tmp_path: Path) -> None:
    priced = NodeType(device="cpu", devices_per_node=1, memory_bytes=1, usd_per_hour=float("nan"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_document(tmp_path / "c.json", Cluster(name="c", nodes=CLUSTER.nodes, node_types={"n": priced}))
    assert os.listdir(tmp_path) == []


def test_missing_folders_are_made(tmp_path: Path) -> None:
    write_document(tmp_path / "a" / "b" / "c.json", CLUSTER)
    assert (tmp_path / "a" / "b" / "c.json").is_file()


def test_a_place_that_is_asked_for_before_long_work_stays_as_it_is(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b" / "c.json")
    assert os.listdir(tmp_path) == []
    for name in ("x" * 256, f"new/{'x' * 256}/c.json", f"new/{'y/' * 3000}c.json"):
        with pytest.raises(BadInput, match="choose a shorter name"):
            check_writable(tmp_path / name)
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=f"{tmp_path}/file/a/c.json: Not a directory"):
        check_writable(tmp_path / "file" / "a" / "c.json")
    assert os.listdir(tmp_path) == ["file"]


def test_a_place_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "c.json", tmp_path / "folder"):
        with pytest.raises(BadInput, match=str(path)):
            write_document(path, CLUSTER)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
