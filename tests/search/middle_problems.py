"""Random problems that are too large to list all plans of, with memory that binds."""

import numpy as np
from brute_force import pipeline_of
from random_problems import with_budgets
from stage_moves import counted, handed_as_given

from shardwright.plan.schedules.schedule import ClosedForm
from shardwright_search.solver.branch_and_bound import optimize
from shardwright_search.solver.min_memory import min_memory
from shardwright_search.solver.partition import PricedSolution
from shardwright_search.solver.problem import DeviceGroup, Options, Problem, price
from shardwright_search.solver.targets import Target

__all__ = ["middle_problem", "solved"]

_TYPES, _LAYOUTS, _CLASSES = 4, 2, 2
_LARGE = 1 << 40


def middle_problem(seed: int) -> Problem:
    """6 to 10 layers of two types, 2 or 3 stages, 3 to 5 options: the faster one holds more; budgets in between."""
    rng = np.random.default_rng(seed)
    pp_size, layers = int(rng.integers(2, 4)), int(rng.integers(6, 11))
    count = int(rng.choice([1, 2, 4, 8]))
    split = int(rng.integers(1, layers + 1))

    def options(kind: int) -> Options:
        n = int(rng.integers(3, 6))
        memory = rng.uniform(1e8, 4e9, n)
        time = (2e10 + 4e19 / memory) * rng.uniform(0.8, 1.2, n)
        shares = rng.dirichlet([4, 2, 4, 1], n).T * memory
        layout, other = rng.integers(0, _LAYOUTS, n), rng.integers(0, _CLASSES, n)
        end = rng.uniform(0, 4e10, n)
        state, late, *rest = shares
        (apart,) = rng.spawn(1)
        sums = late * apart.integers(0, 2, n) * bool(seed % 2)
        numbers = [np.round(column) for column in (time, end, state, late, sums, *rest)]
        input_layout, output_layout = other if kind == 0 else layout, other if kind == _TYPES - 1 else layout
        return Options(*numbers, *np.zeros((2, n)), input_layout, output_layout)

    moves = np.round(rng.uniform(0, 2e10, (_TYPES, _LAYOUTS, _LAYOUTS)))
    moves[:, np.arange(_LAYOUTS), np.arange(_LAYOUTS)] = 0
    placements = counted([(0,)] * pp_size, [pp_size])
    problem = Problem(
        layers=(0, *(1 if i < split else 2 for i in range(layers)), _TYPES - 1),
        device_groups=(DeviceGroup(tuple(options(kind) for kind in range(_TYPES)), moves, _LARGE),),
        placements=placements,
        sends_ps=handed_as_given(placements, np.round(rng.uniform(0, 1e10, (pp_size - 1, 1, 1, _TYPES, _LAYOUTS)))),
        in_flight=tuple(min(count, pp_size - i) for i in range(pp_size)),
        num_microbatches=count,
        closed_form=ClosedForm(1, count - 1),
        tied_ps=np.round(rng.uniform(0, 3e10, (_CLASSES, _CLASSES))),
        boundary_bytes=np.round(rng.uniform(0, 3e8, (_TYPES, _LAYOUTS))),
    )
    least, most = min_memory(problem).memory_bytes, max(price(problem, solved(problem).solution).memory_bytes)
    return with_budgets(problem, [int(least + rng.uniform(0.05, 0.7) * (most - least))])


def solved(problem: Problem) -> PricedSolution:
    """The best plan by the solver."""
    best = optimize([Target(0, 0.0, 1.0)], lambda _: pipeline_of(problem)).best
    assert best is not None
    return best.priced
