"""What must hold of the solver's answers whatever the problem."""

from itertools import cycle

import numpy as np
from brute_force import solved
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from random_problems import random_problem, random_unequal, with_budgets

from shardwright_search.solver.problem import Cut, DeviceGroup, Options, Problem

SEEDS = st.integers(0, 1_000_000)
PROBLEMS = SEEDS.flatmap(lambda seed: st.sampled_from([random_problem, random_unequal]).map(lambda made: made(seed)))
MANY = settings(deadline=None, max_examples=40, derandomize=True)


def changed(problem: Problem, **changes: object) -> Problem:
    fields = {name: getattr(problem, name) for name in Problem.__struct_fields__}
    return Problem(**fields | changes)


def best(problem: Problem) -> float:
    """T of the best plan, or infinity."""
    answer = solved(problem)
    return np.inf if answer.best is None else answer.best.score


@MANY
@given(PROBLEMS, st.lists(st.floats(0, 2), min_size=2, max_size=2))
def test_more_memory_is_never_slower(problem, more):
    budgets = [place.budget_bytes for place in problem.device_groups]
    larger = [int(budget * (1 + share)) for budget, share in zip(budgets, cycle(more), strict=False)]
    assert best(with_budgets(problem, larger)) <= best(problem)


@MANY
@given(PROBLEMS, st.integers(0, 3), SEEDS)
def test_a_wider_space_is_never_slower(problem, kind, which):
    """The full space has all options that a narrower one has, and others."""
    keep = np.random.default_rng(which).random(8) < 0.5
    keep[0] = True

    def narrow(place: DeviceGroup) -> DeviceGroup:
        rows = np.flatnonzero(keep[: len(place.options[kind].input_layout)])
        options = tuple(o.take(rows) if i == kind else o for i, o in enumerate(place.options))
        return replace(place, options=options)

    assert best(problem) <= best(changed(problem, device_groups=tuple(map(narrow, problem.device_groups))))


@MANY
@given(PROBLEMS, SEEDS)
def test_a_problem_told_in_another_order_has_the_same_answer(problem, which):
    """Places, options and layouts have other numbers."""
    rng = np.random.default_rng(which)
    device_groups, layouts = rng.permutation(len(problem.device_groups)), rng.permutation(problem.num_layouts)
    new_place, new_layout = np.argsort(device_groups), np.argsort(layouts)

    def told(kind: int, options: Options) -> Options:
        rows = rng.permutation(len(options.input_layout))
        input_layout = options.input_layout if kind == 0 else new_layout[options.input_layout]
        output_layout = options.output_layout if kind == 3 else new_layout[options.output_layout]
        return options._replace(input_layout=input_layout, output_layout=output_layout).take(rows)

    other = changed(
        problem,
        device_groups=tuple(
            DeviceGroup(
                tuple(told(kind, options) for kind, options in enumerate(place.options)),
                place.redistribution_ps[:, layouts][:, :, layouts],
                place.budget_bytes,
                place.width,
            )
            for place in (problem.device_groups[i] for i in device_groups)
        ),
        placements=tuple(
            {at: tuple((int(new_place[group]), after) for group, after in own) for at, own in moves.items()}
            for moves in problem.placements
        ),
        sends_ps={
            Cut(cut.position, int(new_place[cut.before]), int(new_place[cut.behind])): sends[:, layouts][..., layouts]
            for cut, sends in problem.sends_ps.items()
        },
        boundary_bytes=problem.boundary_bytes[:, layouts],
    )
    assert best(other) == best(problem)


@MANY
@given(PROBLEMS, st.integers(2, 10_000))
def test_times_that_are_so_many_times_as_long_take_so_many_times_as_long(problem, factor):

    def scaled(place: DeviceGroup) -> DeviceGroup:
        options = (o._replace(time_ps=o.time_ps * factor, exposed_ps=o.exposed_ps * factor) for o in place.options)
        return replace(place, options=tuple(options), redistribution_ps=place.redistribution_ps * factor)

    other = changed(
        problem,
        device_groups=tuple(map(scaled, problem.device_groups)),
        sends_ps={cut: sends * factor for cut, sends in problem.sends_ps.items()},
        tied_ps=problem.tied_ps * factor,
    )
    assert best(other) == best(problem) * factor


@MANY
@given(PROBLEMS, st.integers(2, 10_000))
def test_memory_in_other_units_changes_nothing(problem, factor):

    def scaled(place: DeviceGroup) -> DeviceGroup:
        columns = ("state_bytes", "late_bytes", "sum_bytes", "activation_bytes", "workspace_bytes")
        options = (o._replace(**{name: getattr(o, name) * factor for name in columns}) for o in place.options)
        return replace(place, options=tuple(options), budget_bytes=place.budget_bytes * factor)

    resident = problem.boundary_bytes * factor
    assert best(
        changed(problem, device_groups=tuple(map(scaled, problem.device_groups)), boundary_bytes=resident)
    ) == best(problem)


@MANY
@given(PROBLEMS, st.integers(1, 1000))
def test_what_all_ties_cost_comes_on_top(problem, more):
    assert best(changed(problem, tied_ps=problem.tied_ps + more)) == best(problem) + more


@MANY
@given(PROBLEMS)
def test_an_option_that_is_there_twice_changes_nothing(problem):

    def doubled(place: DeviceGroup) -> DeviceGroup:
        return replace(place, options=tuple(o.take(np.arange(len(o.input_layout)).repeat(2)) for o in place.options))

    assert best(changed(problem, device_groups=tuple(map(doubled, problem.device_groups)))) == best(problem)


@MANY
@given(PROBLEMS)
def test_among_equal_plans_the_choice_is_always_the_same(problem):
    first, again = solved(problem), solved(problem)
    assert first.near == again.near
