"""The solver beside every plan of a problem: what it gets wrong, if anything."""

from collections.abc import Callable
from functools import cache

import numpy as np
from random_problems import best_of, random_problem

from shardwright_search.solver.branch_and_bound import optimize
from shardwright_search.solver.partition import Pipeline
from shardwright_search.solver.problem import Problem, price
from shardwright_search.solver.quick_bounds import Relaxed
from shardwright_search.solver.stage_options import GroupCosts
from shardwright_search.solver.targets import Optimum, Target

__all__ = ["NEAR", "mistake", "mistakes", "pipeline_of", "solved"]

NEAR = 0.01


def solved(problem: Problem, deadline: float | None = None) -> Optimum[int]:
    """The solver's answer, with plans near the best one."""
    pipeline = pipeline_of(problem)
    target = Target(0, 0.0, 1.0)
    return optimize([target], lambda _: pipeline, NEAR, 8, deadline, wide=problem.is_mixed)


def pipeline_of(problem: Problem) -> Pipeline:
    """A problem that remembers what it priced, and the labels that it found."""
    return Pipeline(problem, cache(GroupCosts), Relaxed())


def mistake(problem: Problem, answer: Optimum[int]) -> str | None:
    """What is wrong with an answer, or None."""
    best = best_of(problem)
    found = np.inf if answer.best is None else answer.best.score
    if found != best or answer.bound != best:
        return f"found {found} with a bound of {answer.bound}, the best of all plans takes {best}"
    if any(bound > best for bound, _ in answer.bounds):
        return f"bounded by {answer.bounds[0][0]}, the best of all plans takes {best}"
    groups = problem.device_groups
    for one in answer.near:
        counted, device_groups = price(problem, one.priced.solution), one.priced.solution.device_groups
        if counted.objective_ps != one.score or one.score > best * (1 + NEAR):
            return f"{one} takes {counted.objective_ps}"
        stages = zip(counted.memory_bytes, counted.host_bytes, (groups[at] for at in device_groups), strict=True)
        if any(need > on.budget_bytes or host > on.host_budget_bytes for need, host, on in stages):
            return f"{one} needs {counted.memory_bytes} and {counted.host_bytes} of the host"
    return None


def mistakes(seeds: range, made: Callable[[int], Problem] = random_problem) -> dict[int, str]:
    """What the solver gets wrong, by the seed of the problem."""
    problems = ((seed, made(seed)) for seed in seeds)
    found = ((seed, mistake(problem, solved(problem))) for seed, problem in problems)
    return {seed: what for seed, what in found if what is not None}
