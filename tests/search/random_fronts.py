"""Fronts of time against price over several tiny problems, against every plan of each."""

import numpy as np
from brute_force import pipeline_of
from random_problems import best_of, random_mixed

from shardwright_search.rent.front import Prices, RentalPrice, Rented
from shardwright_search.solver.branch_and_bound import Exhausted, exhaust
from shardwright_search.solver.targets import Target

_PROBLEMS = 6


def front_mistakes(seeds: range, kinds: int = 2_000) -> dict[int, str]:
    """What is wrong with the fronts of random sub-clusters, by seed; their problems are out of so many."""
    found = ((seed, front_mistake(seed, kinds)) for seed in seeds)
    return {seed: what for seed, what in found if what is not None}


def front_mistake(seed: int, kinds: int) -> str | None:
    """What is wrong with a front, or None."""
    rng = np.random.default_rng(seed)
    problems = [random_mixed(int(own)) for own in rng.integers(0, kinds, _PROBLEMS)]
    prices = Prices([float(usd) for usd in rng.integers(0, 9, _PROBLEMS)])
    answer = found_by(prices, problems)
    known = {number: prices.price(number, best) for number, p in enumerate(problems) if (best := best_of(p)) < np.inf}
    best = {own for own in known.values() if not any(other.dominates(own) for other in known.values())}
    if set(prices.front.values()) != best:
        return f"found {prices.front}, the front of all plans is {sorted(best)}"
    for number, bound in enumerate(answer.bounds):
        own = known.get(number)
        if own is None or number in prices.front:
            continue
        at_bound = prices.price(number, bound)
        if at_bound.step_s > own.step_s or not _covered(at_bound, best):
            return f"problem {number} is bounded by {at_bound}, and its best plan is {own}"
    return None


def found_by(prices: Prices, problems: list[object]) -> Exhausted:
    """The search of every problem as far as the front needs it."""
    every = [pipeline_of(problem) for problem in problems]
    targets = [Target(Rented(number, None), 0.0, 1.0) for number in range(len(problems))]
    return exhaust(targets, lambda rented: every[rented.sub_cluster], prices.limit, prices.take)


def _covered(own: RentalPrice, points: set[RentalPrice]) -> bool:
    return any(step_s <= own.step_s * (1 + 1e-9) and usd <= own.usd * (1 + 1e-9) for step_s, usd in points)
