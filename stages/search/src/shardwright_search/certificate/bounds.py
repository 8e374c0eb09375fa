"""Lower bounds from dual values on the plans of a configuration, for the checker of certificates.

A configuration is described by the arrays of `solver.problem.Problem`; no code is shared with the solver. At any price
of a byte a run of layers costs no less than its least priced sum less the price of the budget. A shortest path over
stages, layers and layouts then bounds the whole plan.

Every bound is exact, whatever the dual values: times and bytes are whole, and each priced cost is rounded down to a
multiple of a power of two, so large that float64 holds all sums of these multiples without rounding.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from math import ceil, frexp
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from shardwright.types import MemoryPrice, Prices

_LEAST_SHARE = 1 - 2.0**-50
"""A computed cost of a layer times this is no more than the exact cost: it has at most seven roundings to float64."""
EXACT = 2.0**53
"""Sums of whole numbers below this are exact in float64."""
_BITS = 50
"""Bounds are below two to this power times their unit: three of them are added without rounding."""
Array = NDArray[Any]
Arrays = Any
"""The solver's named arrays, whose types are not imported."""
Problem = Arrays
Step = tuple[Any, int, int, Any]
"""Position and group before a stage (-1: none), the stage's own group, and the position after it."""
StageOnGroup = tuple[int, int]
"""A pipeline stage and the device group that it is on."""
Run = tuple[int, ...]
"""Types of the layer before (-1: none) and of a stage's layers."""


class Chain(NamedTuple):
    """A configuration as a chain of layers; the index of a layout may also stand for a class of tied parameters."""

    problem: Problem
    size: int
    """Number of layouts and classes."""
    longest_ps: float
    """A time that no stage's A or U exceeds; infinity if some time is not a whole number."""
    keeps_sums: bool
    """True if some option keeps gradients of earlier microbatches in addition to the last one's."""
    runs: dict[Run, int]
    number: Array
    """[first layer, end]: which run; -1: none."""
    steps: tuple[tuple[Step, ...], ...]
    """Steps by stage."""
    sends: dict[tuple[Any, int, int], Array]
    """Send times [end, layouts given, layouts received], by position, group before and group after."""
    sent: dict[StageOnGroup, Array]
    """[first layer, end, layouts in, layouts out]: the least time of a stage's sends at both ends."""


def chain_of(problem: Problem, layouts: bool = True) -> Chain:
    """Return the chain of a problem.

    Without `layouts` all layouts count as one: redistribution takes no time, and sends take their least time.
    """
    problem = problem if layouts else _without_layouts(problem)
    kinds, total = problem.layers, len(problem.layers)
    size = max(problem.boundary_bytes.shape[1], *problem.tied_ps.shape)
    number, runs = np.full((total + 1, total + 1), -1), dict[Run, int]()
    for start, end in sorted(combinations(range(total + 1), 2), key=lambda ends: ends[1] - ends[0]):
        run = kinds[start - 1] if start else -1, *kinds[start:end]
        number[start, end] = runs.setdefault(run, len(runs))
    steps, at = [], dict.fromkeys((position, -1) for position in problem.placements[0])
    for moves in problem.placements:
        steps.append(tuple((*before, *move) for before in at for move in moves.get(before[0], ())))
        at = dict.fromkeys((after, group) for *_, group, after in steps[-1])
    sends = {step[:3]: np.full((total + 1, size, size), np.inf) for stage_steps in steps[1:] for step in stage_steps}
    for cut, times in sends.items():
        times[1:, : problem.num_layouts, : problem.num_layouts] = problem.sends_ps[cut][list(kinds)]
    sent = {}
    for stage, group in {(stage, step[2]): None for stage, stage_steps in enumerate(steps) for step in stage_steps}:
        into = [sends[step[:3]].min(1) for step in steps[stage] if stage and step[2] == group]
        following = steps[stage + 1] if stage + 1 < len(steps) else ()
        out = [sends[step[:3]].min(2) for step in following if step[1] == group]
        least = (np.min(times, 0) if times else np.zeros((total + 1, size)) for times in (into, out))
        sent[stage, group] = np.add.outer(*least).transpose(0, 2, 1, 3)
    sums = any(o.sum_bytes.any() for group in problem.device_groups for o in group.options)
    return Chain(problem, size, _longest_ps(problem), bool(sums), runs, number, tuple(steps), sends, sent)


def _without_layouts(problem: Problem) -> Problem:
    def merged(group: Arrays) -> Arrays:
        none = [np.zeros(len(o.time_ps), int) for o in group.options]
        options = tuple(o._replace(input_layout=n, output_layout=n) for o, n in zip(group.options, none, strict=True))
        return replace(group, options=options, redistribution_ps=np.zeros((len(options), 1, 1)))

    sends = {cut: times.min((1, 2), keepdims=True) for cut, times in problem.sends_ps.items()}
    held, tied_ps = problem.boundary_bytes.min(1, keepdims=True), problem.tied_ps.min(keepdims=True)
    groups = tuple(map(merged, problem.device_groups))
    return replace(problem, device_groups=groups, sends_ps=sends, boundary_bytes=held, tied_ps=tied_ps)


def _longest_ps(problem: Problem) -> float:
    """Return a time that no stage's A or U exceeds; infinity if some time is not a whole number."""
    longest = np.zeros(len(problem.boundary_bytes))
    for kind, times in ((kind, o[:2]) for group in problem.device_groups for kind, o in enumerate(group.options)):
        if (np.rint(times) != times).any():
            return np.inf
        longest[kind] = max(longest[kind], np.max(times))
    moves = max(_largest(group.redistribution_ps) for group in problem.device_groups)
    sends = max(map(_largest, problem.sends_ps.values()), default=0.0)
    return float(sum(longest[kind] + moves for kind in problem.layers) + 2 * sends)


def phases_of(chain: Chain, stage: int) -> list[tuple[int, bool, bool]]:
    """Return the phases in which a stage's memory may be at its peak.

    Each: microbatches in flight, whether the pass makes gradients layer by layer, whether sums of earlier ones exist.
    """
    count, m = chain.problem.in_flight[stage], chain.problem.num_microbatches
    if count == m:
        return [(count, True, False), (count - 1, chain.keeps_sums, True)][: max(1, min(2, count))]
    one_more = chain.keeps_sums and count == m - 1
    return [(count, False, False), (count, True, True)] if one_more else [(count, False, True)]


class Duals(NamedTuple):
    """Lower bounds on a weighted cost of runs of some stages on device groups, each by a price."""

    rows: tuple[tuple[StageOnGroup, MemoryPrice], ...]
    weights: Array
    """[rows, 2]: of A and of U."""
    unit_ps: float
    """A power of two, of which all bounds are multiples."""
    prefixes: Array
    """[runs, rows, layouts in, layouts out]: bounds of beginnings of longer runs, before the budget is subtracted."""
    whole: Array
    """Bounds of whole stages, with the priced budget subtracted; infinity in one more row after the last run."""

    def rows_of(self, stage_on_group: StageOnGroup) -> list[int]:
        """Return the rows of a stage on a device group."""
        return [row for row, (row_stage_on_group, _) in enumerate(self.rows) if row_stage_on_group == stage_on_group]


def duals_of(chain: Chain, prices: Prices, weights: Array) -> Duals:
    """Return bounds on the cost with weights [stages, 2] of A and U."""
    problem, kinds, layouts = chain.problem, range(len(chain.problem.boundary_bytes)), chain.problem.num_layouts
    rows = tuple((stage_on_group, price) for stage_on_group in chain.sent for price in prices[stage_on_group[0]])
    weighted = np.array([weights[stage] for (stage, _), _ in rows])
    tables = np.full((4, len(kinds), len(rows), chain.size, chain.size), np.inf)
    moves = np.full((len(kinds), len(rows), chain.size, chain.size), np.inf)
    for row, ((stage, group), price) in enumerate(rows):
        device_group, phase = problem.device_groups[group], phases_of(chain, stage)[price.phase]
        moves[:, row, :layouts, :layouts] = weighted[row, 0] * device_group.redistribution_ps
        for kind, o in enumerate(device_group.options):
            used = moments(price.last_layer, o, *phase)
            cost = weighted[row] @ (o.time_ps, o.exposed_ps) + price.ps_per_byte * used
            cost[used * _LEAST_SHARE > device_group.budget_bytes] = np.inf
            for role in range(4):
                np.minimum.at(tables[role, kind, row], (o.input_layout, o.output_layout), cost[role])
    unit_ps = _unit_ps(chain, tables, moves, rows, weights)
    tables, moves = rounded_down(tables, unit_ps), rounded_down(moves, unit_ps)
    first, inner, last, alone = tables
    then = {(a, b): (_join(moves[a], inner[b]), _join(moves[a], last[b])) for a, b in set(pairwise(problem.layers))}
    left = {
        (before, last): np.array([_most_left(chain, *row, before, last, unit_ps) for row in rows])
        for before, last in {(run[0], run[-1]) for run in chain.runs}
    }
    prefixes, whole = np.full((2, len(chain.runs) + 1, len(rows), chain.size, chain.size), np.inf)
    for (before, *layers), run in chain.runs.items():
        if len(layers) > 1:
            costs = [_join(prefixes[chain.runs[before, *layers[:-1]]], step) for step in then[layers[-2], layers[-1]]]
        else:
            costs = [first[layers[0]], alone[layers[0]]]
            costs = costs if before < 0 else [_join(moves[before], table) for table in costs]
        prefixes[run] = costs[0]
        whole[run] = costs[1] - left[before, layers[-1]]
    return Duals(rows, weighted, unit_ps, prefixes, whole)


def _unit_ps(
    chain: Chain, tables: Array, moves: Array, rows: Sequence[tuple[StageOnGroup, MemoryPrice]], weights: Array
) -> float:
    """Return a power of two so large that all sums of a path's costs are below 2^`_BITS` times it."""
    problem, stages = chain.problem, chain.problem.pp_size
    layers = sum(_largest(tables[:, kind]) + _largest(moves[kind]) for kind in problem.layers)
    budgets = max(price.ps_per_byte * problem.device_groups[group].budget_bytes for (_, group), price in rows)
    sends = 2 * weights[:, 0].max() * max(map(_largest, chain.sends.values()), default=0.0)
    exposed = weights[:, 1].max() * chain.longest_ps
    return 2.0 ** (frexp(layers + stages * (budgets + sends + exposed) + _largest(problem.tied_ps) + 1)[1] - _BITS)


def _largest(values: Array) -> float:
    """Return the largest number that is not infinite, or 0."""
    return float(np.max(values, initial=0.0, where=np.isfinite(values)))


def rounded_down(values: Array, unit_ps: float) -> Array:
    """Return multiples of a power of two that are not above the exact values; values must not be negative."""
    return np.asarray(np.floor(values * (_LEAST_SHARE / unit_ps)) * unit_ps)


def rounded_up(value: Fraction | float, unit_ps: float) -> float:
    """Return the least multiple of a power of two that is no less, or one that is above all bounds."""
    return min(ceil(Fraction(value) / Fraction(unit_ps)), 4 << _BITS) * unit_ps


def moments(last_layer: float, o: Arrays, count: int, comes: bool, summed: bool) -> Array:
    """Return the bytes that options count for as a stage's [first, inner, last, only] layer.

    `last_layer`: the share of the moment when the last layer works; the rest is of the moment when the first one does.
    """
    late = comes * ((o.sum_bytes > 0) | (not summed)) * o.late_bytes
    static = o.state_bytes + (count - 1) * o.activation_bytes + summed * o.sum_bytes + o.late_bytes - late
    before, after = static + o.activation_bytes, static + late
    at = after + o.activation_bytes + o.workspace_bytes
    ways = (before, at), (before, after), (at, after), (at, at)
    return np.array([last_layer * last + (1 - last_layer) * first for last, first in ways])


def _most_left(
    chain: Chain, stage_on_group: StageOnGroup, price: MemoryPrice, before: int, last: int, unit_ps: float
) -> Array:
    """Return an upper bound of the priced budget [layouts in, layouts out] after the input and the output.

    Minus infinity if input and output by themselves exceed the budget: there is no such plan.
    """
    problem, layouts = chain.problem, chain.problem.num_layouts
    left = np.full((chain.size, chain.size), float(problem.device_groups[stage_on_group[1]].budget_bytes))
    if before >= 0:
        in_flight, *_ = phases_of(chain, stage_on_group[0])[price.phase]
        left[:layouts] -= (in_flight + 2) * problem.boundary_bytes[before][:, None]
    if last != problem.layers[-1]:
        left[:, :layouts] -= problem.boundary_bytes[last]
    most = np.ceil(price.ps_per_byte * left / (_LEAST_SHARE * unit_ps)) * unit_ps
    return np.where(left < 0, -np.inf, most)


def _join(one: Array, other: Array) -> Array:
    """Return the minimum over `between` of [.., in, between] plus [.., between, out]."""
    return np.asarray((one[..., :, :, None] + other[..., None, :, :]).min(-2))


def bounds_of(chain: Chain, duals: Duals, stage_on_group: StageOnGroup) -> Array:
    """Return the largest bounds [first layer, end, layouts in, layouts out] of a stage; infinity: no such run."""
    return np.asarray(duals.whole[:, duals.rows_of(stage_on_group)].max(1)[chain.number])


def paths(
    chain: Chain, tables: Mapping[StageOnGroup, Array], weights: Array, unit_ps: float
) -> tuple[float, dict[StageOnGroup, Array]]:
    """Return the least weighted sum over all stages, and for each stage on a group the least over all other stages.

    The latter are indexed as `tables`. All are multiples of the unit.
    """
    tied_ps, end = rounded_down(chain.problem.tied_ps, unit_ps), len(chain.problem.layers)
    sends = [
        [_weighted_sends(chain, stage, step, weights, unit_ps) for step in stage_steps]
        for stage, stage_steps in enumerate(chain.steps)
    ]
    begin, ended = np.full((2, len(tied_ps), end + 1, chain.size), np.inf)
    begin[range(len(tied_ps)), 0, range(len(tied_ps))] = 0.0
    ended[:, end, : tied_ps.shape[1]] = tied_ps
    here = {step[:2]: begin for step in chain.steps[0]}
    entered: list[list[Array]] = []
    for stage, stage_steps in enumerate(chain.steps):
        behind: dict[Any, Array] = {}
        entered.append([_over(here[step[:2]], sent) for step, sent in zip(stage_steps, sends[stage], strict=True)])
        for (*_, group, after), value in zip(stage_steps, entered[-1], strict=True):
            taken = _through(value, tables[stage, group])
            behind[after, group] = np.minimum(behind.get((after, group), np.inf), taken)
        here = behind
    least = min(float((value + ended).min()) for value in here.values())
    rest = dict.fromkeys(here, ended)
    others = {stage_on_group: np.full_like(table, np.inf) for stage_on_group, table in tables.items()}
    for stage in reversed(range(len(entered))):
        ahead: dict[Any, Array] = {}
        for step, value, sent in zip(chain.steps[stage], entered[stage], sends[stage], strict=True):
            *before, group, after = step
            for one, other in zip(value, rest[after, group], strict=True):
                through = one[:, None, :, None] + other[None, :, None, :]
                np.minimum(others[stage, group], through, out=others[stage, group])
            taken = _through(rest[after, group], tables[stage, group].transpose(1, 0, 3, 2))
            taken = _over(taken, sent.transpose(0, 2, 1))
            ahead[tuple(before)] = np.minimum(ahead.get(tuple(before), np.inf), taken)
        rest = ahead
    return least, others


def _through(value: Array, table: Array) -> Array:
    """Return values [classes, layer, layout] through one more stage."""
    return np.array([(class_value[:, None, :, None] + table).min((0, 2)) for class_value in value])


def _over(value: Array, sends: Array) -> Array:
    """Return values [classes, layer, layout] moved across a cut, from the layouts before it to those after it."""
    return np.asarray((value[..., None] + sends).min(2))


def _weighted_sends(chain: Chain, stage: int, step: Step, weights: Array, unit_ps: float) -> Array:
    """Return the cost of passing tensors to a stage [layers, layouts before, layouts after]; 0 for the first stage."""
    if stage == 0:
        return np.where(np.eye(chain.size, dtype=bool), 0, np.inf)[None]
    sends, weight = chain.sends[step[:3]], weights[stage - 1, 0] + weights[stage, 0]
    possible = np.isfinite(sends)  # a weight of 0 does not make an impossible send possible
    return np.where(possible, rounded_down(np.where(possible, sends, 0) * weight, unit_ps), np.inf)
