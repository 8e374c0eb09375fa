"""Commands in a process forked from one that has imported everything, and their ranks, forked from that.

Starting as users do takes each process 4 s of a core before it does anything. All else is as it is for users: the
launcher starts, watches and ends ranks, which are children of its own that can be killed and end with it. Tests of the
start itself (the first of test_train_run.py, one each of test_train_several_nodes.py and test_hardware_sweep.py, the
workflow's) start as users do.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forked_ranks import forking

from shardwright.launch import ranks
from shardwright.launch.heartbeat import RankFiles

__all__ = ["PROFILE", "TRAIN", "Command", "Fault", "forked_command"]

PROFILE, TRAIN = "shardwright_profile", "shardwright_train"
"""The packages whose commands start ranks."""

_FIRST_OWN_FD, _MANY_FDS = 3, 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True)
class Fault:
    """What is done in a rank before it begins its work."""

    rank: int
    make: Callable[[], None]
    """A function of a module that can be imported."""


class Command:
    """A command that was started: what the tests use of subprocess.Popen, and its ranks."""

    def __init__(
        self,
        package: str,
        arguments: Sequence[object],
        environment: Mapping[str, str],
        fault: Fault | None,
        working_folder: Path | None = None,
    ):
        self._kept = tempfile.TemporaryDirectory()
        self._folder = Path(self._kept.name)
        self.args = [package.replace("_", "-"), *map(str, arguments)]
        for name in _STREAMS:  # it may be killed before it has said anything
            (self._folder / name).touch()
        given = (package, self.args, dict(environment), self._folder, fault, working_folder)
        self._process = forking().Process(target=_command, args=given)
        self._process.start()

    @property
    def pid(self) -> int:
        """The launcher's process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, the negative number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Exit status; raises TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it has said until its end, on standard output and standard error."""
        self.wait(timeout)
        stdout, stderr = ((self._folder / name).read_text() for name in _STREAMS)
        return stdout, stderr

    def until_said(self, words: str, timeout: float) -> None:
        """Wait until it has said something on standard error."""
        said, until = self._folder / _STREAMS[1], time.monotonic() + timeout
        while not said.exists() or words not in said.read_text():
            assert self.poll() is None and time.monotonic() < until, self.communicate(timeout)
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        """Signal the launcher alone."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End the launcher alone, at once."""
        self.send_signal(signal.SIGKILL)

    def ranks(self) -> dict[int, tuple[int, RankFiles]]:
        """Process and files of every living rank, by number."""
        started = self._folder / "ranks"
        lines = started.read_text().splitlines() if started.exists() else []
        return {rank: (pid, RankFiles(Path(files))) for rank, pid, files in map(json.loads, lines) if _lives(pid)}


_STREAMS = ("stdout", "stderr")


def forked_command(
    arguments: Sequence[object],
    environment: Mapping[str, str] | None = None,
    fault: Fault | None = None,
    package: str = TRAIN,
    working_folder: Path | None = None,
) -> Command:
    """The command of a package with these arguments, in this process's environment and what is given of one."""
    return Command(package, arguments, os.environ | (environment or {}), fault, working_folder)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _command(
    package: str,
    words: list[str],
    environment: dict[str, str],
    folder: Path,
    fault: Fault | None,
    working_folder: Path | None,
) -> None:
    if working_folder is not None:
        os.chdir(working_folder)
    for number, name in enumerate(_STREAMS, start=1):
        said = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, number)
        os.close(said)
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE")}
    start = partial(_rank, folder / "ranks", fault)
    ranks.subprocess = SimpleNamespace(Popen=start, **names)  # type: ignore[assignment]
    _as_if_executed(environment)
    sys.argv = words
    importlib.import_module(f"{package}.cli").main()


def _rank(
    started: Path, fault: Fault | None, command: Sequence[str], *, env: Mapping[str, str], **options: Any
) -> "_Forked":
    executed, option, module, *arguments = command
    assert (executed, option) == (sys.executable, "-m"), command
    process = _Forked(partial(_work, module, arguments, env, fault), **options)
    with started.open("a") as file:
        file.write(json.dumps([int(env["RANK"]), process.pid, env["SHARDWRIGHT_RANK_FILES"]]) + "\n")
    return process


def _work(module: str, arguments: Sequence[str], environment: Mapping[str, str], fault: Fault | None) -> None:
    _as_if_executed(environment)
    if fault is not None and environment["RANK"] == str(fault.rank):
        fault.make()
    importlib.import_module(module).main(*arguments)


def _as_if_executed(environment: Mapping[str, str]) -> None:
    """Streams, signals and environment as a program that has just been executed has them."""
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python starts; subprocess has set it back
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update(environment)


class _Forked(subprocess.Popen[bytes]):
    """A child that calls something in place of executing a program."""

    def __init__(self, do: Callable[[], None], **options: Any) -> None:
        super().__init__([sys.executable], preexec_fn=partial(_become, do), **options)


def _become(do: Callable[[], None]) -> None:
    """Do something and end, in a child whose standard streams are in place and whose parent waits for it to execute."""
    status = 1
    try:
        os.closerange(_FIRST_OWN_FD, _MANY_FDS)  # as executing would; the parent waits for that
        do()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
