"""Owners of temporary files and folders: process names that let files of killed processes be removed."""

import os
import socket
from pathlib import Path
from zlib import crc32

OWNER = r"(?P<host>[0-9a-f]{8})-(?P<pid>[1-9][0-9]*)-(?P<start>[0-9]+)"
"""Pattern of an owner in a file's name."""
_START = 19
"""Place of a process's start time in /proc/*/stat, after the name (proc(5))."""


def this_process() -> str:
    """Return the unique name of this process: its host, its process id, and its start time."""
    return f"{_host()}-{os.getpid()}-{_start_of(os.getpid())}"


def is_gone(path: Path, host: str, pid: str, start: str) -> bool:
    """Return whether a path is this user's and was made by a process of this host that has ended.

    Nothing is known of processes of other hosts and containers, which may share the folder.
    """
    return host == _host() and start != _start_of(int(pid)) and os.lstat(path).st_uid == os.geteuid()


def _host() -> str:
    """A name of this host and of its space of process numbers, which a container has for itself."""
    place = f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return f"{crc32(place.encode()):08x}"


def _start_of(pid: int) -> str | None:
    """When a process was started, in ticks since the machine was; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[_START]
    except (FileNotFoundError, ProcessLookupError):
        return None
