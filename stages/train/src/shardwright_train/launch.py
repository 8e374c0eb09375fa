"""Starting one process per device of this node, passing on signals, and saying in one line how a rank ended."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from shardwright_formats.errors import BadInput, NothingFits, RunFailed, Stopped

__all__ = ["Nodes", "launch"]

_KNOWN_EXITS = {error.exit_code for error in (BadInput, NothingFits, RunFailed, Stopped)}
_GRACE_S = 20.0
_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_INTERRUPTED = 130


@dataclass(frozen=True)
class Nodes:
    """Which node of how many this is, and where the first one listens (`host:port`; None on a single node)."""

    count: int = 1
    rank: int = 0
    rendezvous: str | None = None

    def __post_init__(self) -> None:
        if self.count > 1 and self.rendezvous is None:
            raise BadInput("--rendezvous", "absent with several nodes", "give host:port of the first node")
        if not 0 <= self.rank < self.count:
            raise BadInput("--node-rank", f"{self.rank} is not below --nnodes {self.count}", "number nodes from 0")


def launch(command: Sequence[str], processes: int, first_rank: int, world_size: int, nodes: Nodes) -> None:
    """Run `command` once per device with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.

    The cores this process may use are shared out evenly among the ranks' threads.

    SIGINT, SIGTERM and SIGUSR1 go on to every process; a second one ends them at once. When a process fails, the
    others get a grace period and are ended. Ends by SystemExit with the first failure's own exit code, whose line that
    process has already printed, or raises RunFailed naming the rank that died of something else.
    """
    host, port = nodes.rendezvous.rsplit(":", 1) if nodes.rendezvous else ("127.0.0.1", str(_free_port()))
    # Whatever the caller's own environment says: more threads than cores make the ranks wait for one another.
    threads = str(max(1, len(os.sched_getaffinity(0)) // processes))
    children = [
        subprocess.Popen(
            command,
            start_new_session=True,  # a terminal's Ctrl-C reaches this process alone, which passes it on in order
            env=os.environ
            | {
                "RANK": str(first_rank + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": host,
                "MASTER_PORT": port,
            }
            | dict.fromkeys(_THREAD_COUNTS, threads),
        )
        for local in range(processes)
    ]
    with _signals_passed_on(children) as signalled:
        try:
            failed = _first_failure(children)
            if failed is not None:
                _end(children, _GRACE_S)
        finally:
            _end(children, 0.0)
    if failed is None:
        return
    status = children[failed].returncode
    if status < 0 and signalled:
        raise Stopped("stopped before the first step: run the same command again")
    if status in _KNOWN_EXITS:
        raise SystemExit(status)
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    raise RunFailed(f"rank {first_rank + failed}: {how}: its last words stand above")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _first_failure(children: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """The process that failed first, as far as can be seen, or None when all ended well."""
    while True:
        statuses = [child.poll() for child in children]
        failures = [i for i, status in enumerate(statuses) if status]
        if failures:
            # A rank that dies makes its peers fail: those killed by a signal come first, then known exits.
            return min(failures, key=lambda i: (statuses[i] or 0) if (statuses[i] or 0) < 0 else 1)
        if all(status == 0 for status in statuses):
            return None
        time.sleep(0.05)


def _end(children: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(0.05)
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait()


@contextmanager
def _signals_passed_on(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    seen: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            _end(children, 0.0)
            sys.exit(_INTERRUPTED)
        for child in children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
