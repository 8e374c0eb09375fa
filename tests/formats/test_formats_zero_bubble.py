"""The greedy order of split backward passes: complete, without deadlock, within its limits, quicker than 1F1B."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

import pytest

from shardwright.plan.schedules.greedy import Order, greedy_order
from shardwright.plan.schedules.passes import Action, Pass
from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import Schedule

SIZES = [*product(range(1, 9), range(1, 17))]
"""All numbers of stages and microbatches of small pipelines."""
Times = Mapping[Pass, float]
UNITS = dict.fromkeys(Pass, 1.0)


SPLIT = [schedule for schedule in Schedule if schedule.splits]
TURNING = [schedule for schedule in Schedule if schedule.turns]


def lists(p: int, m: int, schedule: Schedule = Schedule.ZERO_BUBBLE, v: int = 1) -> list[tuple[Action, ...]]:
    return [schedule_of(schedule).actions(p, m, stage, v) for stage in range(p)]


def ordered(limits: tuple[int, ...], m: int) -> tuple[tuple[Action, ...], ...]:
    """The greedy order of one chunk a stage."""
    way = Schedule.ZERO_BUBBLE.way(len(limits), 1)
    return greedy_order(Order(way, limits, (range(m),), (2, 3, 1)), m)


def played(orders: Sequence[Sequence[Action]], times: Times, turns: bool = False) -> float:
    """When the last pass ends, if every stage plays its list in order and messages take no time.

    Without weight passes a backward pass takes as long as both; with several chunks the times are those of all.
    """
    splits = any(action.kind is Pass.WEIGHT for own in orders for action in own)
    backward = times[Pass.BACKWARD] + (0 if splits else times[Pass.WEIGHT])
    chunks = 1 + max(action.chunk for action in orders[0])
    takes = {kind: time / chunks for kind, time in {**times, Pass.BACKWARD: backward}.items()}
    over, free, at = dict[tuple[Pass, int, int], float](), [0.0] * len(orders), [0] * len(orders)
    way = (Schedule.ZERO_BUBBLE_V if turns else Schedule.INTERLEAVED_1F1B).way(len(orders), chunks)
    last = len(way) - 1
    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(orders):
            while at[stage] < len(own):
                kind, microbatch, chunk = own[at[stage]]
                here = way.index((stage, chunk))
                needs = {
                    Pass.FORWARD: [(Pass.FORWARD, here - 1)] if here else [],
                    Pass.BACKWARD: [(Pass.BACKWARD, here + 1)] if here < last else [(Pass.FORWARD, here)],
                    Pass.WEIGHT: [(Pass.BACKWARD, here)],
                }[kind]
                if any((way, there, microbatch) not in over for way, there in needs):
                    break
                begins = max([free[stage], *(over[way, there, microbatch] for way, there in needs)])
                free[stage] = over[kind, here, microbatch] = begins + takes[kind]
                at[stage] += 1
                moved = True
    assert all(place == len(own) for place, own in zip(at, orders, strict=True)), "a stage waits for ever"
    return max(free)


@pytest.mark.parametrize("limits", ["p", "1", "mixed"])
def test_no_stage_waits_for_ever_and_none_holds_more_than_its_limit(limits: str) -> None:
    for p, m in SIZES:
        held = {"p": [p] * p, "1": [1] * p, "mixed": [1 + (3 * stage + m) % p for stage in range(p)]}[limits]
        orders = ordered(tuple(held), m)
        played(orders, UNITS)
        for own, limit in zip(orders, held, strict=True):
            assert Counter(own) == Counter(Action(kind, i) for kind in Pass for i in range(m))
            for kind in Pass:
                assert [action.microbatch for action in own if action.kind is kind] == list(range(m))
            done = dict.fromkeys(Pass, 0)
            for action in own:
                done[action.kind] += 1
                forward, backward, weight = done.values()
                assert forward >= backward >= weight
                assert forward - weight <= limit


def test_the_schedule_is_the_order_whose_limit_is_the_number_of_stages() -> None:
    for p, m in SIZES:
        assert lists(p, m) == list(ordered((p,) * p, m))
        in_flight = [schedule_of(Schedule.ZERO_BUBBLE).in_flight(p, m, stage) for stage in range(p)]
        assert in_flight == [min(p, m)] * p


def test_one_stage_leaves_nothing() -> None:
    assert lists(1, 2)[0] == tuple(Action(kind, i) for i in range(2) for kind in Pass)


@pytest.mark.parametrize(("backward", "weight"), [(1.0, 1.0), (1.1, 0.9), (1.3, 1.0), (1.5, 0.5)])
def test_it_is_nowhere_longer_than_1f1b_and_shorter_with_as_many_microbatches_as_stages(
    backward: float, weight: float
) -> None:
    times = {Pass.FORWARD: 1.0, Pass.BACKWARD: backward, Pass.WEIGHT: weight}
    for p, m in SIZES:
        split, joint = played(lists(p, m), times), played(lists(p, m, Schedule.ONE_F_ONE_B), times)
        assert split <= joint + 1e-9, (p, m)
        assert split < joint or p == 1 or m < p, (p, m)


@pytest.mark.parametrize(
    ("schedule", "v"),
    [*((each, 2) for each in SPLIT if each.interleaves), *((each, 1) for each in SPLIT if not each.turns)],
)
def test_every_pass_is_there_in_order_and_no_stage_holds_more_than_it_may(schedule: Schedule, v: int) -> None:
    for p, m in SIZES:
        if v > 1 and p == 1:
            continue
        orders = lists(p, m, schedule, v)
        played(orders, UNITS, schedule.turns)
        for stage, own in enumerate(orders):
            assert Counter(own) == Counter(Action(kind, i, c) for kind in Pass for i in range(m) for c in range(v))
            limit = schedule_of(schedule).in_flight(p, m, stage, v)
            held = 0
            for kind, _, _ in own:
                held += (kind is Pass.FORWARD) - (kind is Pass.WEIGHT)
                assert held <= limit
            for kind, c in product(Pass, range(v)):
                assert [i for which, i, chunk in own if which is kind and chunk == c] == list(range(m))


def test_a_v_holds_what_its_paper_says_on_every_stage() -> None:
    """Of p, (p + 2) // 2 and (p + 4) // 3 microbatches (Qi et al. 2024b), in chunks: a microbatch has two."""
    for p in range(2, 9):
        held = [{schedule_of(each).in_flight(p, 99, stage, 2) for stage in range(p)} for each in TURNING]
        assert held == [{2 * p}, {2 * ((p + 2) // 2)}, {2 * ((p + 4) // 3)}]


@pytest.mark.parametrize(("backward", "weight"), [(1.0, 1.0), (1.2, 0.8)])
def test_a_v_is_shorter_than_1f1b_and_interleaved_ones_are_shorter_split(backward: float, weight: float) -> None:
    """V-Half at about half of the memory, too; V-Min takes up to 14 % more. ZB-H2 is no longer than ZB-H1."""
    times = {Pass.FORWARD: 1.0, Pass.BACKWARD: backward, Pass.WEIGHT: weight}
    for p, m in ((p, m) for p, m in SIZES if m >= p > 1):
        one, more, joint = (
            played(lists(p, m, each), times)
            for each in (Schedule.ZERO_BUBBLE, Schedule.ZERO_BUBBLE_H2, Schedule.ONE_F_ONE_B)
        )
        whole, half, least = (played(lists(p, m, each, 2), times, turns=True) for each in TURNING)
        assert whole < joint and whole < 1.05 * one and more <= one + 1e-9, (p, m)
        assert half < joint and least < 1.14 * joint, (p, m)
        interleaved = played(lists(p, m, Schedule.INTERLEAVED_ZERO_BUBBLE, 2), times)
        assert interleaved < played(lists(p, m, Schedule.INTERLEAVED_1F1B, 2), times), (p, m)


def test_other_numbers_of_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 chunks need an interleaved schedule, not zero_bubble"):
        schedule_of(Schedule.ZERO_BUBBLE).actions(2, 4, 0, 2)
    with pytest.raises(ValueError, match="the schedule v_half needs 2 chunks, not 1"):
        schedule_of(Schedule.V_HALF).actions(2, 4, 0)
