"""Which collective a hang is said to wait in, from traces of the flight recorder as ranks dump them."""

import json
from itertools import count
from typing import Any

import msgspec
import pytest

from shardwright.launch.collectives import RankCollectives, collectives_of, first_missing
from shardwright.plan.process_groups import PlannedGroup, Purpose
from shardwright.plan.schedules.passes import Pass

WORLD = ("0", "default_pg")
DATA = ("5", PlannedGroup(Purpose.DATA_PARALLEL, (0, 2)).description)
EDGE = ("7", PlannedGroup(Purpose.EDGE, (0, 1), Pass.FORWARD).description)
SAVES = ("9", "undefined")


def trace(*entered: tuple[tuple[str, str], str, int, int, bool], first: int = 0) -> RankCollectives:
    """Of collectives and messages: group, name, number, when, and whether it is over."""
    numbers = count(first)
    entries = [
        {
            "record_id": next(numbers),
            "process_group": group,
            "profiling_name": f"nccl:{name}",
            "is_p2p": name in ("send", "recv"),
            "collective_seq_id": 0 if name in ("send", "recv") else number,
            "p2p_seq_id": number if name in ("send", "recv") else 0,
            "time_created_ns": when,
            "state": "completed" if over else "started",
            "retired": False,
            "input_sizes": [[1]],
        }
        for group, name, number, when, over in entered
    ]
    written: dict[str, Any] = {"version": "2.10", "entries": entries, "pg_status": {}}
    return collectives_of(json.dumps(written).encode())


BEFORE = (WORLD, "all_reduce", 1, 1, True)


def test_the_earliest_collective_that_a_rank_has_not_entered_is_named() -> None:
    """Rank 2 is stuck elsewhere; rank 0 waits for it, and rank 1 for rank 0."""
    known = {
        0: trace(BEFORE, (DATA, "all_gather", 1, 5, True), (DATA, "all_gather", 2, 10, False)),
        1: trace(BEFORE, (WORLD, "all_reduce", 2, 20, False)),
        2: trace(BEFORE, (DATA, "all_gather", 1, 5, True)),
    }
    missing = first_missing(known)
    assert missing is not None and missing.rank == 2
    words = "rank 2 has not entered all_gather 2 of data parallelism of ranks 0 2, in which rank 0 waits"
    assert missing.text == words
    known[2] = trace(BEFORE, (DATA, "all_gather", 1, 5, True), (DATA, "all_gather", 2, 21, False))
    missing = first_missing(known)
    assert missing is not None
    assert missing.text == "ranks 0 2 have not entered all_reduce 2 of all ranks, in which rank 1 waits"


def test_a_rank_that_never_used_a_group_is_behind_in_it_unless_its_records_are_gone() -> None:
    waits = trace(BEFORE, (DATA, "reduce_scatter", 1, 9, False))
    missing = first_missing({0: waits, 2: trace(BEFORE)})
    assert missing is not None and missing.text.startswith("rank 2 has not entered reduce_scatter 1 of data")
    assert first_missing({0: waits, 2: trace(BEFORE, first=40)}) is None
    assert first_missing({0: waits}) is None, "of rank 2 nothing is known"


def test_messages_of_an_edge_are_numbered_apart() -> None:
    receiver = trace(BEFORE, (EDGE, "recv", 1, 3, True), (EDGE, "recv", 2, 6, False))
    missing = first_missing({0: trace(BEFORE, (EDGE, "send", 1, 3, True)), 1: receiver})
    assert missing is not None
    words = "rank 0 has not entered recv 2 of an edge of the pipeline, forward of ranks 0 1, in which rank 1 waits"
    assert missing.text == words


def test_where_all_have_entered_all_nothing_is_missing() -> None:
    both = {rank: trace(BEFORE, (DATA, "all_gather", 1, 5, False)) for rank in (0, 2)}
    assert first_missing(both) is None
    assert first_missing({0: trace((SAVES, "barrier", 1, 5, False)), 1: trace(BEFORE)}) is None
    assert first_missing({}) is None


def test_a_file_of_another_form_is_no_trace() -> None:
    for odd in (b"", b"{", b'{"entries": [{}]}', b"[]"):
        with pytest.raises(msgspec.MsgspecError):
            collectives_of(odd)
    assert collectives_of(b"{}").groups == ()
