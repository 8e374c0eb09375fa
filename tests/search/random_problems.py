"""Tiny random problems of the solver, and every plan of them priced with formulas written a second time."""

from collections.abc import Iterator
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np

from shardwright_search.solver.problem import Options, Place, Problem, Solution


class Enumerated(NamedTuple):
    """T and memory of plans that are cut and placed alike, one entry per choice of options."""

    ends: tuple[int, ...]
    places: tuple[int, ...]
    shape: tuple[int, ...]
    times: np.ndarray
    memory: np.ndarray

    def solution(self, plan: int) -> Solution:
        """One of the plans."""
        return Solution(self.ends, tuple(int(i) for i in np.unravel_index(plan, self.shape)), self.places)


def random_problem(seed: int) -> Problem:
    """2 to 4 layers of 1 or 2 types, up to 3 stages on 1 or 2 places, and costs of all kinds that matter."""
    rng = np.random.default_rng(seed)
    pp_size = int(rng.integers(1, 4))
    layers = int(rng.integers(max(2, pp_size), 5 if pp_size < 3 else 4))
    blocks = rng.integers(1, 2 + int(rng.integers(0, 2)), layers)
    layouts, classes = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    spread = int(rng.choice([4, 40, 1000]))
    count = int(rng.choice([1, 2, 3, 8]))
    places = int(rng.integers(1, 3)) if pp_size > 1 else 1

    def options(kind: int) -> Options:
        n = int(rng.integers(1, 4))
        times, ends, states, activations, workspaces = rng.integers(0, spread, (5, n)).astype(float)
        late = rng.integers(0, spread, n).astype(float)
        takes, gives = rng.integers(0, layouts, n), rng.integers(0, layouts, n)
        gives = takes if kind in (1, 2) else gives
        if kind == 0:
            takes = rng.integers(0, classes, n)
        if kind == 3:
            gives = rng.integers(0, classes, n)
        return Options(times + 1, ends, states, late, activations, workspaces, takes, gives)

    def place(budget: int) -> Place:
        moves = rng.integers(0, 1 + spread // int(rng.choice([1, 4])), (4, layouts, layouts)).astype(float)
        moves[:, np.arange(layouts), np.arange(layouts)] = 0
        if rng.random() < 0.5:  # no detour is cheaper: what lets labels of several layouts be compared
            for between in range(layouts):
                moves = np.minimum(moves, moves[:, :, between, None] + moves[:, None, between, :])
        return Place(tuple(options(kind) for kind in range(4)), moves, budget)

    positions = rng.random() < 0.3
    available = [int(n) for n in rng.integers(1, pp_size + 1, places)]
    available[0] = max(available[0], pp_size - sum(available[1:]))
    problem = Problem(
        elements=(0, *(int(b) for b in blocks), 3),
        places=tuple(place(1 << 40) for _ in range(places)),
        available=(pp_size,) * places if positions else tuple(available),
        allowed=tuple((int(rng.integers(places)),) if positions else tuple(range(places)) for _ in range(pp_size)),
        sends_ps=rng.integers(0, 1 + spread // 4, (pp_size - 1, places, places, 4, layouts)).astype(float),
        in_flight=tuple(count if rng.random() < 0.3 else min(count, pp_size - i) for i in range(pp_size)),
        num_microbatches=count,
        boundary_bytes=rng.integers(0, 1 + spread // 3, (4, layouts)).astype(float),
        tie_ps=rng.integers(0, 1 + spread // 2, (classes, classes)).astype(float),
    )
    needs = np.sort(np.concatenate([found.memory.max(0) for found in every_plan(problem)]))
    share = float(rng.choice([0, 0.02, 0.2, 0.6, 0.999]))
    budgets = [int(needs[int(len(needs) * share)] * (1 if i == 0 else rng.choice([0.8, 1.2]))) for i in range(places)]
    return with_budgets(problem, budgets)


def with_budgets(problem: Problem, budgets: list[int]) -> Problem:
    """The same case with other budgets."""
    fields = {name: getattr(problem, name) for name in Problem.__struct_fields__}
    places = tuple(p._replace(budget_bytes=b) for p, b in zip(problem.places, budgets, strict=True))
    return Problem(**fields | {"places": places})


def placements(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Every way to put the stages on places."""
    for places in product(*problem.allowed):
        if all(places.count(place) <= most for place, most in enumerate(problem.available)):
            yield places


def every_plan(problem: Problem) -> Iterator[Enumerated]:
    """All plans, cut by cut."""
    total = len(problem.elements)
    for cuts in combinations(range(2, total - 1), problem.pp_size - 1):
        for places in placements(problem):
            yield _priced(problem, (*cuts, total), places)


def best_of(problem: Problem) -> float:
    """The least T of all plans that fit, or infinity."""
    return min(
        (float(found.times[fits].min()) for found in every_plan(problem) if (fits := fitting(problem, found)).any()),
        default=np.inf,
    )


def fitting(problem: Problem, found: Enumerated) -> np.ndarray:
    """Which of the plans stay within the budgets."""
    budgets = np.array([problem.places[place].budget_bytes for place in found.places])
    return (found.memory <= budgets[:, None]).all(0)


def _priced(problem: Problem, ends: tuple[int, ...], places: tuple[int, ...]) -> Enumerated:
    stage_of = [stage for stage, (a, b) in enumerate(pairwise((0, *ends))) for _ in range(a, b)]
    own = [problem.places[places[s]].options[kind] for s, kind in zip(stage_of, problem.elements, strict=True)]
    shape = tuple(len(o.takes) for o in own)
    chosen = [index.ravel() for index in np.indices(shape)]
    size = len(chosen[0])
    times, ends_ps = np.zeros((problem.pp_size, size)), np.zeros((problem.pp_size, size))
    for e, (stage, o, rows) in enumerate(zip(stage_of, own, chosen, strict=True)):
        times[stage] += o.time_ps[rows]
        ends_ps[stage] += o.end_ps[rows]
        if e:
            kind, gave = problem.elements[e - 1], own[e - 1].gives[chosen[e - 1]]
            times[stage] += problem.places[places[stage]].redistribution_ps[kind, gave, o.takes[rows]]
            if stage_of[e - 1] != stage:
                send = problem.sends_ps[stage - 1, places[stage - 1], places[stage], kind, gave]
                times[stage] += send
                times[stage - 1] += send
    memory = np.zeros((problem.pp_size, size))
    for stage, k in enumerate(problem.in_flight):
        inside = [e for e, s in enumerate(stage_of) if s == stage]
        parts = [(k, False)] if k < problem.num_microbatches else [(k, True)] if k == 1 else [(k, True), (k - 1, False)]
        for flight, late in parts:
            for j in inside:  # the peak while element j works on the last microbatch in flight
                need = own[j].workspace_bytes[chosen[j]]
                for e in inside:
                    o, rows = own[e], chosen[e]
                    need = need + o.state_bytes[rows] + (flight - 1 + (e <= j)) * o.activation_bytes[rows]
                    need = need + (e >= j or not late) * o.late_bytes[rows]
                if stage:  # received of every microbatch in flight, and one gradient of it
                    e = inside[0] - 1
                    need = need + (flight + 1) * problem.boundary_bytes[problem.elements[e], own[e].gives[chosen[e]]]
                if stage < problem.pp_size - 1:  # one gradient of what is given out
                    e = inside[-1]
                    need = need + problem.boundary_bytes[problem.elements[e], own[e].gives[chosen[e]]]
                memory[stage] = np.maximum(memory[stage], need)
    tie = problem.tie_ps[own[0].takes[chosen[0]], own[-1].gives[chosen[-1]]]
    objective = times.sum(0) + (problem.num_microbatches - 1) * times.max(0) + ends_ps.max(0) + tie
    return Enumerated(ends, places, shape, objective, memory)
