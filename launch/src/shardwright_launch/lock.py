"""One run at a time: a lock that is held by one process and let go when that process ends, however it ends."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwright_formats.io.errors import BadInput
from shardwright_launch.nodes import Nodes


@contextmanager
def only_run(file: Path, nodes: Nodes) -> Iterator[None]:
    """Hold the lock `file` of a run on node 0; the run's other nodes take none, for they may share its folder.

    A symbolic link is not followed, and what stands in the file is left alone. BadInput where another run holds it.
    """
    if nodes.rank:
        yield
        return
    descriptor = _locked(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(file: Path) -> int:
    while True:
        descriptor = _opened(file)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(file, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise BadInput(file, "another run is using it", "wait for it or stop it") from None
        os.close(descriptor)  # the run before removed the file as this one opened it


def _opened(file: Path) -> int:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BadInput(file, f"cannot be opened ({error.strerror})", "remove it, or choose another folder") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadInput(file, "is no regular file", "remove it, or choose another folder")
    return descriptor


def _is_still(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False
