"""The lock that allows only one run at a time in a folder, and scratch folders.

A lock is released when its process ends, for whatever reason: it is flock(2), which the kernel releases. On NFS, Linux
turns it into a lock on the server, for all clients: if a machine is lost, NFSv4's server releases its locks when the
lease ends (90 s by default).
"""

import errno
import fcntl
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from shardwright.io import BadInput, Value
from shardwright.io.json import OWNER, is_gone, this_process
from shardwright.launch.nodes import Nodes

_MAX_WHO_BYTES = 300
_PREFIX = "shardwright-"
_NAME = re.compile(rf"{_PREFIX}{OWNER}-[a-z0-9_]+")


class HeldLock(Value, frozen=True, kw_only=True):
    """A lock that this run holds as long as the lock file's name still refers to the file that it opened."""

    file: str
    device: int
    inode: int
    """Inode of the lock file; no other file can have it while the lock is held."""

    def check(self) -> None:
        """Raise BadInput if the file was removed or replaced, so that another run may have taken the name since."""
        if not _is_still(Path(self.file), (self.device, self.inode)):
            problem = "was removed or replaced while this run held it, so another may be at work here"
            raise BadInput(self.file, problem, "let one run end, then start this one again")


@contextmanager
def only_run(file: Path, nodes: Nodes) -> Iterator[tuple[HeldLock, ...]]:
    """Hold the lock `file` of a run on node 0; other nodes take no lock, because they may use the same folder.

    A symbolic link is not followed, and a hard link is not written to. The file contains the name of its holder. If
    another run holds the lock, BadInput is raised, which states the holder. Yields the held locks, for code that writes
    under them.
    """
    if nodes.rank:
        yield ()
        return
    descriptor = _locked(file)
    held = _identity(descriptor)
    try:
        yield (HeldLock(file=str(file.absolute()), device=held[0], inode=held[1]),)
    finally:
        if _is_still(file, held):
            file.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(file: Path) -> int:
    while True:
        descriptor = _opened(file)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(file, _identity(descriptor)):
                _say_who(descriptor)
                return descriptor
        except OSError as error:
            problem = _refusal(file, descriptor, error)
            os.close(descriptor)
            raise problem from None
        os.close(descriptor)  # the previous run removed the file while this one opened it


def _say_who(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    os.pwrite(descriptor, f"{socket.gethostname()}, process {os.getpid()}, since {now}\n".encode(), 0)


def _refusal(file: Path, descriptor: int, error: OSError) -> BadInput:
    if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):  # such as ENOLCK: a file system without locks
        problem = f"cannot be locked ({error.strerror})"
        return BadInput(file, problem, "choose a folder on a file system with flock(2), such as NFS with its locks on")
    holder = os.pread(descriptor, _MAX_WHO_BYTES, 0).decode(errors="replace").strip()
    return BadInput(file, f"another run is using it{holder and f' ({holder})'}", "wait for it or stop it")


def _opened(file: Path) -> int:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BadInput(file, f"cannot be opened ({error.strerror})", "remove it, or choose another folder") from None
    opened = os.fstat(descriptor)
    if not stat.S_ISREG(opened.st_mode) or opened.st_nlink > 1:
        os.close(descriptor)
        problem = "is a hard link to another file" if stat.S_ISREG(opened.st_mode) else "is not a regular file"
        raise BadInput(file, problem, "remove it, or choose another folder")
    return descriptor


def _identity(descriptor: int) -> tuple[int, int]:
    opened = os.fstat(descriptor)
    return opened.st_dev, opened.st_ino


def _is_still(file: Path, identity: tuple[int, int]) -> bool:
    try:
        named = os.lstat(file)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == identity


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield an empty folder that is removed at the end; leftovers of killed commands are removed first."""
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{this_process()}-") as folder:
        yield Path(folder)


def _sweep(temporary: Path) -> None:
    for path in temporary.glob(f"{_PREFIX}*"):
        if name := _NAME.fullmatch(path.name):
            with suppress(FileNotFoundError):  # another command may be removing it
                if is_gone(path, **name.groupdict()):
                    shutil.rmtree(path, ignore_errors=True)
