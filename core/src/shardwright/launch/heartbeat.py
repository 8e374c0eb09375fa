"""Files in which a rank reports its current step, stacks, collectives and final error to its launcher.

Each is a small file in a folder of the launcher. Only the launcher decides what is a hang, so that all ranks of a node
show their stacks at the same time, and no rank ends before the others have shown theirs. They are files, not sockets,
because files can be read no matter how a rank hangs.
"""

import ctypes
import faulthandler
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeGuard

import msgspec

from shardwright.io import OutOfMemory, RunFailed, ShardwrightError, system_fault, write_bytes
from shardwright.launch.collectives import RankCollectives, collectives_of
from shardwright.launch.signals import outlive_terminal

HANG_TIMEOUT_S = 600.0
"""Default limit of a step's time in seconds: an assumption."""
START_UP_S = 600.0
"""Seconds that the ranks have to start and connect: an assumption."""
STACKS_SIGNAL = signal.SIGUSR2
COLLECTIVES_SIGNAL = signal.SIGRTMIN

_FILES, _LAUNCHER = "SHARDWRIGHT_RANK_FILES", "SHARDWRIGHT_LAUNCHER"
_RECORD_BYTES = 256
_TEXT_CHARACTERS = 500
_PR_SET_PDEATHSIG = 1
# Messages of gloo, NCCL and the store if the rank at the other end is gone.
_LOST_CONNECTION = re.compile(
    r"connection (was likely )?(closed|reset|refused)|broken pipe|remote process exited|ncclRemoteError", re.IGNORECASE
)


class Step(msgspec.Struct, frozen=True):
    """The current activity of a rank, such as `in step 3`, and its start (`time.monotonic`, one clock per node)."""

    began_s: float
    where: str


class Asked(msgspec.Struct, frozen=True):
    """A memory request that a device could not satisfy."""

    subject: str
    """Purpose of the memory."""
    asked_bytes: int | None
    """Requested bytes; None if unknown."""


class RankError(msgspec.Struct, frozen=True, kw_only=True):
    """The error with which a rank ends, recorded before its peers notice that it is gone."""

    time_s: float
    """Seconds by `time.monotonic` when the error was recorded."""
    text: str
    exit_code: int | None = None
    """Exit code of an error that ends a command with one line; None for any other error."""
    lost_connection: bool = False
    """Whether the error is a lost connection, because another rank had ended before."""
    trace: str = ""
    asked: Asked | None = None
    """The memory request; only set if a device ran out of memory."""


@dataclass(frozen=True)
class RankFiles:
    """The files of one rank, which the launcher reads; their names share the prefix `beginning`."""

    beginning: Path

    @classmethod
    def of_rank(cls, folder: Path, rank: int) -> "RankFiles":
        """Return the files of a rank in the launcher's folder."""
        return cls(folder / f"rank{rank}")

    @classmethod
    def of_environment(cls) -> "RankFiles":
        """Return the files of this rank, which an environment variable of the launcher specifies."""
        return cls(Path(os.environ[_FILES]))

    @property
    def store_file(self) -> Path:
        """Return the file through which the ranks of a single node connect; all ranks use the same file."""
        return self.beginning.with_name("store")

    @property
    def meeting_file(self) -> Path:
        """Return the file with the address at which the ranks of several nodes meet; absent on a single node."""
        return self.beginning.with_name("meeting.json")

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables that specify a rank's files and its launcher."""
        return {_FILES: str(self.beginning), _LAUNCHER: str(os.getpid())}

    @property
    def step_file(self) -> Path:
        """Return the file of the current step: one record of fixed length, overwritten at every step."""
        return self.beginning.with_suffix(".step")

    @property
    def stacks_file(self) -> Path:
        """Return the file with the stacks of all threads of the rank, written on STACKS_SIGNAL."""
        return self.beginning.with_suffix(".stacks")

    @property
    def collectives_file(self) -> Path:
        """Return the file of the flight recorder's trace, written after the rank has received COLLECTIVES_SIGNAL."""
        return self.beginning.with_suffix(".collectives")

    @property
    def error_file(self) -> Path:
        """Return the file of the rank's RankError, as JSON."""
        return self.beginning.with_suffix(".error")

    def step(self) -> Step | None:
        """Return the rank's current step; None before it has joined the others."""
        record = _text(self.step_file)
        while (again := _text(self.step_file)) != record:  # it was being overwritten
            record = again
        began_s, _, where = record.partition(" ")
        return Step(float(began_s), where) if record else None

    def stacks(self) -> str:
        """Return the stacks that the rank has written; empty if there are none."""
        return _text(self.stacks_file)

    def collectives(self) -> RankCollectives | None:
        """Return the rank's progress in its process groups; None if it has written nothing readable."""
        if not self.collectives_file.exists():
            return None
        try:
            return collectives_of(self.collectives_file.read_bytes())
        except msgspec.MsgspecError:  # from a version of PyTorch with another format
            return None

    def error(self) -> RankError | None:
        """Return the error with which the rank ends; None if it has not recorded one."""
        if not self.error_file.exists():
            return None
        return msgspec.json.decode(self.error_file.read_bytes(), type=RankError)


def _text(file: Path) -> str:
    """Return the text of a rank's file without surrounding spaces; empty if there is no file."""
    return file.read_text(errors="replace").strip() if file.exists() else ""


class Heartbeat:
    """A rank's side of its files: it records the rank's current step and the error with which it ends."""

    def __init__(self, files: RankFiles) -> None:
        self._files = files
        self._record = files.step_file.open("wb", buffering=0)

    @classmethod
    def of_environment(cls) -> "Heartbeat":
        """Return the heartbeat for the files that the launcher's environment specifies."""
        return cls(RankFiles.of_environment())

    def begin(self, where: str) -> None:
        """Record the rank's activity from now on, such as `in step 3`; the time allowed for a step restarts."""
        record = f"{time.monotonic()} {' '.join(where.split())}".encode()[:_RECORD_BYTES].ljust(_RECORD_BYTES)
        os.pwrite(self._record.fileno(), record, 0)

    def answer(self, collectives: Callable[[], bytes]) -> None:
        """Write what `collectives` returns whenever the launcher asks, in a thread that runs until the rank ends.

        The thread waits for the signal, which `start_rank` blocks in all threads: a thread that waits inside a library
        lets this one run.
        """

        def show() -> None:
            while True:
                signal.sigwait({COLLECTIVES_SIGNAL})
                write_bytes(self._files.collectives_file, collectives())

        threading.Thread(target=show, name="collectives", daemon=True).start()

    def note(
        self, _kind: type[BaseException] | None, error: BaseException | None, _where: TracebackType | None
    ) -> None:
        """Record the exception with which a block ends, if it is the first; for `ExitStack.push`."""
        if isinstance(error, Exception) and not self._files.error_file.exists():
            write_bytes(self._files.error_file, msgspec.json.encode(_noted(error)))


def _noted(error: Exception) -> RankError:
    now_s, text = time.monotonic(), " ".join(str(error).split())
    if _is_fault(error):
        return RankError(time_s=now_s, exit_code=RunFailed.exit_code, text=str(system_fault(error)))
    if isinstance(error, ShardwrightError):
        asked = Asked(error.subject, error.asked_bytes) if isinstance(error, OutOfMemory) else None
        return RankError(time_s=now_s, exit_code=error.exit_code, text=text, asked=asked)
    return RankError(
        time_s=now_s,
        text=f"{type(error).__name__}: {text[:_TEXT_CHARACTERS]}",
        lost_connection=_is_lost_connection(error),
        trace="".join(traceback.format_exception(error)),
    )


def _is_lost_connection(error: Exception) -> bool:
    return _LOST_CONNECTION.search(" ".join(str(error).split())) is not None


def _is_fault(error: BaseException) -> TypeGuard[OSError]:
    """Return whether the operating system reported a fault, such as a full disk; a lost peer is not a fault."""
    return isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError)


@contextmanager
def end_quietly() -> Iterator[None]:
    """End this rank without a traceback if the cause is an orderly error, or that another rank ended.

    The launcher reports the cause in one line.
    """
    try:
        yield
    except ShardwrightError as error:
        raise SystemExit(error.exit_code) from None
    except (RuntimeError, OSError) as error:
        if not (_is_fault(error) if isinstance(error, OSError) else _is_lost_connection(error)):
            raise
        raise SystemExit(RunFailed.exit_code) from None


def start_rank() -> None:
    """Make this rank show stacks when asked, end with its launcher, and outlive its terminal: a rank's first call.

    The first two work even while the interpreter is stuck in a call of a library. Raises OSError if the system has no
    PR_SET_PDEATHSIG (Linux 2.1.57 or later).
    """
    outlive_terminal()
    signal.pthread_sigmask(signal.SIG_BLOCK, {COLLECTIVES_SIGNAL})  # in all threads, except the one that waits for it
    files = RankFiles.of_environment()
    faulthandler.register(STACKS_SIGNAL, file=files.stacks_file.open("w"), all_threads=True, chain=False)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG) failed ({os.strerror(number)})")
    if os.getppid() != int(os.environ[_LAUNCHER]):  # it ended before it could be watched
        os.kill(os.getpid(), signal.SIGKILL)
