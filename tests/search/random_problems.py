"""Tiny random problems of the solver, and every plan of them priced with formulas written a second time."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from shardwright_search.solver.problem import DeviceGroup, Options, Problem, Solution


class Enumerated(NamedTuple):
    """T and memory of plans that are cut and placed alike, one entry per choice of options."""

    ends: tuple[int, ...]
    device_groups: tuple[int, ...]
    shape: tuple[int, ...]
    times: np.ndarray
    memory: np.ndarray

    def solution(self, plan: int) -> Solution:
        """One of the plans."""
        return Solution(self.ends, tuple(int(i) for i in np.unravel_index(plan, self.shape)), self.device_groups)


@lru_cache(maxsize=2_000)
def random_problem(seed: int) -> Problem:
    """2 to 4 layers of 1 or 2 types, up to 3 stages on 1 or 2 places, and costs of all kinds that matter."""
    rng = np.random.default_rng(seed)
    pp_size = int(rng.integers(1, 4))
    layers = int(rng.integers(max(2, pp_size), 5 if pp_size < 3 else 4))
    blocks = rng.integers(1, 2 + int(rng.integers(0, 2)), layers)
    layouts, classes = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    sharding = int(rng.choice([4, 40, 1000]))
    count = int(rng.choice([1, 2, 3, 8]))
    device_groups = int(rng.integers(1, 3)) if pp_size > 1 else 1

    def options(kind: int) -> Options:
        n = int(rng.integers(1, 4))
        times, ends, states, activations, transients = rng.integers(0, sharding, (5, n)).astype(float)
        late = rng.integers(0, sharding, n).astype(float)
        input_layout, output_layout = rng.integers(0, layouts, n), rng.integers(0, layouts, n)
        output_layout = input_layout if kind in (1, 2) else output_layout
        if kind == 0:
            input_layout = rng.integers(0, classes, n)
        if kind == 3:
            output_layout = rng.integers(0, classes, n)
        return Options(times + 1, ends, states, late, activations, transients, input_layout, output_layout)

    def group(budget: int) -> DeviceGroup:
        moves = rng.integers(0, 1 + sharding // int(rng.choice([1, 4])), (4, layouts, layouts)).astype(float)
        moves[:, np.arange(layouts), np.arange(layouts)] = 0
        if rng.random() < 0.5:  # no detour is cheaper: what lets labels of several layouts be compared
            for between in range(layouts):
                moves = np.minimum(moves, moves[:, :, between, None] + moves[:, None, between, :])
        return DeviceGroup(tuple(options(kind) for kind in range(4)), moves, budget)

    positions = rng.random() < 0.3
    available = [int(n) for n in rng.integers(1, pp_size + 1, device_groups)]
    available[0] = max(available[0], pp_size - sum(available[1:]))
    problem = Problem(
        layers=(0, *(int(b) for b in blocks), 3),
        device_groups=tuple(group(1 << 40) for _ in range(device_groups)),
        available=(pp_size,) * device_groups if positions else tuple(available),
        allowed=tuple(
            (int(rng.integers(device_groups)),) if positions else tuple(range(device_groups)) for _ in range(pp_size)
        ),
        sends_ps=rng.integers(0, 1 + sharding // 4, (pp_size - 1, device_groups, device_groups, 4, layouts)).astype(
            float
        ),
        in_flight=tuple(count if rng.random() < 0.3 else min(count, pp_size - i) for i in range(pp_size)),
        num_microbatches=count,
        boundary_bytes=rng.integers(0, 1 + sharding // 3, (4, layouts)).astype(float),
        tie_ps=rng.integers(0, 1 + sharding // 2, (classes, classes)).astype(float),
    )
    needs = np.sort(np.concatenate([found.memory.max(0) for found in every_plan(problem)]))
    share = float(rng.choice([0, 0.02, 0.2, 0.6, 0.999]))
    budgets = [
        int(needs[int(len(needs) * share)] * (1 if i == 0 else rng.choice([0.8, 1.2]))) for i in range(device_groups)
    ]
    return with_budgets(problem, budgets)


def with_budgets(problem: Problem, budgets: list[int]) -> Problem:
    """The same case with other budgets."""
    fields = {name: getattr(problem, name) for name in Problem.__struct_fields__}
    device_groups = tuple(replace(p, budget_bytes=b) for p, b in zip(problem.device_groups, budgets, strict=True))
    return Problem(**fields | {"device_groups": device_groups})


def placements(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Every way to put the stages on places."""
    for device_groups in product(*problem.allowed):
        if all(device_groups.count(group) <= most for group, most in enumerate(problem.available)):
            yield device_groups


def every_plan(problem: Problem) -> Iterator[Enumerated]:
    """All plans, cut by cut."""
    total = len(problem.layers)
    for cuts in combinations(range(2, total - 1), problem.pp_size - 1):
        for device_groups in placements(problem):
            yield _priced(problem, (*cuts, total), device_groups)


@lru_cache(maxsize=2_000)
def best_of(problem: Problem) -> float:
    """The least T of all plans that fit, or infinity."""
    return min(
        (float(found.times[fits].min()) for found in every_plan(problem) if (fits := fitting(problem, found)).any()),
        default=np.inf,
    )


def fitting(problem: Problem, found: Enumerated) -> np.ndarray:
    """Which of the plans stay within the budgets."""
    budgets = np.array([problem.device_groups[group].budget_bytes for group in found.device_groups])
    return (found.memory <= budgets[:, None]).all(0)


def _priced(problem: Problem, ends: tuple[int, ...], device_groups: tuple[int, ...]) -> Enumerated:
    stage_of = [stage for stage, (a, b) in enumerate(pairwise((0, *ends))) for _ in range(a, b)]
    own = [
        problem.device_groups[device_groups[s]].options[kind] for s, kind in zip(stage_of, problem.layers, strict=True)
    ]
    shape = tuple(len(o.input_layout) for o in own)
    chosen = [index.ravel() for index in np.indices(shape)]
    size = len(chosen[0])
    times, ends_ps = np.zeros((problem.pp_size, size)), np.zeros((problem.pp_size, size))
    for e, (stage, o, rows) in enumerate(zip(stage_of, own, chosen, strict=True)):
        times[stage] += o.time_ps[rows]
        ends_ps[stage] += o.exposed_ps[rows]
        if e:
            kind, gave = problem.layers[e - 1], own[e - 1].output_layout[chosen[e - 1]]
            times[stage] += problem.device_groups[device_groups[stage]].redistribution_ps[
                kind, gave, o.input_layout[rows]
            ]
            if stage_of[e - 1] != stage:
                send = problem.sends_ps[stage - 1, device_groups[stage - 1], device_groups[stage], kind, gave]
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
                    need = (
                        need + (flight + 1) * problem.boundary_bytes[problem.layers[e], own[e].output_layout[chosen[e]]]
                    )
                if stage < problem.pp_size - 1:  # one gradient of what is given out
                    e = inside[-1]
                    need = need + problem.boundary_bytes[problem.layers[e], own[e].output_layout[chosen[e]]]
                memory[stage] = np.maximum(memory[stage], need)
    tie = problem.tie_ps[own[0].input_layout[chosen[0]], own[-1].output_layout[chosen[-1]]]
    objective = times.sum(0) + (problem.num_microbatches - 1) * times.max(0) + ends_ps.max(0) + tie
    return Enumerated(ends, device_groups, shape, objective, memory)
