"""Tiny worlds with communicators, and every plan of them counted with those that it makes."""

from collections.abc import Iterator
from math import comb, prod
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from random_problems import every_plan
from random_requests import World, random_world

from shardwright.plan.process_groups import communicator_bytes, communicators
from shardwright.types import GIB, Plan, Recompute, Schedule
from shardwright_search.solver.problem import Problem
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import SearchRequest

__all__ = ["BEYOND", "Best", "best_within", "budgets_of_world", "communicating_world", "with_memory"]

BEYOND = (9, 10, 38, 56, 106, 138, 139)
"""Worlds in which a plan that does not fit with its communicators is the best of a configuration."""
_MAX_PLANS = 10_000


class Best(NamedTuple):
    """The score of the best plan that fits, and the plan."""

    score: float
    plan: Plan | None


def communicating_world(seed: int) -> World | None:
    """A tiny world of one chunk a stage, whose communicators hold as much as the rest; None: it has many plans."""
    world = random_world(seed, (2, 3, 4), 3)
    schedules = tuple(kind for kind in world.request.schedules if kind is not Schedule.INTERLEAVED_1F1B)
    request = replace(world.request, schedules=schedules, recompute=(Recompute.NONE,), megatron_gather_buffer=False)
    world = World(request, world.model, world.cluster, world.profiles)
    instance = world.instance
    problems = [instance.problem(target.configuration) for target in world.targets(instance)]
    if sum(map(_num_plans, problems)) > _MAX_PLANS:
        return None
    need = min(int(np.median(plans.memory.max(0))) for problem in problems for plans in every_plan(problem))
    share = np.random.default_rng(seed).choice([0.1, 0.3, 1.0])
    return world._replace(profiles=world.profiles._replace(communicator_bytes=max(4, int(need * share) // 4 * 4)))


def _num_plans(problem: Problem) -> int:
    """About as many plans as there are."""
    (group, *_), cuts = problem.device_groups, comb(len(problem.layers) - 1, problem.pp_size - 1)
    return cuts * prod(len(group.options[kind].time_ps) for kind in problem.layers)


def with_memory(world: World, memory_bytes: int) -> World:
    """The world with another budget."""
    request: SearchRequest = replace(world.request, memory_gib=memory_bytes / GIB, reserve_gib=0.0)
    return world._replace(request=request)


def _without(world: World) -> Instance:
    free = with_memory(world, world.cluster.node_types[world.cluster.nodes[0].node_type].memory_bytes)
    return free._replace(profiles=world.profiles._replace(communicator_bytes=0)).instance


def budgets_of_world(world: World, count: int) -> list[int]:
    """Ascending budgets, each what one of the fastest plans of some cut needs, or a byte less."""
    instance, rng = _without(world), np.random.default_rng(world.profiles.communicator_bytes)
    needs = list(instance.budgets.values())
    for target in world.targets(instance):
        for plans in every_plan(instance.problem(target.configuration)):
            number = int(rng.choice(np.argsort(plans.times)[:20]))
            plan = instance.plan(target.configuration, plans.solution(number))
            needs.append(max(_needs(world, plan, plans.memory[:, number].tolist())) - int(rng.integers(2)))
    return sorted(rng.choice(needs, min(count, len(needs)), replace=False).tolist())


def best_within(world: World, budgets: list[int]) -> list[Best]:
    """The best plan within each of these budgets of a rank, without the process's memory."""
    instance, found = _without(world), [Best(np.inf, None)] * len(budgets)
    for score, used, plan in _ascending(world, instance, found, budgets):
        need = max(_needs(world, plan, used))
        for number, budget in enumerate(budgets):
            if need <= budget and score < found[number].score:
                found[number] = Best(score, plan)
    return found


def _needs(world: World, plan: Plan, used: list[int]) -> list[int]:
    """Bytes of a rank of each stage, with its communicators."""
    held, of_ranks = world.profiles.communicator_bytes, communicators(plan)
    most = (max(communicator_bytes(of_ranks[rank], held) for rank in stage.ranks) for stage in plan.stages)
    return [own + more for own, more in zip(used, most, strict=True)]


def _ascending(
    world: World, instance: Instance, found: list[Best], budgets: list[int]
) -> Iterator[tuple[float, list[int], Plan]]:
    """Plans of each configuration by ascending time that may still be the best within some budget."""
    held = world.profiles.communicator_bytes
    for target in world.targets(instance):
        for plans in every_plan(instance.problem(target.configuration)):
            scores = np.array([target.score(time) for time in plans.times])
            least = plans.memory.max(0) + held
            for number in np.argsort(scores, kind="stable"):
                open_ = [b for b, best in zip(budgets, found, strict=True) if scores[number] < best.score]
                if not open_:
                    break
                if least[number] <= max(open_):
                    plan = instance.plan(target.configuration, plans.solution(int(number)))
                    yield float(scores[number]), plans.memory[:, number].tolist(), plan
