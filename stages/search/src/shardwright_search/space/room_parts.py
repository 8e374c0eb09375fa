"""The parts of a configuration whose best plan does not fit with the communicators that it makes.

A plan of the configuration has all groups of that plan in the stage that lacks the most, which then counts them, or is
without one of them. So the parts have all plans between them, and the plan itself fits in none.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np

from shardwright.plan.axes import layout_of
from shardwright_search.solver.problem import Solution, price
from shardwright_search.solver.targets import Best
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.rank_groups import (
    TIED,
    RankGroup,
    RankGroups,
    StageLimit,
    change_groups,
    strategy_groups,
    tied_types,
)
from shardwright_search.space.room import is_divisible


def parts_of(instance: Instance, best: Best[Configuration]) -> tuple[Configuration, ...] | None:
    """Return the parts of the configuration of its best plan; None: that fits, or the configuration has no parts."""
    configuration, solution = best.target.configuration, best.priced.solution
    if not (instance.counts_communicators and is_divisible(configuration)):
        return None
    groups = stage_groups(instance, configuration, solution)
    lacking = _lacking_bytes(instance, configuration, solution, groups)
    stage = int(np.argmax(lacking))
    if lacking[stage] <= 0:
        return None
    new = sorted(groups[stage] - instance.rooms(configuration)[stage].required, key=_order)
    without = [StageLimit(stage, frozenset(new[:count]), frozenset({group})) for count, group in enumerate(new)]
    limits = [*without, StageLimit(stage, frozenset(new))]
    return tuple(configuration._replace(limits=(*configuration.limits, limit)) for limit in limits)


def part_with_room(instance: Instance, best: Best[Configuration]) -> Configuration | None:
    """Return the part in which each stage that lacks memory counts all groups that it has in a plan; None: none does.

    None is returned of a configuration that has no parts, too.
    """
    configuration, solution = best.target.configuration, best.priced.solution
    if not (instance.counts_communicators and is_divisible(configuration)):
        return None
    groups = stage_groups(instance, configuration, solution)
    lacking = _lacking_bytes(instance, configuration, solution, groups)
    limits = tuple(StageLimit(stage, groups[stage]) for stage, size in enumerate(lacking) if size > 0)
    return configuration._replace(limits=(*configuration.limits, *limits)) if limits else None


def alike_parts(instance: Instance, configuration: Configuration) -> Iterator[Configuration]:
    """Yield the parts of a configuration in which all layers have the same groups: these count all communicators."""
    if not instance.counts_communicators:
        yield configuration
    if not (instance.counts_communicators and is_divisible(configuration)):
        return
    choice, samples = instance.choices.choice(configuration), configuration.microbatch_samples
    shardings, (width,) = instance.choices.layers.shardings(choice), choice.widths
    kinds = {strategy_groups(each) for name in instance.names for each in shardings.of_type(name, width)}
    lengths = {instance.prices.lengths(name) for name in instance.names}
    pairs = product(shardings.layouts, shardings.layouts, lengths)
    changes = frozenset().union(*(change_groups(a, b, samples, each) for a, b, each in pairs))
    for kind in sorted(kinds, key=lambda kind: (len(kind), sorted(map(_order, kind)))):
        others = changes.union(*kinds) - kind
        limits = (StageLimit(stage, excluded=others) for stage in range(configuration.pp_size))
        yield configuration._replace(limits=(*configuration.limits, *limits))


def stage_groups(instance: Instance, configuration: Configuration, solution: Solution) -> tuple[RankGroups, ...]:
    """Return the groups of a rank of each pipeline stage, for stages that are equally wide."""
    choice, names = instance.choices.choice(configuration), instance.names
    strategies, (width,) = instance.choices.layers.shardings(choice), choice.widths
    chosen = [strategies.of_type(name, width)[option] for name, option in zip(names, solution.options, strict=True)]
    tied = tied_types(instance.costs.model)
    groups: list[set[RankGroup]] = [set() for _ in solution.ends]
    for number, (name, strategy) in enumerate(zip(names, chosen, strict=True)):
        groups[bisect_right(solution.ends, number)] |= strategy_groups(strategy)
        if name in tied:
            groups[bisect_right(solution.ends, number)].add(TIED)
    for number, (before, behind) in enumerate(pairwise(map(layout_of, chosen))):
        lengths = instance.prices.lengths(names[number])
        changed = change_groups(before, behind, configuration.microbatch_samples, lengths)
        groups[bisect_right(solution.ends, number + 1)] |= changed
    return tuple(map(frozenset, groups))


def _lacking_bytes(
    instance: Instance, configuration: Configuration, solution: Solution, groups: tuple[RankGroups, ...]
) -> list[int]:
    """Return the bytes that each stage lacks where all its groups are counted; 0 or fewer where it fits."""
    limits = (StageLimit(stage, each) for stage, each in enumerate(groups))
    counted = configuration._replace(limits=(*configuration.limits, *limits))
    problem, renumbered = instance.problem(counted), instance.renumbered(counted, solution)
    budgets = (problem.device_groups[group].budget_bytes for group in renumbered.device_groups)
    used = price(problem, renumbered).memory_bytes
    return [size - budget for size, budget in zip(used, budgets, strict=True)]


def _order(group: RankGroup) -> tuple[str, int, int]:
    return str(group.purpose), len(group.ranks), group.ranks[-1] if group.ranks else 0
