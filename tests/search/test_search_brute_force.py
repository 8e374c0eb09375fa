"""The solver against every plan of tiny random cases, counted with a formula written a second time."""

from collections.abc import Callable
from functools import cache, partial
from itertools import combinations, product

import numpy as np
import pytest

from shardwright_search.solver import optimise
from shardwright_search.solver.bounds import floors, lower_bound_ps
from shardwright_search.solver.optimise import least_memory, solve
from shardwright_search.solver.partition import best_partition
from shardwright_search.solver.problem import Options, Problem, StageTable

Price = Callable[[Problem, list[int], tuple[int, ...]], tuple[int, int]]


def random_problem(price: Price, seed: int) -> tuple[Problem, list[tuple[int, int]]]:
    """A case with 2 to 4 layers of 1 or 2 types, up to 3 pipeline stages, and costs of all kinds that matter.

    With it, T and memory of every plan.
    """
    rng = np.random.default_rng(seed)
    pp_size = int(rng.integers(1, 4))
    layers = int(rng.integers(max(2, pp_size), 5 if pp_size < 3 else 4))
    blocks = rng.integers(1, 2 + int(rng.integers(0, 2)), layers)
    layouts = int(rng.integers(1, 4))
    spread = int(rng.choice([4, 40, 1000]))
    gpipe = bool(rng.integers(0, 2))
    count = int(rng.choice([1, 2, 3, 8]))

    def options() -> Options:
        n = int(rng.integers(1, 4))
        times, syncs, optimizers, states, activations, transients = rng.integers(0, spread, (6, n))
        optimizers = optimizers // int(rng.choice([1, 10, 10_000]))
        return Options(times + 1, syncs, optimizers, states, activations, transients, rng.integers(0, layouts, n))

    def table() -> StageTable:
        moves = rng.integers(0, 1 + spread // int(rng.choice([1, 4])), (4, layouts, layouts))
        moves[:, np.arange(layouts), np.arange(layouts)] = 0
        return StageTable(tuple(options() for _ in range(4)), moves)

    shared = table()
    problem = Problem(
        elements=(0, *(int(b) for b in blocks), 3),
        tables=tuple(shared if rng.random() < 0.7 else table() for _ in range(pp_size)),
        sends_ps=rng.integers(0, 1 + spread // 4, (pp_size - 1, 4, layouts)),
        in_flight=tuple(count if gpipe else min(count, pp_size - i) for i in range(pp_size)),
        num_microbatches=count,
        budget_bytes=1 << 40,
    )
    prices = every_plan(price, problem)
    needs = sorted(memory for _, memory in prices)
    return with_budget(problem, needs[int(len(needs) * rng.choice([0, 0.02, 0.2, 0.6, 0.999]))]), prices


def with_budget(problem: Problem, budget_bytes: int) -> Problem:
    """The same case with another budget."""
    fields = {name: getattr(problem, name) for name in Problem.__struct_fields__}
    return Problem(**fields | {"budget_bytes": budget_bytes})


def every_plan(price: Price, problem: Problem) -> list[tuple[int, int]]:
    """T and memory of every plan of a case."""
    total, p = len(problem.elements), len(problem.tables)
    found = []
    for cuts in combinations(range(2, total - 1), p - 1):
        bounds = (0, *cuts, total)
        stage_of = [stage for stage in range(p) for _ in range(bounds[stage], bounds[stage + 1])]
        every = [
            range(len(problem.tables[s].options[t].layout)) for s, t in zip(stage_of, problem.elements, strict=True)
        ]
        found += [price(problem, stage_of, chosen) for chosen in product(*every)]
    return found


@pytest.fixture(scope="module")
def priced(price):
    """A case by its seed, with T and memory of every plan of it."""
    return cache(partial(random_problem, price))


@pytest.mark.parametrize("hundred", range(6))
def test_solver_equals_brute_force_on_every_tiny_case(price, priced, hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        problem, prices = priced(seed)
        best = min(time for time, memory in prices if memory <= problem.budget_bytes)
        for solution in (solve(problem), best_partition(problem, best, None).solution):
            assert solution is not None, seed
            assert solution.objective_ps == best, seed
            stage_of = np.searchsorted(solution.ends, np.arange(len(problem.elements)), side="right").tolist()
            assert price(problem, stage_of, solution.options) == (best, solution.memory_bytes), seed
            assert solution.memory_bytes <= problem.budget_bytes, seed


def test_a_solver_that_keeps_few_labels_first_is_still_exact(priced, monkeypatch):
    monkeypatch.setattr(optimise, "_FIRST_LABELS", 2)
    for seed in range(150):
        problem, prices = priced(seed)
        solution = solve(problem)
        assert solution is not None
        assert solution.objective_ps == min(time for time, memory in prices if memory <= problem.budget_bytes), seed


def test_no_bound_exceeds_the_best_plan_through_its_label(priced):
    """The bound of no elements at all is one on the optimum."""
    for seed in range(300):
        problem, prices = priced(seed)
        none = np.zeros((1, 3), np.int64), np.zeros(1, np.int64)
        bound = lower_bound_ps(problem, floors(problem), (), *none)
        assert bound[0] <= min(time for time, memory in prices if memory <= problem.budget_bytes), seed


def test_least_memory_is_exact(priced):
    for seed in range(300):
        problem, prices = priced(seed)
        assert least_memory(problem).memory_bytes == min(memory for _, memory in prices), seed


def test_less_than_the_least_memory_has_no_plan(priced):
    for seed in range(60):
        problem, prices = priced(seed)
        least = min(memory for _, memory in prices)
        fits = solve(with_budget(problem, least))
        assert fits is not None and fits.memory_bytes == least
        assert solve(with_budget(problem, least - 1)) is None


def test_more_memory_is_never_slower(priced):
    for seed in range(60):
        problem, _ = priced(seed)
        found = [solve(with_budget(problem, int(problem.budget_bytes * more))) for more in (1.0, 1.1, 1.5, 3.0)]
        times = [solution.objective_ps for solution in found if solution is not None]
        assert len(times) == 4 and times == sorted(times, reverse=True), seed
