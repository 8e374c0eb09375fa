"""The simplest plan within a tolerance of the bound: few strategies, with equal ones next to one another.

The bound of the search is the proof: a plan with one or two strategies of blocks whose closed form is within the
tolerance of the bound is within the tolerance of every plan. Each configuration whose bound allows it is solved with
its options limited to one strategy, or to a pair of the strategies that take the least time for the memory they hold.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from itertools import combinations
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from shardwright.types import LayerStrategy, Plan
from shardwright_search.candidates import Candidate
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.search import SearchAnswer
from shardwright_search.simulation.simulator import has_timeline
from shardwright_search.solver.interleaved import Interleaved
from shardwright_search.solver.interleaved_problem import InterleavedProblem
from shardwright_search.solver.partition import Pipeline
from shardwright_search.solver.problem import DeviceGroup, Options, Problem, Solution
from shardwright_search.solver.quick_bounds import Relaxed
from shardwright_search.solver.stage_options import GroupCosts
from shardwright_search.solver.stopping import CpuSeconds, latest, until
from shardwright_search.solver.targets import Solvable, Target
from shardwright_search.space.budget import Infeasible, budgets_of, over_bytes
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import SearchRequest, StageWidths
from shardwright_search.space.uniform_bounds import UniformBounds
from shardwright_search.step.cached_method import cached_method
from shardwright_search.step.pareto import Ints, Numbers

_MAX_CONFIGURATIONS = 12
"""Configurations that are tried, by ascending bound: a simple plan far from the bound is not within a tolerance."""
_MAX_STRATEGIES = 10
"""The most strategies of which pairs are tried."""
_AT_ONCE = 4
"""The most plans of a pair of strategies that are checked to fit with all their communicators."""
FEW = 2
"""The most strategies of blocks that a simple plan has."""
_LIMIT_S = 4.0
"""CPU seconds of the search for each number of strategies."""
_SAME = 1e-4
"""The share by which a plan may take longer if its layers of one strategy are next to each other."""


class Simple(NamedTuple):
    """The simplest plan within a tolerance, with the fastest plan and the best plan of one strategy."""

    plan: Candidate
    fastest: Candidate
    uniform: Candidate | None
    """The best plan with one strategy of all blocks that was found in time."""
    tolerance: float

    @property
    def gain(self) -> float:
        """Return the share of time that the fastest plan saves."""
        return 1 - self.fastest.sample_s / self.plan.sample_s


def num_strategies(plan: Plan) -> int:
    """Return the number of strategies of blocks; fields that some layer types ignore do not count."""
    by_type: dict[str, set[LayerStrategy]] = {}
    for layer in plan.layers:
        by_type.setdefault(layer.type, set()).add(layer)
    return max(len(set(map(_untyped, plan.layers))), *map(len, by_type.values()))


def _untyped(layer: LayerStrategy) -> LayerStrategy:
    return replace(layer, type="", experts=UNSET)


def simplified(answer: SearchAnswer | Infeasible, request: SearchRequest, file: Path) -> SearchAnswer | Infeasible:
    """Return an answer with the simplest plan within the requested tolerance; unchanged without a tolerance."""
    if isinstance(answer, Infeasible) or not request.tolerance:
        return answer
    budgets = budgets_of(request, answer.instance.costs.cluster, file)
    return replace(answer, chosen=simplest(answer, budgets, request.tolerance).plan, tolerance=request.tolerance)


def simplest(answer: SearchAnswer, budgets: Mapping[str, int], tolerance: float) -> Simple:
    """Return the simplest plan that is within the tolerance of the bound and of the chosen one, else the chosen one.

    The bound is on the closed form, and the chosen plan is the fastest by simulation. Layers with the same strategy are
    placed next to one another in each stage, if this fits and takes no longer. Each of the two searches, for one
    strategy and for two, has `_LIMIT_S` CPU seconds.
    """
    fits = _Fits(answer.instance, budgets)
    chosen, uniform = fits.together(answer.chosen), None
    if num_strategies(chosen.plan) == 1:
        uniform = _Found(answer.best.score, chosen)
    elif answer.bound_s:
        uniform, _ = latest(_Trials(answer, fits).best(1, inf), until(CpuSeconds(_LIMIT_S)))
    beside, plan = None if uniform is None else uniform.candidate, chosen
    if answer.bound_s:
        limit = answer.best.score * (answer.bound_s / answer.optimum_s) * (1 + tolerance)
        longest_s = chosen.sample_s * (1 + tolerance)
        if uniform is not None and uniform.score <= limit and uniform.candidate.sample_s <= longest_s:
            plan = uniform.candidate
        elif num_strategies(chosen.plan) > FEW:
            pair, _ = latest(_Trials(answer, fits).best(FEW, limit), until(CpuSeconds(_LIMIT_S)))
            if pair is not None and pair.candidate.sample_s <= longest_s:
                plan = fits.together(pair.candidate)
    # A search that was stopped may have found less than this one.
    fastest = plan if plan.sample_s < answer.chosen.sample_s else answer.chosen
    return Simple(fits.timed(plan), fastest, beside, tolerance)


class _Found(NamedTuple):
    """A plan that fits, and its score."""

    score: float
    candidate: Candidate


class _Fits(NamedTuple):
    """Checks whether plans fit, with the full price of the plan."""

    instance: Instance
    budgets: Mapping[str, int]

    def candidate(self, plan: Plan) -> Candidate | None:
        """Return a plan with its price; None if it does not fit."""
        priced = Candidate(plan, evaluate(plan, self.instance.costs.profiles, self.instance.costs, timeline=False))
        return priced if max(over_bytes(plan, priced.evaluation.estimate, self.budgets)) <= 0 else None

    def timed(self, candidate: Candidate) -> Candidate:
        """Return a plan with the events of its step, if they are few enough for a timeline."""
        plan, ranges = candidate.plan, sum(len(stage.layers) for stage in candidate.plan.stages)
        if not has_timeline(ranges, len(plan.stages), plan.num_microbatches):
            return candidate
        return Candidate(plan, evaluate(plan, self.instance.costs.profiles, self.instance.costs))

    def together(self, candidate: Candidate) -> Candidate:
        """Return the plan with layers of one strategy next to one another in each stage, unless that costs time."""
        first = list(dict.fromkeys(map(_untyped, candidate.plan.layers)))
        for order in (first, first[::-1]):
            plan = _in_order(candidate.plan, order)
            if plan == candidate.plan:
                return candidate
            priced = self.candidate(plan)
            if priced is not None and priced.sample_s <= candidate.sample_s * (1 + _SAME):
                return priced
        return candidate


def _in_order(plan: Plan, order: Sequence[LayerStrategy]) -> Plan:
    """Return the plan with the strategies of each layer range in an order, each still on layers of its type."""
    layers = list(plan.layers)

    def place_of(layer: LayerStrategy) -> int:
        return order.index(_untyped(layer))

    for low, high in (each for stage in plan.stages for each in stage.layers):
        for kind in dict.fromkeys(plan.model.layers[low:high]):
            places = [place for place in range(low, high) if plan.model.layers[place] == kind]
            for place, layer in zip(places, sorted((layers[i] for i in places), key=place_of), strict=True):
                layers[place] = layer
    return replace(plan, layers=tuple(layers))


class _Trials:
    """The configurations that may have a plan of few strategies near the bound, each with its options limited."""

    def __init__(self, answer: SearchAnswer, fits: _Fits) -> None:
        self._instance, self._fits = answer.instance, fits
        self._bounds = answer.bounds[:_MAX_CONFIGURATIONS]
        self._known = tuple(dict.fromkeys(answer.chosen.plan.layers))
        self._uniform = UniformBounds(answer.instance)

    def best(self, count: int, limit: float) -> Iterator[_Found]:
        """Yield ever better plans with this number of strategies of blocks and a score up to a limit."""
        known, number = float(np.nextafter(limit, np.inf)), len(self._bounds)
        tried: list[tuple[float, int, Target[Configuration], _Limited | None]]
        tried = [(bound, n, target, None) for n, (bound, target) in enumerate(self._bounds)]
        heapify(tried)
        while tried and tried[0][0] < known:
            bound, _, target, limited = heappop(tried)
            if limited is None:
                for least_ps, each in self._limited(target.configuration, count):
                    heappush(tried, (max(bound, target.score(least_ps)), number, target, each))
                    number += 1
                continue
            for priced in limited.solvable.solve_below(target.time_ps(known), _AT_ONCE, lambda _: None):
                plan = self._instance.plan(target.configuration, limited.whole(priced.solution))
                if (candidate := self._fits.candidate(plan)) is not None:
                    known = target.score(priced.objective_ps)
                    yield _Found(known, candidate)
                    break

    def _limited(self, configuration: Configuration, count: int) -> Iterator[tuple[float, "_Limited"]]:
        """Yield a bound and the configuration limited to each promising choice of strategies that all its types have.

        Plans of one strategy on stages of one width are bounded all at once.
        """
        whole = _Whole(self._instance, configuration)
        is_free = configuration == configuration._replace(layers=None, outer=None, buffer_tokens=None)
        if count == 1 and is_free and configuration.widths is StageWidths.EQUAL:
            shared = self._instance.choices.layer_strategies(configuration)
            for strategy, bound_ps in zip(shared, self._uniform.bounds_ps(configuration, None).tolist(), strict=True):
                if bound_ps < inf:
                    yield bound_ps, _Limited(whole, (strategy,))
            return
        for choice in self._promising(whole, count):
            limited = _Limited(whole, choice)
            if limited.is_possible:
                yield limited.solvable.relaxed_bound_ps, limited

    def _promising(self, whole: "_Whole", count: int) -> Iterator[tuple[LayerStrategy, ...]]:
        """Yield each strategy, or pairs (`count` 2) of the strategies that are fast for the memory that they hold."""
        strategies, options = whole.most_choices
        if count == 1:
            yield from ((each,) for each in strategies)
            return
        held = options.state_bytes + options.late_bytes
        held = held + options.activation_bytes * whole.configuration.in_flight(0)
        time_ps = options.time_ps
        if self._instance.request.offloads:
            # Strategies with host memory cost time only once a step; without it they would dominate all others.
            time_ps = time_ps + options.exposed_ps / whole.configuration.num_microbatches
        rows = [row for row, each in enumerate(strategies) if each in self._known]
        rows += [row for row in _front(time_ps, held) if row not in rows]
        yield from combinations([strategies[row] for row in rows[:_MAX_STRATEGIES]], count)


def _front(time_ps: Numbers, held: Numbers) -> list[int]:
    """Return the options that take less time than all that hold no more, by ascending time."""
    rows, least = list[int](), np.inf
    for row in np.lexsort((held, time_ps)).tolist():
        if held[row] < least:
            rows.append(row)
            least = float(held[row])
    return rows


class _Whole:
    """A configuration with all its options, by their strategies."""

    def __init__(self, instance: Instance, configuration: Configuration) -> None:
        self.instance, self.configuration = instance, configuration
        self.problem: Problem | InterleavedProblem
        if configuration.num_chunks > 1:
            self.problem = instance.interleaved_problem(configuration)
        else:
            self.problem = instance.problem(configuration)

    @property
    def groups(self) -> tuple[DeviceGroup, ...]:
        """The device groups that stages may be on."""
        return (self.problem.group,) if isinstance(self.problem, InterleavedProblem) else self.problem.device_groups

    @property
    def most_choices(self) -> tuple[Sequence[LayerStrategy], Options]:
        """The strategies of the layer type that has the most, and their costs on the first device group."""
        group, types = self.groups[0], self.instance.prices.types
        name, numbers = max(self.numbers(group.width).items(), key=lambda each: len(each[1]))
        return tuple(numbers), group.options[types.index(name)]

    @cached_method
    def numbers(self, width: int) -> dict[str, dict[LayerStrategy, int]]:
        """Return the option number of each strategy of a block, by type, on stages of a width."""
        shardings = self.instance.choices.layers.shardings(self.instance.choices.choice(self.configuration))
        names = dict.fromkeys(self.instance.costs.model.layers)
        of_types = ((name, shardings.of_type(name, width)) for name in names)
        return {
            name: {each: number for number, each in enumerate(of_type) if isinstance(each, LayerStrategy)}
            for name, of_type in of_types
        }


class _Limited:
    """A configuration whose blocks have a few strategies to choose from."""

    def __init__(self, whole: _Whole, choice: Sequence[LayerStrategy]) -> None:
        self._whole, self._choice = whole, choice

    @property
    def is_possible(self) -> bool:
        """Return whether each type of block has one of the strategies on stages of each width."""
        return all(len(rows) for group in self._whole.groups for rows in self._rows(group.width).values())

    @cached_property
    def solvable(self) -> Solvable:
        """The configuration with these options only."""
        groups, problem = tuple(map(self._narrowed, self._whole.groups)), self._whole.problem
        if isinstance(problem, InterleavedProblem):
            return Interleaved(replace(problem, group=groups[0]))
        return Pipeline(replace(problem, device_groups=groups), cache(GroupCosts), Relaxed())

    def whole(self, solution: Solution) -> Solution:
        """Return a solution with its option numbers converted to the numbers among all options."""
        layers, options = self._whole.instance.types_of_layers, list(solution.options)
        stage = 0
        for place, kind in enumerate(layers):
            stage += place == solution.ends[stage]
            rows = self._rows(self._whole.groups[solution.device_groups[stage]].width)
            options[place] = int(rows[kind][options[place]]) if kind in rows else options[place]
        return solution._replace(options=tuple(options))

    def _narrowed(self, group: DeviceGroup) -> DeviceGroup:
        rows = self._rows(group.width)
        options = (each.take(rows[kind]) if kind in rows else each for kind, each in enumerate(group.options))
        return replace(group, options=tuple(options))

    @cached_method
    def _rows(self, width: int) -> dict[int, Ints]:
        """Return the options of each type of block that have one of the strategies, on stages of a width."""
        instance, rows = self._whole.instance, dict[int, Ints]()
        for name, numbers in self._whole.numbers(width).items():
            wanted = (numbers.get(instance.choices.layers.as_type(one, name)) for one in self._choice)
            rows[instance.prices.types.index(name)] = np.array(sorted({n for n in wanted if n is not None}), np.int64)
        return rows
