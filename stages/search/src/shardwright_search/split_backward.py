"""Schedules with split backward passes: after the search of other schedules, plans near the best are simulated so.

No closed form of split passes is exact enough to search by. So plans whose own closed form is near the optimum are
tried with split passes; `split_bound` then proves how much faster any other plan may be, and plans that may be faster
are listed if they are few.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from math import inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from shardwright.plan.chunks import placed
from shardwright.types import LayerStrategy, Plan, Schedule
from shardwright_search.candidates import MAX_NEAR, Candidate
from shardwright_search.cost_model.layer import CostModel
from shardwright_search.cost_model.plan import evaluate, simulated_step_ps
from shardwright_search.cost_model.stage_costs import range_costs
from shardwright_search.simulation.simulator import has_timeline
from shardwright_search.solver.branch_and_bound import plans_below
from shardwright_search.solver.configuration_bounds import ConfigurationBounds
from shardwright_search.solver.problem import Cut, Problem, Solution, Start
from shardwright_search.solver.quick_bounds import Relaxed
from shardwright_search.solver.stage_options import GroupCosts
from shardwright_search.solver.stopping import ended
from shardwright_search.solver.targets import Best, Optimum, Target
from shardwright_search.space.budget import over_bytes
from shardwright_search.space.configurations import Configuration, is_solved
from shardwright_search.space.instance import Instance
from shardwright_search.space.search_space import SearchSpace
from shardwright_search.space.split_problem import SplitConfiguration, split_targets
from shardwright_search.step.memory import StageMemory, no_layers

NEAR_SPLIT = 0.1
"""Plans whose closed form is within this share of the optimum are tried: pipelines that fill and drain gain most."""
_MAX_LABELS = 10_000
"""The most work on plans near the optimum."""
_CHUNKS = 2
"""Layer ranges of a stage under schedules with several."""
_ENDS = 2
"""Ranges that have the embedding or the head."""
_MAX_ACTIONS = 200_000
"""The most passes of listed plans that are simulated."""


class Split(NamedTuple):
    """The plan of the least simulated time among those with split backward passes that fit, and how many were tried."""

    best: Candidate | None
    tried: int
    over_bytes: int = 0
    """Bytes by which the leanest exceeds its budget, if none fits."""
    bound: float = 0.0
    """A score by simulation that no plan with split backward passes is below; 0: nothing is proven."""


def asks_for_split(schedules: Iterable[Schedule]) -> bool:
    """Return whether a request names a schedule that splits backward passes, which is tried after the others."""
    return not all(map(is_solved, schedules))


def best_split(
    space: SearchSpace,
    optimum: Optimum[Configuration],
    compared: Sequence[Best[Configuration]],
    budgets: Mapping[str, int],
    joint: Candidate | None,
    deadline: float,
) -> Split:
    """Return the quickest plan with split backward passes by simulation, and what is proven of all others.

    `compared`: further plans to try; `joint`: the best plan of the other schedules, if it fits.
    """
    instance = space.instance
    wanted = [each for each in instance.request.schedules if not is_solved(each)]
    known = dict.fromkeys(
        (best.target.configuration, best.priced.solution)
        for best in (*_near(space, optimum), *compared)
        if _is_pipeline(best.target.configuration)
    )
    near = [instance.plan(*each) for each in known]
    split = _quickest(space, [plan for each in wanted for plan in _under(each, near, instance.costs)], budgets)
    times = [_score(space, each.plan) for each in (joint, split.best) if each is not None]
    if optimum.stopped or not times:
        return split
    limit = min(times)
    bounds = [split_bound(space, each, limit, deadline) for each in wanted]
    below = [target for each in bounds for target in each.below]
    further = listed_below(space, below, limit) if all(each.score for each in bounds) else None
    if further is None or sum(_actions(configuration) for configuration, _ in further) > _MAX_ACTIONS:
        return split._replace(bound=min(each.score for each in bounds))
    others = _quickest(space, [instance.plan(*each) for each in further], budgets)
    scores = [(_score(space, each.best.plan), each) for each in (split, others) if each.best is not None]
    bound, best = min(((score, each.best) for score, each in scores), default=(limit, None), key=itemgetter(0))
    return split._replace(best=best, tried=split.tried + others.tried, bound=min(bound, limit))


def _actions(configuration: Configuration) -> int:
    return 3 * configuration.pp_size * configuration.num_microbatches


def _quickest(space: SearchSpace, plans: Sequence[Plan], budgets: Mapping[str, int]) -> Split:
    """Return the plan that is the quickest by simulation of those that fit; if none fits, by how much they exceed."""
    lacking = list[int]()
    for plan in sorted(plans, key=partial(_score, space)):
        candidate = _candidate(space, plan)
        lacking.append(max(over_bytes(plan, candidate.evaluation.estimate, budgets)))
        if lacking[-1] <= 0:
            return Split(candidate, len(plans))
    return Split(None, len(plans), min(lacking, default=0))


def _near(space: SearchSpace, optimum: Optimum[Configuration]) -> Iterator[Best[Configuration]]:
    """Yield plans of pipelines whose closed form is near the optimum; after a stopped search, only the known ones."""
    yield from optimum.near
    if optimum.stopped or optimum.best is None:
        return
    limit = optimum.best.score * (1 + NEAR_SPLIT)
    targets = [t for bound, t in optimum.bounds if bound < limit and _is_pipeline(t.configuration)]
    yield from plans_below(targets, space.solvable, limit, MAX_NEAR, _MAX_LABELS)


def _is_pipeline(configuration: Configuration) -> bool:
    return configuration.pp_size > 1 and configuration.num_chunks == 1


def _under(schedule: Schedule, near: Sequence[Plan], costs: CostModel) -> Iterator[Plan]:
    """Yield plans under a schedule that splits backward passes: near ones as they are, or cut anew into chunks."""
    if not schedule.interleaves:
        yield from (replace(plan, schedule=schedule) for plan in near)
        return
    tried = list[tuple[object, ...]]()
    for plan in near:
        for layers in _layers(plan):
            changed = in_two_chunks(replace(plan, layers=layers), schedule, costs)
            if changed is None:
                continue
            choice = changed.num_microbatches, changed.stages, changed.embedding, changed.head, changed.layers
            if choice not in tried:
                tried.append(choice)
                yield changed


def _layers(plan: Plan) -> Iterator[tuple[LayerStrategy, ...]]:
    """Yield the strategies of a plan's layers, and each strategy for all layers of its type, as chunks move layers."""
    yield plan.layers
    for one in dict.fromkeys(plan.layers):
        yield tuple(one if layer.type == one.type else layer for layer in plan.layers)


def in_two_chunks(plan: Plan, schedule: Schedule, costs: CostModel) -> Plan | None:
    """Return a plan of one chunk per stage as a plan of two chunks, whose ranges take times as equal as possible.

    None if stages differ in width, or there are too few layers for all.
    """
    pp_size = len(plan.stages)
    if len({len(stage.ranks) for stage in plan.stages}) > 1 or len(plan.layers) < _CHUNKS * pp_size - _ENDS:
        return None
    times = [layer.microbatch_ps for each in range_costs(plan, costs) for layer in each.layers]
    held = placed(even_ranges(times, _CHUNKS * pp_size), schedule, pp_size)
    stages = (replace(stage, layers=layers) for stage, layers in zip(plan.stages, held, strict=True))
    return replace(plan, schedule=schedule, stages=tuple(stages))


def even_ranges(times: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return ranges of layers with the least sum of squared times; only the first and the last may have no layers.

    `times`: of the embedding, the layers and the head.
    """
    layers, until = len(times) - _ENDS, np.cumsum(times, dtype=float)
    least, cut_at = (until - 0.0)[:-1] ** 2, list[NDArray[np.intp]]()  # of the first range, by its end
    for _ in range(count - 2):
        added = np.subtract.outer(until[:-1], until[:-1])
        totals = np.where(np.tri(layers + 1, k=-1, dtype=bool), least + added**2, np.inf)
        cut_at.append(totals.argmin(axis=1))
        least = totals.min(axis=1)
    ends = [layers, int((least + (until[-1] - until[:-1]) ** 2).argmin())]
    for before in reversed(cut_at):
        ends.append(int(before[ends[-1]]))
    return list(pairwise((0, *reversed(ends))))


def _score(space: SearchSpace, plan: Plan) -> float:
    """Return the simulated time as the search's score."""
    instance = space.instance
    return simulated_step_ps(plan, instance.costs) * instance.score_scale(plan.global_batch_size)


def _candidate(space: SearchSpace, plan: Plan) -> Candidate:
    costs, stages = space.instance.costs, len(plan.stages)
    short = has_timeline(len(plan.way), stages, plan.num_microbatches)
    return Candidate(plan, evaluate(plan, costs.profiles, costs, timeline=short))


# How much faster a plan with split backward passes may be than a known plan, by simulation: proven by bounds.
#
# No such plan is below the optimum of `split_problem`. Configurations whose optimum is no less than the known plan's
# time are excluded. For the others all plans below that time are listed if they are few: the best of them is proven.


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
        """Return a bound from all layers together, without cuts into stages."""
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
    """A stage that is being filled, with the beginning of the plan before it."""

    ends: tuple[int, ...]
    options: tuple[int, ...]
    groups: tuple[int, ...]
    position: tuple[int, ...]
    """The position after this stage."""
    time_ps: float
    held: StageMemory
    layout: int


class _Listing:
    """All plans of a problem with T = max A below a time; `left`: how many more beginnings of plans may be made."""

    def __init__(self, problem: Problem, below_ps: float, left: int) -> None:
        self.problem, self.left = problem, left
        self._below_ps = below_ps - float(problem.tied_ps.min())
        self._rest = self._least_rest()

    def solutions(self) -> Iterator[Solution]:
        """Yield the plans that fit; if they are too many, only some of them, and then `left` is negative."""
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
        """Return a lower bound of the remaining stages' largest A [stages before, layers before].

        Each layer takes its least time.
        """
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
