"""Which rank or node is named, from made-up reports of all nodes."""

import msgspec
import pytest

from shardwright.launch.failure_report import FailureReport, NodeReport, RankState, failure_report, shifted
from shardwright.launch.heartbeat import RankError, Step

LOST = RankError(time_s=0.5, text="DistBackendError: remote process exited", lost_connection=True)
FAILED = RankError(time_s=1.0, text="ValueError: x")


def _rank(rank: int, status: int | None, seen_s: float, error: RankError | None = None) -> RankState:
    return RankState(rank=rank, status=status, seen_s=seen_s, step=Step(float(rank), "in step 5"), error=error)


def _reported(*ranks: RankState, signalled: bool = False) -> FailureReport:
    return failure_report([NodeReport(node=0, ranks=ranks, ended=True, signalled=signalled)])


def test_an_abort_counts_by_its_time_and_not_before_what_the_rank_noted() -> None:
    """NCCL aborts the ranks whose peer has failed."""
    for ranks in (
        (_rank(0, -6, 2.0), _rank(1, None, 0.0, FAILED)),
        (_rank(0, -6, 0.5, LOST), _rank(1, 1, 2.0, FAILED)),
    ):
        assert _reported(*ranks).text == "rank 1: failed in step 5: ValueError: x"
    ranks = (_rank(0, -6, 0.5), _rank(1, 1, 2.0, FAILED))
    assert _reported(*ranks).text.startswith("rank 0: was killed by SIGABRT")


def test_a_kill_that_nobody_asked_for_is_no_stop() -> None:
    for status, signalled in ((-9, True), (-15, False)):
        found = _reported(_rank(0, status, 1.0), signalled=signalled)
        assert found.text.startswith("rank 0: was killed by SIG") and found.exit_code == 4


def test_a_killed_rank_goes_before_what_its_peers_noted_before_its_end_was_seen() -> None:
    failed = RankError(time_s=1.0, text="RuntimeError: something new that gloo says")
    found = _reported(_rank(0, 1, 2.0, failed), _rank(1, -9, 1.05))
    assert found.text.startswith("rank 1: was killed by SIGKILL in step 5")


def test_what_is_lost_may_be_started_anew_and_what_was_said_in_order_would_come_again() -> None:
    ordered = RankError(time_s=1.0, text="step 3: loss nan", exit_code=4)
    assert not _reported(_rank(0, 4, 1.0, ordered), _rank(1, 4, 1.0, ordered)).lost
    assert _reported(_rank(0, -9, 1.0)).lost and _reported(_rank(0, 1, 1.0, FAILED)).lost
    assert not _reported(_rank(0, -9, 1.0), signalled=True).lost
    node = NodeReport(node=0, ranks=(_rank(0, 1, 1.0, LOST),), ended=True)
    found = failure_report([node, NodeReport(node=1, gone=True)])
    assert (found.lost, found.gone) == (True, (1,))
    assert not failure_report([msgspec.structs.replace(node, signalled=True), NodeReport(node=1, gone=True)]).lost


# What node 1 tells, where all that node 0 knows is that its rank 0 lost a connection.
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"ranks": (_rank(1, 1, 9.0, FAILED),)}, "rank 1: failed in step 5: ValueError: x"),
        ({"ranks": (_rank(1, -9, 9.0),)}, "rank 1: was killed by SIGKILL in step 5: the other ranks were ended"),
        ({"gone": True, "ended": False}, "node 1: its launcher is gone, and its ranks with it"),
        ({"gone": True, "ranks": (_rank(1, 1, 9.0, FAILED),)}, "rank 1: failed in step 5: ValueError: x"),
        (
            {"hang": "no step ended within 7 s", "ranks": (_rank(1, None, 0.0),)},
            "ranks 0 to 1, in step 5: no step ended within 7 s: the stacks of all ranks are above",
        ),
        (
            {"ended": False},
            "rank 0: lost its connection first, in step 5: nothing was received from node 1: a rank there "
            "may have ended: look there",
        ),
        ({}, "rank 0: lost its connection first, in step 5: DistBackendError: remote process exited"),
    ],
)
def test_the_root_cause_is_looked_for_on_all_nodes(other: dict[str, object], words: str) -> None:
    here = NodeReport(node=0, ranks=(_rank(0, 1, 2.0, LOST),), ended=True)
    found = failure_report([here, NodeReport(**({"node": 1, "ended": True} | other))])  # type: ignore[arg-type]
    assert (found.text, found.exit_code) == (words, 4)


def test_a_stop_that_one_node_was_asked_for_is_a_stop_of_all() -> None:
    reports = [
        NodeReport(node=0, ranks=(_rank(0, 1, 2.0, LOST),), ended=True),
        NodeReport(node=1, ranks=(_rank(1, -15, 1.0),), ended=True, signalled=True),
    ]
    assert failure_report(reports).exit_code == 75


def test_what_all_ranks_of_all_nodes_report_is_agreed_on_while_node_0_is_there() -> None:
    refused = RankError(time_s=1.0, text="plan.json: is odd", exit_code=2)
    for last, ended, agreed in ((refused, True, True), (LOST, True, False), (refused, False, False)):
        reports = [
            NodeReport(node=0, ranks=(_rank(0, 2, 2.0, refused),), ended=ended),
            NodeReport(node=1, ranks=(_rank(1, 2, 2.0, last),), ended=True),
        ]
        assert failure_report(reports) == FailureReport("plan.json: is odd", 2, 0, agreed)


def test_times_of_another_nodes_clock_are_shifted_to_this_ones() -> None:
    told = NodeReport(node=1, ranks=(_rank(2, 1, 1000.0, FAILED),), now_s=1001.0)
    (state,) = shifted(told, 51.0).ranks
    assert (state.seen_s, state.failed_s, state.step) == (50.0, -949.0, Step(-948.0, "in step 5"))
