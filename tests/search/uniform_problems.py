"""Tiny searches of one strategy for all layers, beside every plan of each, which is listed without the search."""

from collections.abc import Iterator
from math import comb, prod

import numpy as np
from interleaved_problems import every_interleaved
from mixed_worlds import mixed_world
from msgspec.structs import replace
from random_problems import every_plan, fitting
from random_requests import FILE, random_world

from shardwright.types import EMBEDDING, GIB, HEAD, UNSET, Strategy
from shardwright_search.solver.branch_and_bound import optimize
from shardwright_search.solver.interleaved_problem import InterleavedProblem
from shardwright_search.solver.problem import DeviceGroup, Problem
from shardwright_search.space.configurations import NO_DEMANDS, Configuration, Demands, Outer
from shardwright_search.space.request import StageWidths
from shardwright_search.space.search_space import NothingListed, SearchSpace, space_of

__all__ = ["mistake", "mistakes", "tiny_space"]

_DEMANDS = (NO_DEMANDS, Demands(Outer.ALIKE), Demands(Outer.AS_LAYERS, block_in_each_stage=True))
_MAX_NEEDS = 400
_MAX_PLANS = 40_000
_PER_CASE = 100


def mistakes(seeds: range) -> dict[int, str]:
    """What the search of one strategy gets wrong, by the seed of its world."""
    found = ((seed, mistake(seed)) for seed in seeds)
    return {seed: what for seed, what in found if what is not None}


def mistake(seed: int) -> str | None:
    """What the search of a world gets wrong, or None."""
    if (space := tiny_space(seed)) is None:
        return None
    least: dict[Configuration, float] = {}
    for whole, shared, problem in _problems(space):
        time, score = _best(problem), space.instance.target(whole).score
        least[shared] = score(time)
        bound_ps = space.deferred(shared).relaxed_bound_ps
        if bound_ps > time:
            return f"{shared} is bounded by {bound_ps}, its best plan takes {time}"
    if set(least) != {target.configuration for target in space.listed}:
        return f"{len(least)} cases have plans, and {len(space.listed)} are listed"
    best, answer = min(least.values()), optimize(space.targets, space.solvable, 0.01, 8)
    found = np.inf if answer.best is None else answer.best.score
    if found != best or answer.bound != best:
        return f"found {found} with a bound of {answer.bound}, the best of all plans takes {best}"
    return next((f"{one} is no plan of those near" for one in answer.near if one.score > 1.01 * best), None)


def tiny_space(seed: int) -> SearchSpace | None:
    """A space of one strategy for all layers, most of them with little memory; None: it has no plan, or many."""
    rng, demands = np.random.default_rng(seed), _DEMANDS[seed % 3]
    if seed % 4 == 3:
        request, *given = mixed_world(seed)
        request = replace(
            request, stage_widths=StageWidths.EQUAL, num_microbatches=(1, 4), data_parallel=("ddp", "zero3")
        )
    else:
        request, *given = random_world(seed, (2, 3, 4, 6), 4)
    few = {"max_tp_size": 2} if rng.random() < 0.5 else {"recompute": request.recompute[:1]}
    request = replace(request, fine_grained=False, megatron_gather_buffer=False, **few)
    space = space_of(request, *given, FILE, demands=demands)
    try:
        _ = space.targets
    except NothingListed:
        return None
    if sum(_num_plans(problem) for _, _, problem in _problems(space)) > _MAX_PLANS:
        return None
    if rng.random() < 0.3:
        return space
    needs = [need for _, _, problem in _problems(space, int(rng.integers(1, 9))) for need in _needs(problem)]
    most = max(profiles.process_bytes for profiles in given[-1].used(given[-2]))
    budget = (float(np.quantile(needs, rng.choice([0.02, 0.1, 0.3]))) + most + 16) / GIB
    return space_of(replace(request, memory_gib=budget, reserve_gib=0.0), *given, FILE, demands=demands)


def _problems(
    space: SearchSpace, every: int = 1
) -> Iterator[tuple[Configuration, Configuration, Problem | InterleavedProblem]]:
    """Every so many-th case: a configuration, with the strategies that are shared, and as a problem of these alone."""
    free = SearchSpace(_free(space), FILE, space.demands._replace(outer=Outer.FREE))
    instance = free.instance
    for number, (target, kinds) in enumerate(_shared(free, space.demands.outer)):
        whole, (layers, outer) = target._replace(block_in_each_stage=space.demands.block_in_each_stage), kinds
        if number % every or (whole.block_in_each_stage and whole.pp_size > len(instance.costs.model.layers)):
            continue
        make = instance.problem if whole.num_chunks == 1 else instance.interleaved_problem
        chosen = whole._replace(layers=layers, outer=outer)
        yield whole, chosen, _only(instance, whole, make(whole), layers, outer)


def _free(space: SearchSpace):
    instance = space.instance
    return type(instance).made(replace(instance.request, fine_grained=True), instance.costs, instance.budgets)


def _shared(free: SearchSpace, outer: Outer) -> Iterator[tuple[Configuration, tuple[object, Strategy | None]]]:
    instance, model = free.instance, free.instance.costs.model
    for target in free.listed:
        whole = target.configuration
        choice = instance.choices.choice(whole)
        of_type = instance.choices.layers.shardings(choice).strategies[choice.widths[0]]
        kinds = sorted(dict.fromkeys(model.layers), key=lambda name: model.types[name].experts is UNSET)
        for layers in of_type[kinds[0]]:
            if any(replace(layers, type=name) not in of_type[name] for name in kinds[1:]):
                continue
            fields = {name: getattr(layers, name) for name in Strategy.__struct_fields__}
            both = [own for own in of_type[EMBEDDING] if own in of_type[HEAD]]
            ends = {
                Outer.FREE: [None],
                Outer.ALIKE: both,
                Outer.AS_LAYERS: [e for e in both if e == Strategy(**fields)],
            }
            yield from ((whole, (layers, own)) for own in ends[outer])


def _only(instance, whole, problem, layers, outer):
    """The problem with the options alone that are shared."""
    choice, types = instance.choices.choice(whole), instance.prices.types
    shardings, (width,) = instance.choices.layers.shardings(choice), choice.widths

    def of_group(group: DeviceGroup) -> DeviceGroup:
        options = list(group.options)
        for number, name in enumerate(types):
            own = shardings.of_type(name, width)
            wanted = outer if name in (EMBEDDING, HEAD) else replace(layers, type=name)
            if wanted is not None:
                options[number] = options[number].take(np.array([own.index(wanted)]))
        return replace(group, options=tuple(options))

    if isinstance(problem, InterleavedProblem):
        return replace(problem, group=of_group(problem.group))
    return replace(problem, device_groups=tuple(map(of_group, problem.device_groups)))


def _best(problem: Problem | InterleavedProblem) -> float:
    """The least T of all plans that fit, or infinity."""
    if isinstance(problem, Problem):
        able = (plans for plans in every_plan(problem) if problem.can_cut(plans.ends[:-1]))
        return min((float(plans.times[fitting(problem, plans)].min(initial=np.inf)) for plans in able), default=np.inf)
    within = (own for own in every_interleaved(problem) if own.memory_bytes <= problem.group.budget_bytes)
    return min((own.time_ps for own in within), default=np.inf)


def _num_plans(problem: Problem | InterleavedProblem) -> float:
    """About as many as there are, those of several chunks ten times: it takes as long to list them."""
    if isinstance(problem, InterleavedProblem):
        return _PER_CASE + 10 * prod(
            len(problem.group.options[kind].time_ps) for kind in (problem.embedding, problem.head)
        )
    options, cuts = problem.device_groups[0].options, comb(len(problem.layers) - 1, problem.pp_size - 1)
    return _PER_CASE + cuts * prod(
        len(options[kind].time_ps) for kind in (problem.layers[0], problem.layers[-1])
    ) * len(problem.device_groups)


def _needs(problem: Problem | InterleavedProblem) -> list[float]:
    """What some of its plans need."""
    if isinstance(problem, InterleavedProblem):
        return [float(own.memory_bytes) for own in every_interleaved(problem)][:_MAX_NEEDS]
    return [float(need) for plans in every_plan(problem) for need in plans.memory.max(0)][:_MAX_NEEDS]
