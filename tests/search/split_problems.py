"""Tiny searches with split backward passes beside every plan, simulated: whether what is proven of them holds."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np
from made_up import make_cluster, make_hardware, make_model, make_profile, make_request
from random_problems import every_plan
from random_requests import FILE, World
from simulated_optimum import without_order

from shardwright.estimate.weight_passes import NO_WEIGHT_PASS, WeightPass
from shardwright.types import EMBEDDING, GIB, HEAD, Plan, Schedule
from shardwright.types.hardware_profile import Collective
from shardwright_search.cost_model import stage_costs
from shardwright_search.cost_model.plan import evaluate, simulated_step_ps
from shardwright_search.cost_model.profiles import index_profiles
from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.solver.problem import Solution, price
from shardwright_search.space import stage_prices
from shardwright_search.space.budget import budgets_of
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.search_space import SearchSpace
from shardwright_search.space.split_problem import SplitConfiguration, split_targets

__all__ = ["mistakes", "split_world", "with_weight_passes"]

_MAX_PLANS = 64
_SOME = 6


class _Plan(NamedTuple):
    """A plan with split backward passes, and what it takes."""

    configuration: Configuration
    solution: Solution
    score: float
    memory_bytes: int


def split_world(seed: int) -> World:
    """Layers whose strategies differ at random on up to four devices, in two to four stages."""
    rng = np.random.default_rng([seed, 41])
    devices = int(rng.choice([2, 4]))
    wide = devices == 4 and rng.random() < 0.5
    model = make_model(
        int(rng.integers(1 if wide or devices == 2 else 2, 3 if wide else 5)), tied=bool(rng.random() < 0.3)
    )
    overlap = [(Collective.ALL_GATHER, 2, 1.25, 1.5)] if rng.random() < 0.5 else []
    cluster = make_cluster(devices)
    latency_s = float(rng.choice([1e-6, 2e-5, 2e-4]))
    hardware = make_hardware(cluster, latency_s=latency_s, bytes_per_s=1e9, overlap=overlap)
    profile = without_order(rng, make_profile(model, tp_sizes=(1, 2, 4), micro_batch_sizes=(1, 2, 4, 8)))
    batch = int(rng.choice([4, 8, 16]))
    request = make_request(
        global_batch_size=batch,
        num_microbatches=[int(rng.choice([m for m in (1, 2, 4, 8, 16) if m <= batch]))],
        pp_sizes=[2] if wide else [devices],
        schedules=["1f1b", "zero_bubble"],
        data_parallel=["zero3"] if rng.random() < 0.5 else ["ddp"],
        sequence_parallel=["none"],
        recompute=["none", "full"],
    )
    return World(request, model, cluster, index_profiles(hardware, FILE, profile, FILE))


@contextmanager
def with_weight_passes(seed: int) -> Iterator[None]:
    """Weight passes of any share of a backward pass, that keep any number of bytes, by strategy."""

    def made(model: object, name: str, strategy: object, samples: int, *_: object) -> WeightPass:
        if name in (EMBEDDING, HEAD):
            return NO_WEIGHT_PASS
        rng = np.random.default_rng([seed, *msgspec.json.encode(strategy), samples])
        return WeightPass(float(rng.uniform(0, 0.7)), int(rng.choice([0, 1 << 10, 1 << 14, 1 << 17])) * samples)

    with patch.object(stage_costs, "weight_pass", made), patch.object(stage_prices, "weight_pass", made):
        yield


def mistakes(seeds: Iterable[int]) -> dict[int, str]:
    """What is said of plans with split backward passes and does not hold, by the seed of the world."""
    wrong = {}
    for seed in seeds:
        with with_weight_passes(seed):
            if (what := _mistake(seed)) is not None:
                wrong[seed] = what
    return wrong


def _mistake(seed: int) -> str | None:
    rng, world = np.random.default_rng([seed, 42]), split_world(seed)
    if (plans := _every(world)) is None:
        return None
    if rng.random() < 0.6:
        needs = np.sort([each.memory_bytes for each in plans])
        asked = needs[int(len(needs) * rng.choice([0, 0.05, 0.3, 0.7]))] / GIB
        world = world._replace(request=msgspec.structs.replace(world.request, memory_gib=float(asked)))
    instance, (budget,) = world.instance, budgets_of(world.request, world.cluster, FILE).values()
    for each in rng.permutation(len(plans))[:_SOME]:
        if (what := _above(instance, plans[each], budget)) is not None:
            return what
    least = min((each.score for each in plans if each.memory_bytes <= budget), default=np.inf)
    answer = find_best(world.request, world.model, world.cluster, world.profiles, FILE, lambda line: None)
    if not isinstance(answer, SearchAnswer):
        return None
    if answer.split_bound > least * (1 + 1e-12):
        return f"no plan is said to be below {answer.split_bound}, one takes {least}"
    if answer.split_plan is not None:
        found = _score(instance, answer.split_plan.plan)
        if found < least or (answer.split_bound >= found and found != least):
            return f"{found} is said to be the least, and {least} is"
    return None


def proven(seeds: Iterable[int]) -> int:
    """Of how many worlds the search proves that no plan with split backward passes is faster than its answer."""
    count = 0
    for seed in seeds:
        world = split_world(seed)
        with with_weight_passes(seed):
            found = find_best(world.request, world.model, world.cluster, world.profiles, FILE, lambda line: None)
            count += isinstance(found, SearchAnswer) and found.split_bound >= _score(found.instance, found.chosen.plan)
    return count


def _every(world: World) -> list[_Plan] | None:
    """All plans with split backward passes; None: they are too many."""
    instance, found = world.instance, list[_Plan]()
    for target in split_targets(SearchSpace(instance, FILE), Schedule.ZERO_BUBBLE) or ():
        joint = target.configuration._replace(schedule=Schedule.ONE_F_ONE_B)
        every = list(every_plan(instance.problem(joint)))
        if sum(plans.times.size for plans in every) > _MAX_PLANS:
            return None
        for solution in (plans.solution(number) for plans in every for number in range(plans.times.size)):
            plan = instance.plan(target.configuration, solution)
            estimate = evaluate(plan, world.profiles, instance.costs, timeline=False).estimate
            score = round(estimate.simulated_step_time_s * 1e12) * target.scale
            found.append(_Plan(target.configuration, solution, score, estimate.memory_bytes))
    return found


def _score(instance: Instance, plan: Plan) -> float:
    return simulated_step_ps(plan, instance.costs) * instance.score_scale(plan.global_batch_size)


def _above(instance: Instance, each: _Plan, budget: int) -> str | None:
    """What a bound says too much of a plan: time, or memory of one that fits."""
    split, target = SplitConfiguration(instance, each.configuration), instance.target(each.configuration)
    p = each.configuration.pp_size
    solution = each.solution._replace(device_groups=tuple(range(p)))
    weights = split.weights
    alone = sum(b - a == 1 for a, b in zip(each.solution.ends[:-2], each.solution.ends[1:-1], strict=True))
    problems = {
        "largest": (split.largest_problem(alone == 0), 0.0),
        "weighted": (split.weighted_problem(weights), alone * split.too_much_ps(weights)),
    }
    for name, (problem, less_ps) in problems.items():
        counted = price(problem, solution)
        if target.score(counted.objective_ps - less_ps) > each.score:
            return f"{name}: {counted.objective_ps - less_ps} ps for a plan that takes {each.score / target.scale}"
        budgets = (problem.device_groups[group].budget_bytes for group in range(p))
        if each.memory_bytes <= budget and any(
            need > budget for need, budget in zip(counted.memory_bytes, budgets, strict=True)
        ):
            return f"{name}: {counted.memory_bytes} bytes for a plan that fits"
    return None
