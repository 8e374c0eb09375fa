"""The checker of a certificate: whether its bands and dual values confirm a bound.

A plan takes T = f sum A' + s z + o u + tie, with z the slowest stage's A', u the largest U, and f, s and o the
coefficients of the closed form. For any weights mu, nu >= 0 of the stages
T >= sum of ((f + mu) A' + nu U) + (s - sum mu) z + (o - sum nu) u + tie, with z in a band; `bounds` bounds the sum.
If that is below the bound to confirm, the ways to choose a stage's options whose priced cost leaves room below it are
listed with their exact memory. The path is then taken over these ways, in ranges of z and u that are halved: a U below
its range counts as the least of the range, and a way above either range does not count at all.

Nothing is rounded in favour of a claim: costs of layers are rounded down in `bounds`, all other numbers are fractions.
"""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from shardwright.types import Band, ConfigurationProof, MemoryPrice
from shardwright_search.certificate import bounds
from shardwright_search.certificate.bounds import Array, Chain, Duals, Problem, Run, StageOnGroup

MAX_WAYS = 30_000
"""Most ways to choose the options of layers that are listed for one stage and band."""
MAX_HALVINGS = 10
"""Most halvings of the ranges of the slowest stage's time and of the largest U, in a band whose ways are listed."""
_WEIGHT_SHARE = 1 - 2.0**-40
"""Weights count a little less, so that weights that add up to a coefficient except for rounding do not exceed it."""
_BY_STAGE = ("slowest_weights", "exposed_weights", "prices")


class Way(NamedTuple):
    """A way to prove a bound of a configuration: that no plan of a problem takes less than some time."""

    name: str
    problem: Problem
    below_ps: Fraction


Ways = Callable[[Fraction], Iterable[Way]]
"""The ways to prove a bound, any of which is enough."""


class Treatments(NamedTuple):
    """Ways to choose the options of a run of layers in a stage on a device group, one row each."""

    entered: Array
    layout: Array
    cost: Array
    """[ways, 2]: A and U."""
    memory: Array
    """[ways, phases, 2]: resident at the end, and the peak so far."""
    host: Array
    """Bytes of host memory."""
    priced: Array
    """[ways, rows]: cost and memory by rows of duals."""

    def take(self, rows: Array) -> "Treatments":
        """Return the ways in these rows."""
        return Treatments._make(column[rows] for column in self)


def _listed(chain: Chain, stage_on_group: StageOnGroup, caps: Sequence[tuple[Duals, Array]]) -> Array | None:
    """Return ways that stay below every cap [ways; run, layout in, layout out, A, U]; None: too many."""
    known = [(duals, duals.rows_of(stage_on_group), _by_run(chain, cap)) for duals, cap in caps]
    slack = np.concatenate([_slack(cap, duals.whole[:, rows]) for duals, rows, cap in known], 1)
    prefixes = np.concatenate([duals.prefixes[:, rows] for duals, rows, _ in known], 1)
    priced = [(duals.weights[row], duals.rows[row][1]) for duals, rows, _ in known for row in rows]
    units = [duals.unit_ps for duals, rows, _ in known for _ in rows]
    found_ways, listed, weighed = [np.empty((0, 5))], 0, _objectives(chain)
    alive = [run for run, number in chain.runs.items() if (slack[number].max(1) > -np.inf).all()]
    waiting: list[tuple[Run, Treatments]]
    waiting = [
        ((before,), _entered(chain, stage_on_group, before, len(priced))) for before in {run[0] for run in alive}
    ]
    while waiting:
        shorter, ways = waiting.pop()
        following = [run for run in alive if run[: len(shorter)] == shorter and len(run) > len(shorter)]
        for here in {run[: len(shorter) + 1] for run in following}:
            longer, number = _longer(chain, stage_on_group, ways, here, priced, units), chain.runs[here]
            if here in following:
                complete = longer.take(_ends(chain, stage_on_group, longer, here[-1]))
                for duals, (row, *_), cap in known:
                    cost = bounds.rounded_down(complete.cost @ duals.weights[row], duals.unit_ps)
                    complete = complete.take(cost < cap[number, complete.entered, complete.layout])
                numbers = np.full(len(complete.cost), number)
                found_ways.append(np.column_stack([numbers, complete.entered, complete.layout, complete.cost]))
            if beyond := [chain.runs[run] for run in following if run[: len(here)] == here and run != here]:
                above = longer.priced - prefixes[number][:, longer.entered, longer.layout].T
                longer = longer.take((above < slack[beyond][:, :, longer.entered].transpose(0, 2, 1)).all(2).any(0))
                longer = longer.take(_undominated(longer, weighed))
                listed += len(longer.cost)
                if listed > MAX_WAYS:
                    return None
                waiting.append((here, longer))
    return np.concatenate(found_ways)


def _objectives(chain: Chain) -> Array:
    """Return weights of A and U; a way that is no worse in all of these sums dominates another."""
    form, alone = chain.problem.closed_form, chain.problem.pp_size == 1
    weights = np.array([[form.fill + form.steady, form.once]])  # With one stage these make T.
    return weights if alone and weights.sum() * chain.longest_ps < bounds.EXACT else np.eye(2)


def _by_run(chain: Chain, caps: Array) -> Array:
    by_run = np.full((len(chain.runs) + 1, *caps.shape[2:]), -np.inf)
    np.maximum.at(by_run, chain.number, caps)
    return by_run


def _slack(caps: Array, whole: Array) -> Array:
    """Return by how much runs may exceed their bounds [runs, rows, layouts in]."""
    none = np.isinf(whole) | (caps == -np.inf)[:, None]
    return np.asarray(np.where(none, -np.inf, caps[:, None] - np.where(none, 0, whole)).max(-1))


def _entered(chain: Chain, stage_on_group: StageOnGroup, before: int, rows: int) -> Treatments:
    """Return the ways to begin a run, without any layer yet: one for every layout that can be received."""
    count, phases = chain.size if before < 0 else chain.problem.num_layouts, bounds.phases_of(chain, stage_on_group[0])
    held = np.zeros(count) if before < 0 else chain.problem.boundary_bytes[before]
    memory = np.array([[(in_flight + 2) * held] * 2 for in_flight, *_ in phases]).transpose(2, 0, 1)
    none = np.zeros(count)
    return Treatments(np.arange(count), np.arange(count), np.zeros((count, 2)), memory, none, np.zeros((count, rows)))


def _longer(
    chain: Chain,
    stage_on_group: StageOnGroup,
    ways: Treatments,
    run: Run,
    priced: Sequence[tuple[Array, MemoryPrice]],
    units: Sequence[float],
) -> Treatments:
    """Return the ways extended by the run's last layer, with each of its options that fits."""
    group, phases, (*_, before, kind) = (
        chain.problem.device_groups[stage_on_group[1]],
        bounds.phases_of(chain, stage_on_group[0]),
        run,
    )
    in_flight = max(count for count, *_ in phases)
    o, first = group.options[kind].hosted(in_flight), len(run) == 2
    moves = np.where(np.eye(chain.size, dtype=bool), 0, np.inf) if before < 0 else group.redistribution_ps[before]
    taken = moves[ways.layout[:, None], o.input_layout]
    parent, option = np.nonzero(np.isfinite(taken))
    cost, o = np.stack([o.time_ps[option] + taken[parent, option], o.exposed_ps[option]], 1), o.take(option)
    memory = []
    for phase, (resident, peak) in zip(phases, ways.memory[parent].transpose(1, 2, 0), strict=True):
        inner, at = bounds.moments(1.0, o, *phase)[1:3]
        after = bounds.moments(0.0, o, *phase)[1]
        memory.append((resident + inner, np.maximum(peak + after, resident + at)))
    counted = [bounds.moments(price.last_layer, o, *phases[price.phase])[0 if first else 1] for _, price in priced]
    added = [
        bounds.rounded_down(cost @ weight + price.ps_per_byte * used, unit_ps)
        for (weight, price), used, unit_ps in zip(priced, counted, units, strict=True)
    ]
    held, cost, host = np.array(memory).transpose(2, 0, 1), ways.cost[parent] + cost, ways.host[parent] + o.host_bytes
    longer = Treatments(
        ways.entered[parent], o.output_layout, cost, held, host, ways.priced[parent] + np.array(added).T
    )
    return longer.take((longer.memory[:, :, 1] <= group.budget_bytes).all(1) & (host <= group.host_budget_bytes))


def _ends(chain: Chain, stage_on_group: StageOnGroup, ways: Treatments, last: int) -> Array:
    """Return whether ways fit in memory together with the output of one micro-batch."""
    given = 0 if last == chain.problem.layers[-1] else chain.problem.boundary_bytes[last][ways.layout][:, None]
    return np.asarray(
        (ways.memory[:, :, 1] + given <= chain.problem.device_groups[stage_on_group[1]].budget_bytes).all(1)
    )


def _undominated(ways: Treatments, weights: Array) -> Array:
    """Return the ways that no other with the same layouts dominates in memory and in cost by all weights."""
    key, cost = ways.entered * (int(ways.layout.max(initial=0)) + 1) + ways.layout, ways.cost @ weights.T
    columns = np.hstack([np.stack([key, -key, ways.host], 1), cost, ways.memory[:, :, 0], ways.memory[:, :, 1]])
    left, kept = np.lexsort((*ways.memory[:, :, 1].T, cost[:, 0])), []
    while len(left):
        kept.append(left[0])
        left = left[1:][(columns[left[1:]] < columns[left[0]]).any(1)]
    return np.array(kept, int)


def band_holds(
    chain: Chain, band: Band, from_ps: float, times: Duals | None, below_ps: Fraction | float, lists: bool
) -> bool:
    """Return whether it is confirmed that no plan of a band from `from_ps` on takes less than `below_ps`.

    Without `lists` no ways are listed.
    """
    form, to_ps = chain.problem.closed_form, band.slowest_below_ps
    weights = np.column_stack([form.fill + np.array(band.slowest_weights) * _WEIGHT_SHARE, band.exposed_weights])
    weights[:, 1] *= _WEIGHT_SHARE
    added = [sum(map(Fraction, column), Fraction(0)) for column in weights.T.tolist()]
    left = form.steady + form.fill * len(weights) - added[0], form.once - added[1]
    ranges = np.array([(from_ps, to_ps or np.inf), (0.0, np.inf)])
    unbounded = any(share < 0 and to == np.inf for share, (_, to) in zip(left, ranges, strict=True))
    if unbounded or chain.longest_ps >= bounds.EXACT:
        return False
    costs = bounds.duals_of(chain, band.prices, weights)
    tables, within = dict[StageOnGroup, Array](), dict[StageOnGroup, Array]()
    for stage_on_group, sent in chain.sent.items():
        tables[stage_on_group] = bounds.bounds_of(chain, costs, stage_on_group)
        if times is not None and to_ps is not None:
            within[stage_on_group] = bounds.rounded_up(to_ps, times.unit_ps) - bounds.rounded_down(sent, times.unit_ps)
            tables[stage_on_group] = np.where(
                bounds.bounds_of(chain, times, stage_on_group) < within[stage_on_group], tables[stage_on_group], np.inf
            )
    least, others = bounds.paths(chain, tables, weights, costs.unit_ps)
    room = below_ps - _constant(left, ranges)
    if least >= room or not lists:
        return least >= room
    listed, most = dict[StageOnGroup, Array](), bounds.rounded_up(room, costs.unit_ps)
    for stage_on_group, table in tables.items():
        caps = [(costs, np.where(table < np.inf, most - others[stage_on_group], -np.inf))]
        if times is not None and stage_on_group in within:
            caps.append((times, np.where(table < np.inf, within[stage_on_group], -np.inf)))
        if (ways := _listed(chain, stage_on_group, caps)) is None:
            return False
        listed[stage_on_group] = ways
    ranges[1, 1] = np.nextafter(max(ways[:, 4].max(initial=0.0) for ways in listed.values()), np.inf)
    waiting = [(ranges, 0)]
    while waiting:
        ranges, halvings = waiting.pop()
        tables = {
            stage_on_group: _within(chain, ways, weights[stage_on_group[0]], ranges, costs.unit_ps)
            for stage_on_group, ways in listed.items()
        }
        least, _ = bounds.paths(chain, tables, weights, costs.unit_ps)
        if least >= below_ps - _constant(left, ranges):
            continue
        if halvings == MAX_HALVINGS:
            return False
        number = int(ranges[0, 1] == np.inf or float(left[0]) * np.ptp(ranges[0]) <= np.ptp(ranges[1]))
        for end in range(2):
            waiting.append((ranges.copy(), halvings + 1))
            waiting[-1][0][number, end] = ranges[number].mean()
    return True


def _within(chain: Chain, ways: Array, weights: Array, ranges: Array, unit_ps: float) -> Array:
    """Return the least cost of listed ways in ranges [2, 2] of A' and U, as in `paths`.

    A U below its range counts as the least of the range.
    """
    cost = np.column_stack([ways[:, 3], np.maximum(ways[:, 4], ranges[1, 0])]) @ weights
    least, on = np.full((len(chain.runs) + 1, chain.size, chain.size), np.inf), (ways[:, 3:] < ranges[:, 1]).all(1)
    np.minimum.at(least, tuple(ways[on, :3].astype(int).T), cost[on])
    return bounds.rounded_down(least, unit_ps)[chain.number]


def _constant(left: tuple[Fraction, Fraction], ranges: Array) -> Fraction:
    """Return the least contribution of the slowest A' and the largest U with their remaining weights."""
    ends = (low if share >= 0 else high for share, (low, high) in zip(left, ranges.tolist(), strict=True))
    return sum((share * Fraction(end) for share, end in zip(left, ends, strict=True)), Fraction(0))


def confirms(problem: Problem, proof: ConfigurationProof, below_ps: Fraction | float) -> bool:
    """Return whether a proof shows that no plan of a configuration takes less than `below_ps`."""
    stages, ends = problem.pp_size, [band.slowest_below_ps or np.inf for band in proof.bands]
    bands = [replace(band, **{key: _by_stage(getattr(band, key), stages) for key in _BY_STAGE}) for band in proof.bands]
    prices = [_by_stage(proof.time_prices, stages), *(band.prices for band in bands)]
    sized = all(len(getattr(band, name)) == stages for band in bands for name in _BY_STAGE) and len(prices[0]) == stages
    if not sized or ends[-1] < np.inf or ends.count(np.inf) > 1 or sorted(ends) != ends:
        return False
    chain = bounds.chain_of(problem, proof.layouts)
    phases = [len(bounds.phases_of(chain, stage)) for stage in range(stages)]
    pairs = [pair for stage_prices in prices for pair in zip(stage_prices, phases, strict=True)]
    if any(max((price.phase for price in known), default=count) >= count for known, count in pairs):
        return False
    times = bounds.duals_of(chain, prices[0], np.array([(1.0, 0.0)] * stages)) if len(ends) > 1 else None
    starts = zip((0.0, *ends), bands, strict=False)
    return all(band_holds(chain, band, start, times, below_ps, True) for start, band in starts)


def _by_stage(values: tuple[Any, ...], stages: int) -> tuple[Any, ...]:
    return values * stages if len(values) == 1 else values
