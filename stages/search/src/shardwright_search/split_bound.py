"""How much faster a plan with split backward passes may be than a known plan, by simulation: proven by bounds.

No such plan is below the optimum of `split_problem`. Configurations whose optimum is no less than the known plan's time
are excluded. Of the others all plans below it are listed where these are few, so that the best of them is proven.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from math import inf
from typing import NamedTuple

import numpy as np

from shardwright.types import Schedule
from shardwright_search.solver.configuration_bounds import ConfigurationBounds
from shardwright_search.solver.problem import Cut, Problem, Solution, Start
from shardwright_search.solver.quick_bounds import Relaxed
from shardwright_search.solver.stage_options import GroupCosts
from shardwright_search.solver.stopping import ended
from shardwright_search.solver.targets import Target
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.search_space import SearchSpace
from shardwright_search.space.split_problem import SplitConfiguration, split_targets
from shardwright_search.step.memory import StageMemory, no_layers

_MAX_PREFIXES = 4_000
"""The most beginnings of plans that are listed."""


class SplitBound(NamedTuple):
    """A score that no plan with split backward passes is below, at most the limit, and the configurations below it."""

    score: float
    below: tuple[Target[Configuration], ...] = ()
    """By ascending bound."""


def split_bound(space: SearchSpace, schedule: Schedule, limit: float, deadline: float) -> SplitBound:
    """Return what is proven of plans with split backward passes below a score; score 0: nothing."""
    if schedule.interleaves or (targets := split_targets(space, schedule)) is None:
        return SplitBound(0.0)
    bounds = [0.0] * len(targets)

    def bound_all() -> None:
        bounder = _Bounder(space.instance)
        for raised in bounder.quick, bounder.weighted, bounder.largest:
            for number, target in enumerate(targets):
                if bounds[number] < limit:
                    bounds[number] = max(bounds[number], target.score(raised(target, limit)))

    ended(bound_all, deadline)
    below = sorted((bound, number) for number, bound in enumerate(bounds) if bound < limit)
    return SplitBound(min(limit, *(bound for bound, _ in below[:1]), inf), tuple(targets[n] for _, n in below))


class _Bounder:
    """The bounds of configurations, with caches."""

    def __init__(self, instance: Instance) -> None:
        self._instance, self._costs_of, self._relaxed = instance, cache(GroupCosts), Relaxed()

    def quick(self, target: Target[Configuration], limit: float) -> float:
        """Return a bound over all layers together."""
        return self._relaxed.bound_ps(self.largest_problem(target, limit))

    def weighted(self, target: Target[Configuration], limit: float) -> float:
        """Return a bound with the time in which a pipeline fills."""
        split = SplitConfiguration(self._instance, target.configuration)
        weights, alone = split.weights, split.most_alone(target.time_ps(limit))
        bounds = ConfigurationBounds(split.weighted_problem(weights), self._costs_of)
        return bounds.lower_ps - alone * split.too_much_ps(weights)

    def largest(self, target: Target[Configuration], limit: float) -> float:
        """Return a bound of the slowest stage."""
        return ConfigurationBounds(self.largest_problem(target, limit), self._costs_of).lower_ps

    def largest_problem(self, target: Target[Configuration], limit: float) -> Problem:
        """Return the problem of the slowest stage for plans below a score."""
        split = SplitConfiguration(self._instance, target.configuration)
        return split.largest_problem(split.most_alone(target.time_ps(limit)) == 0)


def listed_below(
    space: SearchSpace, targets: Sequence[Target[Configuration]], score: float
) -> list[tuple[Configuration, Solution]] | None:
    """Return all plans of configurations that their bounds leave below a score; None: they are too many to list."""
    plans, left = list[tuple[Configuration, Solution]](), _MAX_PREFIXES
    for target in targets:
        problem = _Bounder(space.instance).largest_problem(target, score)
        listing = _Listing(problem, target.time_ps(score), left)
        count = len(problem.device_groups) // problem.pp_size
        for ends, options, groups in listing.solutions():
            plans.append((target.configuration, Solution(ends, options, tuple(group % count for group in groups))))
        if (left := listing.left) < 0:
            return None
    return plans


class _Stage(NamedTuple):
    """A stage that is being filled, after the plan's beginning."""

    ends: tuple[int, ...]
    options: tuple[int, ...]
    groups: tuple[int, ...]
    position: tuple[int, ...]
    """After this stage."""
    time_ps: float
    held: StageMemory
    layout: int


class _Listing:
    """All plans of a problem with T = max A below a time; `left` prefixes may be made."""

    def __init__(self, problem: Problem, below_ps: float, left: int) -> None:
        self.problem, self.left = problem, left
        self._below_ps = below_ps - float(problem.tied_ps.min())
        self._rest = self._least_rest()

    def solutions(self) -> Iterator[Solution]:
        """Yield the plans that fit; fewer where they are too many, and then `left` is negative."""
        problem = self.problem
        waiting = list(self._begun((), (), (), problem.start_position, -1, 0))
        while waiting and self.left >= 0:
            here = waiting.pop()
            stage, number = len(here.groups) - 1, len(here.options)
            start = here.ends[-1] if here.ends else 0
            if number in problem.ends(stage, start) and self._rest[stage + 1][number] < self._below_ps:
                if stage + 1 == problem.pp_size:
                    yield Solution((*here.ends, number), here.options, here.groups)
                    continue
                waiting += self._begun(
                    (*here.ends, number), here.options, here.groups, here.position, here.groups[-1], here.layout
                )
            if number < problem.ends(stage, start).stop - 1:
                waiting += self._extended(here, number)

    def _begun(
        self,
        ends: tuple[int, ...],
        options: tuple[int, ...],
        groups: tuple[int, ...],
        position: tuple[int, ...],
        before: int,
        layout: int,
    ) -> Iterator[_Stage]:
        """Yield the next stage with its first layer, on each device group that it can be on."""
        problem, stage = self.problem, len(groups)
        for group, after in problem.placements[stage].get(position, ()):
            layouts = [layout]
            if before >= 0:
                sent = problem.sends_ps[Cut(position, before, group)][problem.layers[ends[-1] - 1], layout]
                layouts = np.flatnonzero(np.isfinite(sent)).tolist()
            for received in layouts:
                in_place = problem.start(before, group) is Start.IN_PLACE
                begun = _Stage(
                    ends, options, (*groups, group), after, 0.0, no_layers(problem.phases(stage), 0.0), received
                )
                for first in self._extended(begun, len(options)):
                    taken = problem.device_groups[group].options[problem.layers[len(options)]].input_layout
                    if not in_place or taken[first.options[-1]] == received:
                        yield first

    def _extended(self, here: _Stage, number: int) -> Iterator[_Stage]:
        """Yield the stage with one more layer, in every way that fits and stays below the time."""
        problem, stage = self.problem, len(here.groups) - 1
        group, kind = problem.device_groups[here.groups[-1]], problem.layers[number]
        o, time_ps = group.options[kind], np.array(here.time_ps + group.options[kind].time_ps)
        if number:
            time_ps += group.redistribution_ps[problem.layers[number - 1], here.layout, o.input_layout]
        memory = o.memory(problem.phases(stage))
        held = [here.held.then(memory.take(row)) for row in range(len(time_ps))]
        for row in np.flatnonzero(time_ps < self._below_ps).tolist():
            if held[row].peak.max() <= group.budget_bytes:
                self.left -= 1
                yield here._replace(
                    options=(*here.options, row),
                    time_ps=float(time_ps[row]),
                    held=held[row],
                    layout=int(o.output_layout[row]),
                )

    def _least_rest(self) -> list[list[float]]:
        """Return the least largest A [stages before, layers before] of the rest of a plan, by each layer's least."""
        problem, total = self.problem, len(self.problem.layers)
        fastest = [
            min(float(group.options[kind].time_ps.min()) for group in problem.device_groups) for kind in problem.layers
        ]
        before = np.cumsum([0.0, *fastest])
        rest = [[inf] * total + [0.0]]
        for stage in reversed(range(problem.pp_size)):
            rest.insert(
                0,
                [
                    min(
                        (max(float(before[end] - before[start]), rest[0][end]) for end in problem.ends(stage, start)),
                        default=inf,
                    )
                    for start in range(total + 1)
                ],
            )
        return rest
