"""The report of a failed launch: which rank caused the failure, and the message about it."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from shardwright.io import OutOfMemory, RunFailed, Stopped
from shardwright.launch.collectives import RankCollectives, first_missing
from shardwright.launch.heartbeat import RankError, Step

_SIGTERM_STATUS = -signal.SIGTERM
# NCCL ends a rank by SIGABRT when another one is gone, so SIGABRT by itself does not mean that the rank was first.
_SIGABRT_STATUS = -signal.SIGABRT


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a rank when the first rank has failed."""

    rank: int
    status: int | None
    """Exit status of the rank, negative for a signal; None if it had not ended by itself."""
    seen_s: float
    """Seconds by `time.monotonic` when the launcher noticed that the rank had ended, which was earlier."""
    step: Step | None
    error: RankError | None
    collectives: RankCollectives | None = None
    """Collectives that the rank has entered; set if it hangs and was asked."""

    @property
    def failed(self) -> bool:
        """Return whether the rank ended with an error, or recorded an error before ending."""
        return self.error is not None or bool(self.status)

    @property
    def orderly(self) -> bool:
        """Return whether the rank ends with an error that all ranks may have agreed on."""
        return self.error is not None and self.error.exit_code is not None

    @property
    def failed_s(self) -> float:
        """Return when the rank failed, in seconds by `time.monotonic`, as exactly as it is known."""
        return self.seen_s if self.error is None else self.error.time_s

    @property
    def where(self) -> str:
        """Return the step that the rank was in, in words."""
        return self.step.where if self.step else "in start-up"


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """A report that one node's launcher sends to the others when something fails there, and when it ends."""

    node: int
    run: str = ""
    """Name of the launch that the report is about; one command may make several launches at one rendezvous."""
    start: int = 0
    """Number of times that the node's ranks were restarted before."""
    launch: str = ""
    """The random name of node 0's launch; empty from other nodes."""
    ranks: tuple[RankState, ...] = ()
    """States of all ranks of the node, if one of them has failed or hangs."""
    hang: str | None = None
    """Description of what took too long, such as `no step ended within 600 s`."""
    signalled: bool = False
    """Whether this launcher was asked to stop."""
    ended: bool = False
    """Whether the node's ranks have ended and no further report follows."""
    gone: bool = False
    """Whether the node's launcher is silent: it was killed, or its machine is lost."""
    now_s: float = 0.0
    """Time of the report in seconds, by the clock of all times in the report."""

    @property
    def failed(self) -> bool:
        """Return whether a rank of the node failed or hangs."""
        return self.hang is not None or any(rank.failed for rank in self.ranks)


@dataclass(frozen=True)
class FailureReport:
    """The message of a failed launch and its exit code, which errors that ranks reported themselves determine."""

    text: str
    exit_code: int = RunFailed.exit_code
    rank: int | None = None
    """The rank that the message names."""
    agreed: bool = False
    """Whether all ranks reported the same error, and node 0's launcher exists to print it."""
    out_of_memory: OutOfMemory | None = None
    """The out-of-memory error; set if a device of the named rank had too little memory."""
    lost: bool = False
    """Whether ranks ended without reporting an orderly error, so that they may succeed when they are restarted."""
    gone: tuple[int, ...] = ()
    """The nodes whose launchers are gone."""
    failed: int | None = None
    """The rank whose last lines are shown: the one that failed first, or that has run longest if ranks hang."""


def shifted(report: NodeReport, now_s: float) -> NodeReport:
    """Return a report that has just arrived from another node, converted to this node's clock."""
    late_s = now_s - report.now_s

    def state(rank: RankState) -> RankState:
        error = rank.error and msgspec.structs.replace(rank.error, time_s=rank.error.time_s + late_s)
        step = rank.step and Step(rank.step.began_s + late_s, rank.step.where)
        return msgspec.structs.replace(rank, seen_s=rank.seen_s + late_s, error=error, step=step)

    return msgspec.structs.replace(report, ranks=tuple(map(state, report.ranks)), now_s=now_s)


def failure_report(reports: Sequence[NodeReport]) -> FailureReport:
    """Return which rank or node failed first, whether a restart may help, and which nodes are lost."""
    first = _first_failure(reports)
    ordered = any(rank.orderly for report in reports for rank in report.ranks)
    stopped = any(report.signalled for report in reports)
    gone = tuple(report.node for report in reports if report.gone)
    return replace(first, lost=not stopped and (bool(gone) or not ordered), gone=gone)


def _first_failure(reports: Sequence[NodeReport]) -> FailureReport:
    """Return the first failure according to all nodes' reports; other ranks fail a moment later.

    A rank that was killed reports nothing, and its peers notice it before the launcher does, so it comes first. Next
    are, by time, the ranks that recorded an error other than a lost connection; then a node whose launcher and ranks
    are gone; then a hang; then the ranks that ended without a report; and only if all of them lost a connection, the
    first to do so.
    """
    failed = sorted((rank for report in reports for rank in report.ranks if rank.failed), key=_order)
    first = failed[0] if failed else None
    if first is None or _order(first)[0] > 1:
        if gone := [report.node for report in reports if report.gone]:
            return FailureReport(f"node {gone[0]}: its launcher is gone, and its ranks with it")
        if hanging := [report for report in reports if report.hang]:
            return _hang(hanging, [rank for report in reports for rank in report.ranks])
    assert first is not None
    failure = _failure(first, reports)
    return replace(failure, failed=first.rank) if failure.exit_code == RunFailed.exit_code else failure


def _hang(hanging: Sequence[NodeReport], ranks: Sequence[RankState]) -> FailureReport:
    """Return the report of a hang: the rank that has run longest on any node, and what the others wait for."""
    numbers = sorted(rank.rank for rank in ranks)
    named = f"ranks {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"rank {numbers[0]}"
    running = [rank for rank in ranks if rank.status is None] or ranks
    stuck = min(running, key=lambda rank: (rank.step is not None, rank.step.began_s if rank.step else 0.0))
    text = f"{named}, {stuck.where}: {hanging[0].hang}: the stacks of all ranks are above"
    missing = first_missing({rank.rank: rank.collectives for rank in ranks if rank.collectives is not None})
    if missing is None:
        return FailureReport(text, failed=stuck.rank)
    return FailureReport(f"{text}; {missing.text}", failed=missing.rank)


def _failure(first: RankState, reports: Sequence[NodeReport]) -> FailureReport:
    error, status = first.error, first.status
    if error is not None and not _killed(first):
        if (asked := error.asked) is not None:
            text = f"rank {first.rank}: out of memory {first.where}: {error.text}"
            lacking = OutOfMemory(
                text, subject=asked.subject, asked_bytes=asked.asked_bytes, rank=first.rank, where=first.where
            )
            return FailureReport(text, rank=first.rank, out_of_memory=lacking)
        if error.exit_code is not None:
            said = {rank.error.text if rank.error else None for report in reports for rank in report.ranks}
            agreed = said == {error.text} and reports[0].ended
            return FailureReport(error.text, error.exit_code, first.rank, agreed)
        if error.lost_connection:
            lost = f"rank {first.rank}: lost its connection first, {first.where}"
            silent = sorted(report.node for report in reports if not report.ended)
            nodes = ", ".join(map(str, silent))
            where_to_look = f"nothing was received from node {nodes}: a rank there may have ended: look there"
            return FailureReport(f"{lost}: {where_to_look if silent else error.text}")
        return FailureReport(f"rank {first.rank}: failed {first.where}: {error.text}", rank=first.rank)
    assert status is not None
    if status == _SIGTERM_STATUS and any(report.signalled for report in reports):
        return FailureReport(f"stopped {first.where}: run the same command again", Stopped.exit_code)
    if status < 0:
        words = f"rank {first.rank}: was killed by {signal.Signals(-status).name} {first.where}"
        return FailureReport(f"{words}: the other ranks were ended")
    return FailureReport(f"rank {first.rank}: ended with status {status} {first.where}: its last output is above")


def _killed(rank: RankState) -> bool:
    return rank.status is not None and rank.status < 0 and (rank.status != _SIGABRT_STATUS or rank.error is None)


def _order(rank: RankState) -> tuple[int, float]:
    if _killed(rank) and rank.status != _SIGABRT_STATUS:
        return 0, rank.seen_s
    if _killed(rank) or (rank.error is not None and not rank.error.lost_connection):
        return 1, rank.failed_s
    return (2 if rank.error is None else 3), rank.failed_s
