"""What processes that were killed have left of files and folders is removed, and nothing else."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.io import atomic_path, remove_temporaries, write_bytes
from shardwright.io.json import is_gone, this_process
from shardwright.launch.lock import scratch_folder

STRANGERS = (".metrics.jsonl.tmp", ".file.json.00000000.1.tmp", ".file.json.swp", "file.json.tmp", ".tmp")


def _killed(code: str, *arguments: object, **variables: str) -> None:
    """Let a process of its own do something and kill itself."""
    program = f"import os, signal, sys\nfrom pathlib import Path\n{code}\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def _killed_in_a_write(file: Path) -> Path:
    before = set(file.parent.iterdir())
    code = "from shardwright.io.json import atomic_path\nwith atomic_path(Path(sys.argv[1])) as temporary:"
    _killed(f"{code}\n    temporary.write_bytes(b'half')", file)
    (leftover,) = set(file.parent.iterdir()) - before
    return leftover


def test_what_a_kill_left_of_a_file_goes_when_the_file_is_written_again(tmp_path: Path) -> None:
    """That of other files, and of a process that still writes it, stays."""
    file, other = tmp_path / "file.json", tmp_path / "file.json.2"
    of_other = _killed_in_a_write(other)
    leftover = _killed_in_a_write(file)
    for name in STRANGERS:
        (tmp_path / name).touch()
    with atomic_path(file) as temporary:
        temporary.write_bytes(b"first")
        child = os.fork()
        if child == 0:  # a second process writes the same file
            write_bytes(file, b"second")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert temporary.exists() and not leftover.exists()
    assert file.read_bytes() == b"first"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*STRANGERS, "file.json", of_other.name])


def test_of_processes_elsewhere_and_of_other_users_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, pid, start = this_process().split("-")
    gone = (host, pid, str(int(start) + 1))  # an earlier process of this number
    assert not is_gone(tmp_path, host, pid, start) and is_gone(tmp_path, *gone)
    assert not is_gone(tmp_path, f"{int(host, 16) ^ 1:08x}", *gone[1:])
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not is_gone(tmp_path, *gone)


def test_under_a_lock_leftovers_go_whoever_wrote_them(tmp_path: Path) -> None:
    """Such as those that a backup has kept; of an earlier version, too."""
    leftover = _killed_in_a_write(tmp_path / "file.json")
    host, _, rest = leftover.name.partition(".json.")[2].partition(".")[2].partition("-")
    leftover.rename(leftover.with_name(leftover.name.replace(f"{host}-{rest}", f"{int(host, 16) ^ 1:08x}-{rest}")))
    leftover.with_name(leftover.name.replace(f"{host}-{rest}", "4711.tmp")).touch()
    for name in STRANGERS:
        (tmp_path / name).touch()
    write_bytes(tmp_path / "file.json", b"")
    of_other = _killed_in_a_write(tmp_path / "other.json")
    assert len(list(tmp_path.iterdir())) == len(STRANGERS) + 4
    remove_temporaries(tmp_path / "file.json")
    of_other.unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*STRANGERS, "file.json"])


def test_folders_that_killed_commands_left_go_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "from shardwright.launch.lock import scratch_folder\nwith scratch_folder() as folder:\n"
    _killed(f"{code}    (folder / 'rank0.step').touch()", TMPDIR=str(tmp_path))
    (leftover,) = tmp_path.iterdir()
    strangers = [tmp_path / "shardwright-notes", tmp_path / "shardwright-0123abcd-1-2"]
    for stranger in strangers:
        stranger.mkdir()
    leftover.with_name(f"{leftover.name}x").symlink_to(tmp_path)  # of that name, and no folder
    with scratch_folder() as mine, scratch_folder() as second:
        assert mine.is_dir() and second.is_dir() and not leftover.exists()
    assert sorted(tmp_path.iterdir()) == sorted([*strangers, leftover.with_name(f"{leftover.name}x")])
