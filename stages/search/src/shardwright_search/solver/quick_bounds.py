"""Quick lower bounds on the step time for a whole configuration, before its stages are examined.

The first bound is relaxed: all layers are spread over all ranks. The second counts how many pipeline stages are on each
node type, wherever they are in the pipeline.

In the second, Z is a stage's A times the coefficient of the slowest stage, plus its U. The largest Z of a plan limits
how many blocks a stage on each type holds. Within these limits the sum of A is the least if the types with the least
time per block hold as many as they can. Unlike bounds that divide layers, this one knows that stages hold whole layers.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from shardwright.plan.schedules.schedule import ClosedForm
from shardwright_search.solver.configuration_bounds import CostsOf
from shardwright_search.solver.problem import DeviceGroup, Options, Problem
from shardwright_search.solver.stage_options import Dual, Weights, largest_weights, rounded_down, runs_of, weightings
from shardwright_search.step.cached_method import cached_method
from shardwright_search.step.memory import Phase
from shardwright_search.step.pareto import Ints, Numbers, non_dominated

_MAX_RECENT = 64


class Stages(NamedTuple):
    """The part of a configuration that the relaxed bound reads."""

    layers: tuple[int, ...]
    """Type numbers."""
    groups: tuple[DeviceGroup, ...]
    """Groups that stages may be on."""
    widths: tuple[float, ...]
    """Ranks of a stage over the mean of all stages, by device group."""
    weights: tuple[Weights, ...]
    """The third of `weightings`, for A and U, by device group."""
    in_flight: int
    """Microbatches in flight in the stage with the fewest."""
    budget_bytes: float
    """The sum over all stages of a rank's budget times the stage's relative width."""


class Relaxed:
    """The relaxed bounds, with caches for configurations that have costs in common."""

    def __init__(self) -> None:
        self._dual = lru_cache(_MAX_RECENT)(_dual)

    def bound_ps(self, problem: Problem) -> float:
        """Return a lower bound on the step time T, including the least time of sends and tied parameters."""
        p, groups = problem.pp_size, problem.device_groups
        weights = tuple(weightings(problem, group)[2] for group in range(len(groups)))
        budgets = [group.budget_bytes * width for group, width in zip(groups, problem.relative_widths, strict=True)]
        most = p * max(group.budget_bytes for group in groups)
        budget = min(most, sum(max(budgets[group] for group in on) for on in map(problem.groups_of, range(p))))
        fewest = min(problem.in_flight)
        least = self.min_ps(Stages(problem.layers, groups, problem.relative_widths, weights, fewest, budget))
        sends = 2 * sum(min(cuts.values()) for cuts in problem.min_sends_ps)
        return least + min(weights)[0] * sends + float(problem.tied_ps.min())

    def min_ps(self, stages: Stages) -> float:
        """Return a lower bound on T: the sum of (1 + (m - 1) w) A + w U over all layers, with all memory pooled.

        m: the number of microbatches; w: a stage's share of the ranks, by their weights. Every layer counts the
        activations of as many microbatches as the stage with the fewest has in flight.
        """
        dual = self._dual(*stages[1:5])
        counts = np.bincount(stages.layers, minlength=len(stages.groups[0].options)).astype(float)
        return float(dual.runs(counts[None, :], np.array([float(stages.budget_bytes)]))[0])


def lean(options: Options) -> Options:
    """Return the options that no other dominates in the relaxed bound, for any weights and microbatches in flight."""
    columns = options.time_ps, options.exposed_ps, options.state_bytes, options.activation_bytes
    return options.take(np.sort(non_dominated(np.stack(columns, 1), np.zeros(len(options.time_ps), np.int64))))


def _dual(
    groups: tuple[DeviceGroup, ...], widths: tuple[float, ...], weights: tuple[Weights, ...], in_flight: int
) -> Dual:
    """Return the bound if every layer may be on any group, with its group's weights and `in_flight` microbatches.

    Memory counts as a rank's memory times the relative width of its stage.
    """
    costs, memory = [], []
    for kind in range(len(groups[0].options)):
        options = [group.options[kind] for group in groups]
        costs.append(np.concatenate([o.cost(w) for o, w in zip(options, weights, strict=True)]))
        held = (o.state_bytes + in_flight * o.activation_bytes for o in options)
        memory.append(np.concatenate([resident * width for resident, width in zip(held, widths, strict=True)]))
    return Dual(costs, memory)


class OnType(NamedTuple):
    """The pipeline stages on one node type."""

    stages: int
    groups: tuple[DeviceGroup, ...]
    """Groups that each may be on."""
    send_ps: float
    """The least time of a send at either end of such a stage."""


def sends_ps(on_types: Sequence[OnType]) -> float:
    """Return the least that all sends add to the sum of A: two for each stage, only one for the first and the last."""
    return 2 * (sum(on.stages * on.send_ps for on in on_types) - max(on.send_ps for on in on_types))


class _NodeTypeBounds(NamedTuple):
    """Lower bounds on the times of a stage on a node type."""

    a_block: Numbers
    """[blocks + 1]: the least A per block of a stage with at most this number of blocks."""
    largest: Numbers
    """[blocks]: Z of a stage with at least this number of blocks, from one on; ascending; infinity: there is none."""
    largest_with_head: Numbers
    """[blocks + 1]: Z of a stage that ends with the head, from zero blocks on."""
    embedding: float
    """A of the embedding by itself."""
    head: float
    """A of the head by itself."""

    def most(self, bands: Numbers, sends_ps: float) -> Ints:
        """Return the number of blocks that a stage can hold if its Z, with sends, stays within a limit [bands]."""
        return np.searchsorted(self.largest + sends_ps, bands, side="right")

    def max_with_head(self, bands: Numbers, sends_ps: float) -> Ints:
        """Return the number of blocks that a stage ending with the head can hold [bands].

        -1: it cannot hold the head.
        """
        return np.searchsorted(self.largest_with_head + sends_ps, bands, side="right") - 1


class Counted:
    """The bounds of chains of layers over two stages or more, with their caches."""

    def __init__(self, costs_of: CostsOf) -> None:
        self._costs_of = costs_of

    def min_ps(
        self, layers: tuple[int, ...], on_types: Sequence[OnType], parts: tuple[Phase, ...], form: ClosedForm
    ) -> float:
        """Return a lower bound on sum of A + max Z, without tied parameters.

        `parts`: phases whose memory every stage reaches or exceeds.
        """
        each = [self._least(layers, on.groups, parts, form) for on in on_types]
        sends = [on.send_ps * form.steady for on in on_types]
        bands = _bands(each, sends)
        # The first and the last stage send at one end.
        outer = np.array([bound.most(bands, send) for bound, send in zip(each, sends, strict=True)])
        inner = np.array([bound.most(bands, 2 * send) for bound, send in zip(each, sends, strict=True)])
        with_head = np.array([bound.max_with_head(bands, send) for bound, send in zip(each, sends, strict=True)])
        a_block = np.array([bound.a_block[blocks] for bound, blocks in zip(each, outer, strict=True)])
        stages = np.array([[on.stages] for on in on_types])
        # The first stage may hold only the embedding, and the last one only the head.
        lower = np.maximum(stages - 2, 0)
        besides, least = form.fill * (min(bound.embedding for bound in each) + sends_ps(on_types)), np.inf
        for last, bound in enumerate(each):
            others = stages - (np.arange(len(each)) == last)[:, None]
            upper = inner * np.maximum(others - 1, 0) + outer * (others > 0)
            upper[last] += with_head[last]
            can = (with_head[last] >= 0) & (upper >= lower).all(0) & (upper.sum(0) >= len(layers) - 2)
            if can.any():
                blocks = form.fill * _cheapest(a_block[:, can], lower, upper[:, can], len(layers) - 2)
                least = min(least, float((blocks + bands[can]).min()) + form.fill * bound.head + besides)
        return float(rounded_down(np.array(least)))

    @cached_method
    def _least(
        self, layers: tuple[int, ...], groups: tuple[DeviceGroup, ...], parts: tuple[Phase, ...], form: ClosedForm
    ) -> _NodeTypeBounds:
        runs, blocks = runs_of(layers).runs, len(layers) - 2
        time, largest, with_head = (np.full(blocks + 1, np.inf) for _ in range(3))
        for group in groups:
            costs = self._costs_of(group, parts)
            a, z = (costs.least(layers, weights) for weights in ((1.0, 0.0), largest_weights(form)))
            for number, run in enumerate(runs):
                ends = run.layers[-1] == layers[-1]
                count = len(run.layers) - ends - (run.before < 0)
                if ends:
                    with_head[count] = min(with_head[count], z[number])
                elif run.before >= 0:
                    time[count], largest[count] = min(time[count], a[number]), min(largest[count], z[number])
        options = [group.options for group in groups]
        return _NodeTypeBounds(
            np.r_[0.0, np.minimum.accumulate(time[1:] / np.arange(1, blocks + 1))],
            np.minimum.accumulate(largest[:0:-1])[::-1],
            np.minimum.accumulate(with_head[::-1])[::-1],
            min(float(of_group[layers[0]].time_ps.min()) for of_group in options),
            min(float(of_group[layers[-1]].time_ps.min()) for of_group in options),
        )


def _bands(each: Sequence[_NodeTypeBounds], sends_ps: Sequence[float]) -> Numbers:
    """Return all values of the largest Z at which the number of blocks that a stage can hold changes, ascending."""
    columns = [
        column + send
        for least, send_ps in zip(each, sends_ps, strict=True)
        for column, send in product((least.largest, least.largest_with_head), (send_ps, 2 * send_ps))
    ]
    edges = np.unique(np.concatenate(columns))
    return np.asarray(edges[np.isfinite(edges)])


def _cheapest(a_block: Numbers, lower: Numbers, upper: Numbers, blocks: int) -> Numbers:
    """Return the least sum of A [bands] of a number of blocks, given each type's capacity [types, bands]."""
    order = np.argsort(a_block, axis=0)
    least = np.broadcast_to(lower, a_block.shape)
    a, least, room = (np.take_along_axis(column, order, 0) for column in (a_block, least, upper - lower))
    before = np.cumsum(room, 0) - room
    return np.asarray((a * (least + np.clip(blocks - lower.sum() - before, 0, room))).sum(0))
