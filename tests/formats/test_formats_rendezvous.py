"""Ranks that meet for every message: with the runtime's groups and receives no schedule makes them wait for ever.

A send and its receive meet; on an edge (two ranks and a direction) they do so in order. The runtime (pipeline/p2p.py,
pipeline/runner.py of the train stage) begins to receive what an action needs before the action before it, never waits
for a send that nobody has said was taken, and has a two-rank group for each edge that is warmed up before the step.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.plan.schedules.passes import Action, Pass
from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import Schedule

INTERLEAVED = Schedule.INTERLEAVED_1F1B
CHUNKS = {schedule: (2,) if schedule.turns else (1, 2, 3, 4) if schedule.interleaves else (1,) for schedule in Schedule}
GRID = [
    (schedule, p, m, v) for schedule, p, m in product(Schedule, range(2, 9), range(1, 17)) for v in CHUNKS[schedule]
]
"""Schedule, pipeline stages, microbatches and chunks of a stage."""

Edge = tuple[Pass, int, int, bool]
"""Of what messages, from which stage to which, and whether over a cut that leads to an earlier stage."""


class Do(NamedTuple):
    """Something that a stage does: begin to receive or to send on an edge, or wait for its message of a number."""

    what: str
    edge: Edge
    number: int


Way = tuple[tuple[int, int], ...]


def edges_of(action: Action, stage: int, way: Way) -> tuple[Edge | None, Edge | None]:
    """Where an action's message comes from and where what it makes goes to.

    None at the ends of the model, between chunks of the same stage, and of weight passes.
    """
    kind, _, chunk = action
    if not kind.way:
        return None, None
    here = way.index((stage, chunk))

    def edge(source: int, target: int) -> Edge | None:
        if {source, target} & {-1, len(way)} or (a := way[source][0]) == (b := way[target][0]):
            return None
        return kind, a, b, (a > b) is (kind is Pass.FORWARD)

    return edge(here - kind.way, here), edge(here, here + kind.way)


def program(todo: Sequence[Action], stage: int, way: Way, ahead: int, alone: bool = False) -> Iterator[Do]:
    """What a rank of the runtime does in a step, as far as others have a part in it.

    `alone`: with forward passes alone, after each of which it waits until what was sent before it is received, unless
    another message from the same stage will show that.
    """
    todo = [action for action in todo if action.kind is Pass.FORWARD or not alone]
    heard = {edge[1] for action in todo if (edge := edges_of(action, stage, way)[0]) is not None}
    posted, waited, sent = Counter[Edge](), Counter[Edge](), Counter[Edge]()
    coming = iter(todo)
    for number, action in enumerate(todo):
        for later in islice(coming, 1 + ahead if number == 0 else 1):
            if (source := edges_of(later, stage, way)[0]) is not None:
                yield Do("receive", source, posted[source])
                posted[source] += 1
        source, target = edges_of(action, stage, way)
        if source is not None:
            yield Do("wait", source, waited[source])
            waited[source] += 1
        if target is not None:
            before = [(edge, count - 1) for edge, count in sent.items()] if alone and target[2] not in heard else []
            yield Do("send", target, sent[target])
            sent[target] += 1
            yield from (Do("wait", *each) for each in before)


def waits_for_ever(
    schedule: Schedule, p: int, m: int, v: int, *, ahead: int = 1, warmed_up: bool = True, alone: bool = False
) -> bool:
    """Play a step; edges that are not warmed up make both ranks wait for each other at their first message."""
    lists, way = [schedule_of(schedule).actions(p, m, stage, v) for stage in range(p)], schedule.way(p, v)
    waiting = [list(program(own, stage, way, ahead, alone))[::-1] for stage, own in enumerate(lists)]
    begun: Counter[tuple[str, Edge]] = Counter()
    there: set[tuple[Edge, int]] = set()
    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(waiting):
            while own:
                what, edge, number = own[-1]
                there.add((edge, stage))
                met = warmed_up or {(edge, edge[1]), (edge, edge[2])} <= there
                if (what == "wait" and min(begun["send", edge], begun["receive", edge]) <= number) or not met:
                    break
                begun[what, edge] += 1
                own.pop()
                moved = True
    return any(waiting)


@pytest.mark.parametrize("ahead", [0, 1])
def test_no_schedule_waits_for_ever_where_groups_are_warmed_up(ahead: int) -> None:
    assert [case for case in GRID if waits_for_ever(*case, ahead=ahead)] == []


def test_no_evaluation_waits_for_ever() -> None:
    assert [case for case in GRID if waits_for_ever(*case, alone=True)] == []


SHAPES = st.sampled_from(Schedule).flatmap(lambda each: st.tuples(st.just(each), st.sampled_from(CHUNKS[each])))


@settings(deadline=None)
@given(SHAPES, st.integers(2, 12), st.integers(1, 40), st.integers(0, 3))
def test_neither_do_larger_ones_nor_those_that_receive_further_ahead(
    shape: tuple[Schedule, int], p: int, m: int, ahead: int
) -> None:
    assert not waits_for_ever(shape[0], p, m, shape[1], ahead=ahead)


def test_groups_that_are_made_at_their_first_message_make_ranks_wait_for_ever() -> None:
    """With two stages and an odd number of microbatches from 5 interleaved stages do, as long as they receive late."""
    found = {case for case in GRID if not case[0].splits and waits_for_ever(*case, ahead=0, warmed_up=False)}
    assert found == {(INTERLEAVED, 2, m, v) for m in range(5, 17, 2) for v in (2, 3, 4)}
    # A receive that is begun ahead stands in the way of the very message that its sender waits for.
    assert waits_for_ever(Schedule.ONE_F_ONE_B, 2, 1, 1, warmed_up=False)


@settings(deadline=None)
@given(SHAPES, st.integers(2, 8), st.integers(1, 20))
def test_no_more_is_on_its_way_than_activations_are_in_flight(shape: tuple[Schedule, int], p: int, m: int) -> None:
    """What a stage has sent and not yet heard to be taken: an action's message tells what its sender has taken.

    What goes forward the stage itself keeps as activations, and of what goes backward the receiver keeps them.
    """
    (schedule, v), way = shape, shape[0].way(p, shape[1])
    lists = [schedule_of(schedule).actions(p, m, stage, v) for stage in range(p)]
    numbers = [{action: number for number, action in enumerate(todo)} for todo in lists]
    in_flights = [schedule_of(schedule).in_flight(p, m, stage, v) for stage in range(p)]
    for stage, todo in enumerate(lists):
        on_their_way: list[tuple[Edge, int]] = []
        for action in todo:
            source, target = edges_of(action, stage, way)
            if source is not None:
                done = numbers[source[1]][_there(action, stage, way, -1)]
                on_their_way = [sent for sent in on_their_way if sent[0][2] != source[1] or sent[1] > done]
            if target is not None:
                on_their_way.append((target, numbers[target[2]][_there(action, stage, way, 1)]))
            kept = Counter((edge[0], edge[2]) for edge, _ in on_their_way)
            for (kind, receiver), count in kept.items():
                assert count <= in_flights[stage if kind is Pass.FORWARD else receiver]


def _there(action: Action, stage: int, way: Way, step: int) -> Action:
    """The action at the other end of an edge, to which (step 1) or from which (-1) it leads."""
    _, chunk = way[way.index((stage, action.chunk)) + step * action.kind.way]
    return action._replace(chunk=chunk)
