"""A run has one lock, which its first node holds and which harms nothing that stands in its way."""

import errno
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from shardwright.io import BadInput
from shardwright.launch.lock import only_run
from shardwright.launch.nodes import Nodes

FIRST, SECOND = Nodes(2, 0, "host:1"), Nodes(2, 1, "host:1")


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    file = tmp_path / "new" / "LOCK"
    with only_run(file, Nodes()):
        with (
            pytest.raises(
                BadInput, match=rf"LOCK: another run is using it \(.+, process {os.getpid()}, since 20.+\): wait"
            ),
            only_run(file, FIRST),
        ):
            pass
    with only_run(file, FIRST):
        assert file.exists()
    assert not file.exists()


def test_the_second_node_of_a_run_takes_no_lock(tmp_path: Path) -> None:
    with only_run(tmp_path / "LOCK", FIRST), only_run(tmp_path / "LOCK", SECOND):
        pass
    with only_run(tmp_path / "other" / "LOCK", SECOND):
        assert not (tmp_path / "other").exists()


def test_a_lock_ends_with_the_process_that_held_it(tmp_path: Path) -> None:
    file = tmp_path / "LOCK"
    code = f"""
from pathlib import Path
from shardwright.launch.lock import only_run
from shardwright.launch.nodes import Nodes
with only_run(Path({str(file)!r}), Nodes()):
    print(flush=True)
    input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(BadInput, match=rf"process {holder.pid}, "), only_run(file, Nodes()):
            pass
        holder.kill()
    assert file.exists()
    with only_run(file, Nodes()):
        assert f"process {os.getpid()}, " in file.read_text()


def test_a_file_system_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with (
        pytest.raises(BadInput, match=r"LOCK: cannot be locked \(No locks available\)"),
        only_run(tmp_path / "LOCK", Nodes()),
    ):
        pass


def test_what_a_symbolic_link_points_to_is_neither_opened_nor_cut(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("work of years")
    (tmp_path / "LOCK").symlink_to(tmp_path / "precious")
    with pytest.raises(BadInput, match="LOCK: cannot be opened"), only_run(tmp_path / "LOCK", Nodes()):
        pass
    assert (tmp_path / "precious").read_text() == "work of years"


def test_what_a_hard_link_is_another_name_of_is_not_cut(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("work of years")
    (tmp_path / "LOCK").hardlink_to(tmp_path / "precious")
    with pytest.raises(BadInput, match="LOCK: is a hard link to another file"), only_run(tmp_path / "LOCK", Nodes()):
        pass
    assert (tmp_path / "precious").read_text() == "work of years"


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "LOCK")
    with pytest.raises(BadInput, match="LOCK: is not a regular file"), only_run(tmp_path / "LOCK", Nodes()):
        pass
    (tmp_path / "file").write_text("")
    for file in (tmp_path, tmp_path / "file" / "LOCK"):
        with pytest.raises(BadInput, match="cannot be opened"), only_run(file, Nodes()):
            pass


def test_a_lock_that_was_removed_or_replaced_is_not_held_any_more(tmp_path: Path) -> None:
    """The second run's lock outlives the end of the first."""
    file = tmp_path / "LOCK"
    with ExitStack() as first:
        (held,) = first.enter_context(only_run(file, Nodes()))
        held.check()
        file.unlink()
        with pytest.raises(BadInput, match="LOCK: was removed or replaced while this run held it"):
            held.check()
        with only_run(file, Nodes()) as second:
            with pytest.raises(BadInput, match="LOCK: was removed or replaced"):
                held.check()
            first.close()
            second[0].check()
            with pytest.raises(BadInput, match="another run is using it"), only_run(file, Nodes()):
                pass
    assert not file.exists()
