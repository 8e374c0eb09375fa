"""Starting one process per device of this node, passing on signals, and saying in one line how a launch failed."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from shardwright_formats.io.errors import BadInput, RunFailed
from shardwright_train.verdict import Evidence, verdict
from shardwright_train.watch import STACKS_SIGNAL, START_UP_S, RankFiles

__all__ = ["Nodes", "launch"]

_POLL_S = 0.05
_ORDERLY_END_S = 20.0
"""What the other ranks have to end by themselves when one reported an error that they may all have agreed on."""
_OTHER_END_S = 2.0
"""What they have when one failed otherwise: enough to see which of them failed first."""
_STACKS_S = 2.0
"""What the ranks have to show their stacks; on several nodes, for the other launchers to see the hang as well."""
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


@dataclass
class _Rank:
    """A rank's process, and what it lets the launcher see."""

    number: int
    files: RankFiles
    process: "subprocess.Popen[bytes]"
    status: int | None = None
    """How it ended, unless the launcher ended it."""
    seen_s: float = 0.0

    def look(self) -> int | None:
        """Its exit status, None while it runs."""
        if self.status is None and (status := self.process.poll()) is not None:
            self.status, self.seen_s = status, time.monotonic()
        return self.status

    def evidence(self) -> Evidence:
        return Evidence(self.number, self.status, self.seen_s, self.files.step(), self.files.error())


def launch(
    command: Sequence[str],
    processes: int,
    first_rank: int,
    world_size: int,
    nodes: Nodes,
    hang_timeout_s: float | None = None,
) -> None:
    """Run `command` once per device with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.

    The cores this process may use are shared out evenly among the ranks' threads.

    SIGINT, SIGTERM and SIGUSR1 go on to every process; a second one ends them at once. When a process fails, the
    others get a short time to end and are killed; no process outlives this one. With `hang_timeout_s`, ranks that take
    longer from one `Watch.begin` to the next show their stacks on standard error and are killed.

    Raises RunFailed naming the rank that failed first. An error that ranks reported in order is printed in one line and
    ends by SystemExit with its exit code; so does a signal that came before they could stop in order.
    """
    host, port = nodes.rendezvous.rsplit(":", 1) if nodes.rendezvous else ("127.0.0.1", str(_free_port()))
    # Whatever the caller's own environment says: more threads than cores make the ranks wait for one another.
    threads = str(max(1, len(os.sched_getaffinity(0)) // processes))
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": host, "MASTER_PORT": port}
    environment = os.environ | shared | dict.fromkeys(_THREAD_COUNTS, threads)
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory() as folder, _signals_passed_on(ranks) as signalled:
        try:
            for local in range(processes):
                number = first_rank + local
                files = RankFiles.of_rank(Path(folder), number)
                place = {"RANK": str(number), "LOCAL_RANK": str(local)} | files.environment
                # In a session of its own: a terminal's Ctrl-C reaches this process alone, which passes it on in order.
                process = subprocess.Popen(command, start_new_session=True, env=environment | place)
                ranks.append(_Rank(number, files, process))
            if signalled:  # while some were yet to be started
                _ask_to_stop(ranks)
            failed = _wait(ranks, hang_timeout_s)
        finally:
            _kill(ranks)
        if failed:
            _fail(ranks, nodes, bool(signalled))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(ranks: Sequence[_Rank], hang_timeout_s: float | None) -> bool:
    """Wait until all ranks have ended well, or one has not and the others had their time; whether one has not."""
    began_s = time.monotonic()
    while None in [rank.look() for rank in ranks]:
        now_s = time.monotonic()
        failed = [found for found in (rank.evidence() for rank in ranks) if found.failed]
        if failed:
            orderly = all(found.error is not None and found.error.exit_code is not None for found in failed)
            if now_s - min(found.failed_s for found in failed) > (_ORDERLY_END_S if orderly else _OTHER_END_S):
                return True
        elif hang_timeout_s is not None:
            _look_for_hang(ranks, began_s, hang_timeout_s)
        time.sleep(_POLL_S)
    return any(rank.status for rank in ranks)


def _look_for_hang(ranks: Sequence[_Rank], began_s: float, hang_timeout_s: float) -> None:
    """Raise RunFailed when a rank's step, or finding one another, takes too long; first print all ranks' stacks."""
    running = [(rank, rank.files.step()) for rank in ranks if rank.status is None]
    now_s = time.monotonic()
    steps = [step for _, step in running if step is not None]
    numbers = f"ranks {ranks[0].number} to {ranks[-1].number}" if len(ranks) > 1 else f"rank {ranks[0].number}"
    if any(now_s - step.began_s > hang_timeout_s for step in steps):
        where = min(steps, key=lambda step: step.began_s).where
        words = f"{numbers}, {where}: no step ended within {hang_timeout_s:g} s"
    elif len(steps) < len(running) and now_s - began_s > max(START_UP_S, hang_timeout_s):
        words = f"{numbers}, in start-up: the ranks did not find one another within {now_s - began_s:.0f} s"
    else:
        return
    _print_stacks(ranks)
    raise RunFailed(f"{words}: the stacks of all ranks stand above")


def _print_stacks(ranks: Sequence[_Rank]) -> None:
    places = [rank.evidence().where for rank in ranks]
    for rank in ranks:
        if rank.look() is None:
            rank.process.send_signal(STACKS_SIGNAL)
    time.sleep(_STACKS_S)
    for rank, where in zip(ranks, places, strict=True):
        print(f"rank {rank.number}, {where}:\n{rank.files.stacks() or _why_no_stack(rank)}\n", file=sys.stderr)


def _why_no_stack(rank: _Rank) -> str:
    if rank.look() is not None:
        return f"it had ended with status {rank.status}"
    state = Path(f"/proc/{rank.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return f"it showed no stack within {_STACKS_S:g} s; its process is in state {state} (T: stopped, D: in the kernel)"


def _fail(ranks: Sequence[_Rank], nodes: Nodes, signalled: bool) -> None:
    found = verdict([rank.evidence() for rank in ranks], several_nodes=nodes.count > 1, signalled=signalled)
    if found.exit_code is not None:
        if nodes.rank == 0 or not found.agreed:  # what all agreed on is said once, by the first node
            print(f"error: {found.words}", file=sys.stderr)
        raise SystemExit(found.exit_code)
    print(found.trace, end="", file=sys.stderr)
    raise RunFailed(found.words)


def _ask_to_stop(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        if rank.look() is None:
            rank.process.send_signal(signal.SIGTERM)


def _kill(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        if rank.look() is None:
            rank.process.kill()
    for rank in ranks:
        rank.process.wait()


@contextmanager
def _signals_passed_on(ranks: Sequence[_Rank]) -> Iterator[list[int]]:
    seen: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            sys.exit(_INTERRUPTED)  # on the way out the ranks are killed
        _ask_to_stop(ranks)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
