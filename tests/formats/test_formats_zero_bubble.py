"""The greedy order of split backward passes: complete, without deadlock, within its limits, quicker than 1F1B."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

import pytest

from shardwright.plan.schedules.passes import Action, Pass
from shardwright.plan.schedules.registry import schedule_of
from shardwright.plan.schedules.zero_bubble import greedy_order
from shardwright.types import Schedule

SIZES = [*product(range(1, 9), range(1, 17))]
"""All numbers of stages and microbatches of small pipelines."""
Times = Mapping[Pass, float]
UNITS = dict.fromkeys(Pass, 1.0)


def lists(p: int, m: int, schedule: Schedule = Schedule.ZERO_BUBBLE) -> list[tuple[Action, ...]]:
    return [schedule_of(schedule).actions(p, m, stage) for stage in range(p)]


def played(orders: Sequence[Sequence[Action]], times: Times) -> float:
    """When the last pass ends, if every stage plays its list in order and messages take no time.

    Without weight passes a backward pass takes as long as both.
    """
    splits = any(action.kind is Pass.WEIGHT for own in orders for action in own)
    backward = times[Pass.BACKWARD] + (0 if splits else times[Pass.WEIGHT])
    takes = {**times, Pass.BACKWARD: backward}
    over, free, at = dict[tuple[Pass, int, int], float](), [0.0] * len(orders), [0] * len(orders)
    last = len(orders) - 1
    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(orders):
            while at[stage] < len(own):
                kind, microbatch, _ = own[at[stage]]
                needs = {
                    Pass.FORWARD: [(Pass.FORWARD, stage - 1)] if stage else [],
                    Pass.BACKWARD: [(Pass.BACKWARD, stage + 1)] if stage < last else [(Pass.FORWARD, stage)],
                    Pass.WEIGHT: [(Pass.BACKWARD, stage)],
                }[kind]
                if any((way, there, microbatch) not in over for way, there in needs):
                    break
                begins = max([free[stage], *(over[way, there, microbatch] for way, there in needs)])
                free[stage] = over[kind, stage, microbatch] = begins + takes[kind]
                at[stage] += 1
                moved = True
    assert all(place == len(own) for place, own in zip(at, orders, strict=True)), "a stage waits for ever"
    return max(free)


@pytest.mark.parametrize("limits", ["p", "1", "mixed"])
def test_no_stage_waits_for_ever_and_none_holds_more_than_its_limit(limits: str) -> None:
    for p, m in SIZES:
        held = {"p": [p] * p, "1": [1] * p, "mixed": [1 + (3 * stage + m) % p for stage in range(p)]}[limits]
        orders = greedy_order(tuple(held), m)
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
        assert lists(p, m) == list(greedy_order((p,) * p, m))
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


def test_several_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 chunks need the schedule interleaved_1f1b, not zero_bubble"):
        schedule_of(Schedule.ZERO_BUBBLE).actions(2, 4, 0, 2)
