"""The launcher: starts one process per device of this node, watches the processes, and ends them together.

It never imports torch, because it must stay responsive when ranks hang in a kernel, and start in a fraction of a
second. What ranks print is shown as it arrives, and stored in a file for each rank if requested. If a rank is killed,
what it has printed is not lost: it is in a pipe whose other end belongs to the launcher.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

import msgspec

from shardwright.io import BadInput, RanksLost, RunFailed, system_fault
from shardwright.launch.exchange import Exchange, exchange
from shardwright.launch.failure_report import NodeReport, RankState, failure_report
from shardwright.launch.heartbeat import COLLECTIVES_SIGNAL, STACKS_SIGNAL, START_UP_S, RankFiles
from shardwright.launch.lock import scratch_folder
from shardwright.launch.meeting import SECRET_VARIABLE
from shardwright.launch.nodes import LOOPBACK, Nodes, interface_of
from shardwright.launch.signals import relayed_signals
from shardwright.launch.store import note_meeting

LAST_LINES = 10
"""Number of a failed rank's last lines that are shown again."""
_CHUNK_BYTES = 64 * 1024
_JOIN_S = 5.0
_STDOUT, _STDERR = 1, 2

OnLine = Callable[[bytes], None]


class RankLog:
    """The log file of one rank, to which every start appends."""

    def __init__(self, path: Path, heading: str) -> None:
        """Open the log and write a heading line; raise BadInput if the file cannot be written."""
        self.path = path
        if path.exists() and not path.is_file():
            raise BadInput(path, "is not a regular file", "choose another folder for logs")
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise system_fault(error, path) from None
        before = "\n" if os.fstat(self._descriptor).st_size else ""
        self._failed = False
        self.write(f"{before}=== {heading} ===\n".encode())
        self._begin = os.fstat(self._descriptor).st_size

    def write(self, piece: bytes) -> None:
        """Append to the log; if that fails, report it once and continue without a log."""
        if self._failed:
            return
        try:
            _write(self._descriptor, piece)
        except OSError as error:
            self._failed = True
            print(f"{self.path}: {error.strerror}: the rank's further output is not logged", file=sys.stderr)

    def last_lines(self) -> list[str]:
        """Return the last lines that were written since this start."""
        begin = max(self._begin, os.fstat(self._descriptor).st_size - _CHUNK_BYTES)
        return os.pread(self._descriptor, _CHUNK_BYTES, begin).decode(errors="replace").splitlines()[-LAST_LINES:]

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class RankOutput:
    """The output of a node's ranks: a thread for each stream that the launcher reads."""

    def __init__(self, logs: dict[int, RankLog], on_line: OnLine | None) -> None:
        self._logs, self._on_line = logs, on_line
        self._readers: list[threading.Thread] = []

    def takes(self, rank: int) -> tuple[bool, bool]:
        """Return whether the launcher reads standard output, and standard error, of a rank."""
        kept = rank in self._logs
        return kept or (self._on_line is not None and rank == 0), kept

    def follow(self, rank: int, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> None:
        """Show and store the output of a rank's pipes until they are closed."""
        keep = [self._logs[rank].write] if rank in self._logs else []
        if stdout is not None and self._on_line is not None and rank == 0:
            self._read(stdout, [*keep, self._on_line])
        elif stdout is not None:
            self._read(_lines(stdout), [*keep, partial(_show, _STDOUT)])
        if stderr is not None:
            self._read(_lines(stderr), [*keep, partial(_show, _STDERR)])

    def _read(self, lines: Iterable[bytes], takers: list[OnLine]) -> None:
        reader = threading.Thread(target=_hand_on, args=(lines, takers), daemon=True)
        reader.start()
        self._readers.append(reader)

    def join(self) -> None:
        """Wait until all output of ended ranks is shown and stored, up to a limit: a child may hold a pipe open."""
        until_s = time.monotonic() + _JOIN_S
        for reader in self._readers:
            reader.join(max(0.0, until_s - time.monotonic()))

    def show(self, rank: int, text: str) -> None:
        """Show on standard error, and store, text that a rank could not print itself."""
        print(text, end="", file=sys.stderr)
        if rank in self._logs:
            self._logs[rank].write(text.encode())

    def show_last_lines(self, rank: int) -> None:
        """Show a rank's last lines on standard error, if it has a log here and printed anything."""
        if rank in self._logs and (lines := self._logs[rank].last_lines()):
            indented = "".join(f"    {line}\n" for line in lines)
            print(f"the last lines of rank {rank}, of {self._logs[rank].path}:\n{indented}", end="", file=sys.stderr)

    def close(self) -> None:
        """Close the logs, unless a thread is still writing to them."""
        if not any(reader.is_alive() for reader in self._readers):
            for log in self._logs.values():
                log.close()


@contextmanager
def rank_output(
    folder: Path | None, ranks: range, world_size: int, start: int, on_line: OnLine | None
) -> Iterator[RankOutput]:
    """Yield the output of these ranks: rank 0's lines go to `on_line`, and with a folder all output is stored there.

    Raises BadInput if the folder or a file in it cannot be written.
    """
    logs: dict[int, RankLog] = {}
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise system_fault(error, folder) from None
        now = datetime.now(UTC).isoformat(timespec="seconds")
        for rank in ranks:
            heading = f"start {start} at {now}: rank {rank} of {world_size}"
            logs[rank] = RankLog(folder / f"rank-{rank}.log", heading)
    with closing(RankOutput(logs, on_line)) as output:
        yield output


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield complete lines as soon as they arrive, or the beginning of a line that grows too long."""
    begun = b""
    with stream:
        while piece := os.read(stream.fileno(), _CHUNK_BYTES):
            begun += piece
            end = 1 + max(begun.rfind(b"\n"), begun.rfind(b"\r"))
            end = end or (len(begun) if len(begun) >= _CHUNK_BYTES else 0)
            if end:
                yield begun[:end]
                begun = begun[end:]
    if begun:
        yield begun


def _hand_on(lines: Iterable[bytes], takers: Iterable[OnLine]) -> None:
    for some in lines:
        for take in takers:
            take(some)


def _show(descriptor: int, piece: bytes) -> None:
    """Print output as the rank itself would; a closed stream is not an error."""
    with suppress(OSError):
        _write(descriptor, piece)


def _write(descriptor: int, piece: bytes) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]


_POLL_S = 0.05
_ORDERLY_END_S = 20.0
"""Seconds that the other ranks have to end by themselves, after one reported an error that all may have agreed on."""
_OTHER_END_S = 2.0
"""Seconds that the other ranks have to end after any other failure: enough to see which of them failed first."""
_STATES = "T: stopped, D: in the kernel"
_STACKS_S = 2.0
"""Seconds that the ranks have to show their stacks and collectives."""
_GATHER_S = _ORDERLY_END_S + 10.0
"""Seconds that the launchers of other nodes have to report how their ranks ended."""
# PyTorch 2.13 renames two collectives; 2.11 has only the old names.
_RENAMED = "ignore::FutureWarning:torch.distributed.c10d_logger"
EXPANDABLE = "expandable_segments:True"
"""Default setting of PyTorch's allocator of device memory; the caller's environment overrides it."""
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables of PyTorch's allocator of device memory, since 2.9 and before."""
_HOST_ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""Environment variables of glibc's malloc; the caller's environment overrides them (mallopt(3)).

A rank keeps freed memory instead of faulting in the same pages in every step; 32 MiB is the maximum that glibc allows.
"""
_DEVICE = {"CUDA_MODULE_LOADING": "EAGER", "NCCL_RUNTIME_CONNECT": "0", "TORCH_FR_BUFFER_SIZE": "2000"}
"""Environment variables of CUDA, NCCL and PyTorch's flight recorder; the caller's environment overrides them.

Loading a kernel or opening a connection during a step may wait for all work that is queued on the device. This
deadlocks if a queued receive waits for a rank that in turn waits for this one, so both are done at the start.
"""
_UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""Environment variable for ranks that print into a pipe, so that their output is in the pipe if they are killed."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_QUIET = {"NCCL_RAS_ENABLE": "0"}
"""Environment variable that stops NCCL 2.24 and later from listening for job health queries at one fixed port."""
_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass
class _Rank:
    """A rank's process, and the files through which the launcher watches it."""

    number: int
    files: RankFiles
    process: "subprocess.Popen[bytes]"
    status: int | None = None
    """Exit status of the process; None while it runs, and if the launcher ended it."""
    seen_s: float = 0.0

    def look(self) -> int | None:
        """Return the exit status of the process; None while it runs."""
        if self.status is None and (status := self.process.poll()) is not None:
            self.status, self.seen_s = status, time.monotonic()
        return self.status

    def state(self) -> RankState:
        return RankState(
            rank=self.number,
            status=self.status,
            seen_s=self.seen_s,
            step=self.files.step(),
            error=self.files.error(),
            collectives=self.files.collectives(),
        )


def launch(
    command: Sequence[str],
    ranks: range,
    world_size: int,
    nodes: Nodes | None = None,
    *,
    hang_timeout_s: float | None = None,
    on_line: OnLine | None = None,
    log_folder: Path | None = None,
    name: str = "",
    start: int = 0,
) -> None:
    """Run `command` for each of this node's ranks, with RANK, LOCAL_RANK and WORLD_SIZE set.

    The ranks connect to each other through `rank_store`. The cores that this process may use are divided evenly among
    the ranks' threads.

    `name` distinguishes launches of the same command and size, and `start` the restarts of one launch, so that no node
    takes a report from an earlier launch for a new one. Lines that rank 0 prints go to `on_line`, if given. The output
    of each rank is shown, and stored in `rank-<number>.log` of `log_folder` if given; the last lines of the rank that
    failed are repeated at the end.

    SIGINT, SIGTERM, SIGUSR1 and SIGHUP are relayed to every process as SIGTERM; a second signal ends them at once. If a
    process fails on any node, the others get a short time to end and are then killed; no process outlives this one.
    With `hang_timeout_s`, ranks that take longer than that from one `Heartbeat.begin` to the next print their stacks,
    write the collectives that they have entered to `rank-<number>-collectives.json` of `log_folder`, and are killed.

    Raises RunFailed, naming the rank that failed first on any node: OutOfMemory if its device had too little memory,
    RanksLost if ranks ended without an orderly error, hang, or are gone with their node. An orderly error that ranks
    reported is printed in one line, and this function ends by SystemExit with its exit code, as it does after a signal
    that arrived before the ranks could stop in order.
    """
    nodes = nodes or Nodes()
    started: list[_Rank] = []
    with (
        scratch_folder() as folder,
        relayed_signals(lambda: _ask_to_stop(started)) as signals,
        exchange(nodes, f"{world_size} {name}", start, lambda: bool(signals)) as others,
        rank_output(log_folder, ranks, world_size, start, on_line) as output,
    ):
        try:
            environment = _environment(interface_of(others.address_here), len(ranks), world_size)
            environment |= _UNBUFFERED if log_folder else {}
            if others.place is not None:
                note_meeting(RankFiles.of_rank(Path(folder), 0).meeting_file, others.place, others.launch)
            for local_rank, number in enumerate(ranks):
                files = RankFiles.of_rank(folder, number)
                place = {"RANK": str(number), "LOCAL_RANK": str(local_rank)} | files.environment
                started.append(_start(command, number, files, environment | place, output))
            if signals:  # while some were not started yet
                _ask_to_stop(started)
            report = _watch(started, nodes, others, hang_timeout_s)
        finally:
            # In this order, because the readers end when the last process that holds a pipe has ended.
            _kill(started)
            output.join()
        if log_folder is not None:
            _keep_collectives(started, log_folder)
        if report is None:
            others.tell(NodeReport(node=nodes.rank, ended=True))
        else:
            _fail(started, report, others, output, bool(signals))


def allocator_setting(environment: Mapping[str, str]) -> str:
    """Return the setting of PyTorch's allocator of device memory; empty if there is none."""
    return next((environment[name] for name in _ALLOCATOR if environment.get(name)), "")


def _environment(interface: str | None, processes: int, world_size: int) -> dict[str, str]:
    # Overrides the caller's environment: with more threads than cores, ranks would wait for each other.
    threads = str(max(1, len(os.sched_getaffinity(0)) // processes))
    warnings = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), _RENAMED)))
    shared = {"PYTHONWARNINGS": warnings, "WORLD_SIZE": str(world_size)}
    if interface == LOOPBACK:  # overrides the environment: no other machine may reach the ranks' ports
        shared |= dict.fromkeys(_INTERFACES, LOOPBACK)
    inherited = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
    meeting = {_INTERFACES[0]: interface} if interface else {}
    # Expandable segments avoid fragmentation of device memory (PyTorch's notes on CUDA semantics).
    allocator = {_ALLOCATOR[0]: allocator_setting(os.environ) or EXPANDABLE}
    given = meeting | allocator | _HOST_ALLOCATOR | _DEVICE | _QUIET
    return given | inherited | shared | dict.fromkeys(_THREAD_COUNTS, threads)


def _start(
    command: Sequence[str], number: int, files: RankFiles, environment: dict[str, str], output: RankOutput
) -> _Rank:
    pipes = [subprocess.PIPE if taken else None for taken in output.takes(number)]
    # In a separate session, so that a terminal's Ctrl-C reaches only the launcher, which relays it as an orderly stop.
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=pipes[0], stderr=pipes[1], start_new_session=True
    )
    output.follow(number, process.stdout, process.stderr)
    return _Rank(number, files, process)


def _watch(ranks: Sequence[_Rank], nodes: Nodes, others: Exchange, hang_timeout_s: float | None) -> NodeReport | None:
    """Return None after all ranks of this node have succeeded, or its report after a node failed and the time is up."""
    began_s, reported, gone_s = time.monotonic(), False, math.inf
    while None in [rank.look() for rank in ranks]:
        here = _report(ranks, nodes, began_s, hang_timeout_s)
        if here.failed and not reported:
            others.tell(here)
            reported = True
        reports = (here, *others.heard())
        if any(report.hang for report in reports):
            _print_stacks(ranks)
            return here
        # Ranks may wait forever for ranks of a vanished node, so they do not get the time for an orderly end.
        if any(report.gone for report in reports):
            gone_s = min(gone_s, time.monotonic())
        failed = [state for report in reports for state in report.ranks if state.failed]
        if _time_is_up(failed) or time.monotonic() - gone_s > _OTHER_END_S:
            return here
        time.sleep(_POLL_S)
    return _report(ranks, nodes, began_s, None) if any(rank.status for rank in ranks) else None


def _report(ranks: Sequence[_Rank], nodes: Nodes, began_s: float, hang_timeout_s: float | None) -> NodeReport:
    states = tuple(rank.state() for rank in ranks)
    hang = None
    if hang_timeout_s is not None and not any(state.failed for state in states):
        hang = _hang([state for state in states if state.status is None], began_s, hang_timeout_s)
        stopped = (f", rank {rank.number} is stopped (SIGSTOP)" for rank in ranks if _is_stopped(rank))
        hang = hang and hang + "".join(stopped)
    return NodeReport(node=nodes.rank, ranks=states, hang=hang)


def _time_is_up(failed: Sequence[RankState]) -> bool:
    """Return whether the time is up that the other ranks have to end after some ranks failed."""
    if not failed:
        return False
    allowed_s = _ORDERLY_END_S if all(state.orderly for state in failed) else _OTHER_END_S
    return time.monotonic() - min(state.failed_s for state in failed) > allowed_s


def _hang(running: Sequence[RankState], began_s: float, hang_timeout_s: float) -> str | None:
    """Return a description of what exceeded the time limit: a rank's step or connecting the ranks; else None."""
    now_s = time.monotonic()
    steps = [state.step for state in running if state.step is not None]
    if any(now_s - step.began_s > hang_timeout_s for step in steps):
        return f"no step ended within {hang_timeout_s:g} s"
    if len(steps) < len(running) and now_s - began_s > max(START_UP_S, hang_timeout_s):
        return f"the ranks did not connect to one another within {now_s - began_s:.0f} s"
    return None


def _print_stacks(ranks: Sequence[_Rank]) -> None:
    places = [rank.state().where for rank in ranks]
    for rank in ranks:
        # A rank that has not called `start_rank` would end by the signals, and be reported instead of the one that
        # hangs.
        if rank.look() is None and rank.files.stacks_file.exists():
            rank.process.send_signal(STACKS_SIGNAL)
            rank.process.send_signal(COLLECTIVES_SIGNAL)
    time.sleep(_STACKS_S)
    for rank, where in zip(ranks, places, strict=True):
        print(f"rank {rank.number}, {where}:\n{rank.files.stacks() or _why_no_stack(rank)}\n", file=sys.stderr)


def _keep_collectives(ranks: Sequence[_Rank], folder: Path) -> None:
    for rank in ranks:
        kept = folder / f"rank-{rank.number}-collectives.json"
        if rank.files.collectives_file.exists():
            try:
                shutil.copyfile(rank.files.collectives_file, kept)
            except OSError as error:
                print(f"{kept}: {error.strerror}: the rank's collectives are not logged", file=sys.stderr)


def _why_no_stack(rank: _Rank) -> str:
    if rank.look() is not None:
        return f"it had ended with status {rank.status}"
    return f"it showed no stack within {_STACKS_S:g} s; its process is in state {_process_state(rank)} ({_STATES})"


def _is_stopped(rank: _Rank) -> bool:
    return rank.look() is None and _process_state(rank) == "T"


def _process_state(rank: _Rank) -> str:
    """Return a rank's process state as in proc(5); an ended process remains there until its status is read."""
    return Path(f"/proc/{rank.process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def _fail(ranks: Sequence[_Rank], here: NodeReport, others: Exchange, output: RankOutput, signalled: bool) -> NoReturn:
    states = tuple(rank.state() for rank in ranks)
    last = msgspec.structs.replace(here, ranks=states, signalled=signalled, ended=True)
    failure = failure_report(others.gather(last, _GATHER_S))
    if failure.out_of_memory is not None:
        output.show_last_lines(failure.out_of_memory.rank)
        raise failure.out_of_memory
    if failure.exit_code != RunFailed.exit_code:
        if here.node == 0 or not failure.agreed:  # an error that all ranks agreed on is printed once, by node 0
            print(f"error: {failure.text}", file=sys.stderr)
        raise SystemExit(failure.exit_code)
    # If a rank was ended before it could print its traceback, it is shown here.
    for state in (state for state in states if state.rank == failure.rank and state.status is None):
        output.show(state.rank, state.error.trace if state.error else "")
    if failure.failed is not None:
        output.show_last_lines(failure.failed)
    if failure.lost:
        raise RanksLost(failure.text, nodes=failure.gone, start=others.start)
    raise RunFailed(failure.text)


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
