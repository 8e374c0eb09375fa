"""Makes certificates: dual values and bands by which the checker confirms the search's bound, or one near it.

A certificate is valid even if something here is wrong: it claims only what the checker confirms.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from msgspec.structs import replace

from shardwright.types import Band, ConfigurationProof, MemoryPrice, Prices
from shardwright_search.certificate import bounds
from shardwright_search.certificate.bounds import Array, Chain, Duals, Problem, duals_of, paths
from shardwright_search.certificate.check import Way, Ways, band_holds
from shardwright_search.solver.stage_options import hull, slopes_of

GAPS = (1e-9, 1e-4, 3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 0.9)
"""Shares by which the bound that is confirmed may be below the best plan, tried in this order."""
_MAX_HALVINGS = 4
"""How often a band is halved at most, one half within the other."""
_MAX_PRICES = 3
_MAX_SLOPES = 8
_BISECTIONS = 12
_NEAR = 0.03
_FREE = (MemoryPrice(ps_per_byte=0.0),)


def certified(
    configurations: Iterable[tuple[str, Ways]], best_ps: float, report: Callable[[str], None]
) -> tuple[float, tuple[ConfigurationProof, ...]] | None:
    """Return a bound that all configurations are proven to keep, the highest of `GAPS`, and the proofs; None: none is.

    `configurations`: the name of each, and the ways to prove a bound of it. `best_ps`: the time of the best plan.
    """
    proofs, gaps = [], iter(GAPS)
    gap = next(gaps)
    for name, ways in configurations:
        while (proof := _first_proof(ways(Fraction(best_ps * (1 - gap))))) is None:
            if (gap := next(gaps, 1.0)) == 1.0:
                return None
            report(f"certificate: {name}: confirming a bound {gap:.2%} below the best plan")
        proofs.append(proof)
    return best_ps * (1 - gap), tuple(proofs)


def _first_proof(ways: Iterable[Way]) -> ConfigurationProof | None:
    """Return the proof of the first way in which a bound can be proven."""
    return next((proof for way in ways if (proof := proof_of(way.problem, way.name, way.below_ps)) is not None), None)


def proof_of(problem: Problem, name: str, below_ps: Fraction | float) -> ConfigurationProof | None:
    """Return a proof that no plan takes less, trying quick methods first; None if none was found."""
    for layouts, listing, halvings in ((False, False, 0), (False, True, 0), (True, True, _MAX_HALVINGS)):
        maker = _Maker(bounds.chain_of(problem, layouts), below_ps, listing, halvings)
        if (bands := maker.bands()) is not None:
            times, bands_once = _once(maker.time_prices), tuple(map(_shared, bands))
            return ConfigurationProof(configuration=name, layouts=layouts, time_prices=times, bands=bands_once)
    return None


def _shared(band: Band) -> Band:
    """Return a band in which values common to all stages are stored once."""
    names = "slowest_weights", "exposed_weights", "prices"
    return replace(band, **{name: _once(getattr(band, name)) for name in names})


def _once(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return values[:1] if len(set(values)) == 1 else values


class _Maker:
    """The proof of one configuration that no plan takes less than `below_ps`."""

    def __init__(self, chain: Chain, below_ps: Fraction | float, listing: bool, halvings: int) -> None:
        self._chain, self._exactly_below, self._below = chain, below_ps, float(below_ps)
        self._listing, self._halvings = listing, halvings
        self._stages, self._form = chain.problem.pp_size, chain.problem.closed_form
        self.time_prices: Prices = (_FREE,) * self._stages
        self._times: Duals | None = None

    def bands(self) -> tuple[Band, ...] | None:
        """Return bands that cover all plans, each confirmed; None if one was not confirmed."""
        whole = self._band(float(self._form.steady), None, (_FREE,) * self._stages)
        if self._holds(whole, 0.0, False):
            return (whole,)
        if self._stages == 1 or self._form.steady == 0:
            return self._all_confirmed(self._confirmed(0.0, None, 0))
        one = self._weights(1.0, 0.0)
        self.time_prices = self._useful(self._candidates(1.0, 0.0), one, np.inf)
        self._times = duals_of(self._chain, self.time_prices, one)
        first, last = self._range(self._times)
        confirmed = [self._band(0.0, first, (_FREE,) * self._stages)] if first else []
        for low, high in ((first, last), (last, None)) if last > first else ((first, None),):
            if (bands := self._all_confirmed(self._confirmed(low, high, self._halvings))) is None:
                return None
            confirmed += bands
        return tuple(confirmed)

    def _all_confirmed(self, bands: Iterator[Band | None]) -> tuple[Band, ...] | None:
        confirmed = []
        for band in bands:
            if band is None:
                return None
            confirmed.append(band)
        return tuple(confirmed)

    def _confirmed(self, low: float, high: float | None, halvings: int) -> Iterator[Band | None]:
        """Yield confirmed bands, bisecting when needed; yield None if a band cannot be confirmed."""
        sums = dict.fromkeys((0.0, float(self._form.steady)) if high is None else (0.0,))
        for total in reversed(sums):
            weights = self._weights(self._form.fill + total / self._stages, self._form.once / self._stages)
            prices = self._useful(self._candidates(*weights[0]), weights, np.inf if high is None else high)
            band = self._band(total, high, prices)
            if self._holds(band, low, self._listing):
                yield band
                return
        if halvings == 0 or high is None:
            yield None
            return
        middle = (low + high) / 2
        for half in ((low, middle), (middle, high)):
            yield from self._confirmed(*half, halvings - 1)

    def _range(self, times: Duals) -> tuple[float, float]:
        """Return a time that no slowest stage is below, by bisection, and one above which all plans take too long."""
        low, high = 0.0, self._below / self._form.steady
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if np.isinf(self._paths(times, middle, self._weights(1.0, 0.0))[0]):
                low = middle
            else:
                high = middle
        weights = self._weights(self._form.fill, self._form.once / self._stages)
        duals = duals_of(self._chain, self.time_prices, weights)
        least, _ = self._paths(duals, np.inf, weights)
        return low, (self._below * (1 + 1e-6) - least) / self._form.steady

    def _paths(self, duals: Duals, below: float, weights: Array) -> tuple[float, dict[tuple[int, int], Array]]:
        """Return the shortest paths over runs that a band below some time can hold."""
        return paths(self._chain, self._tables(duals, below), weights, duals.unit_ps)

    def _tables(self, duals: Duals, below: float) -> dict[tuple[int, int], Array]:
        """Return bounds of runs that a band below some time can hold."""
        tables = {
            stage_on_group: bounds.bounds_of(self._chain, duals, stage_on_group) for stage_on_group in self._chain.sent
        }
        if self._times is None or below == np.inf:
            return tables
        times = {
            stage_on_group: bounds.bounds_of(self._chain, self._times, stage_on_group) for stage_on_group in tables
        }
        on = {stage_on_group: times[stage_on_group] + sent < below for stage_on_group, sent in self._chain.sent.items()}
        return {stage_on_group: np.where(on[stage_on_group], table, np.inf) for stage_on_group, table in tables.items()}

    def _holds(self, band: Band, low: float, listing: bool) -> bool:
        return band_holds(self._chain, band, low, self._times, self._exactly_below, listing)

    def _band(self, slowest_weight: float, high: float | None, prices: Prices) -> Band:
        return Band(
            slowest_below_ps=high,
            slowest_weights=(slowest_weight / self._stages,) * self._stages,
            exposed_weights=(self._form.once / self._stages,) * self._stages,
            prices=prices,
        )

    def _useful(self, prices: Prices, weights: Array, below: float) -> Prices:
        """Return, by stage, the memory prices with the best bounds near a shortest path; searched in two rounds."""
        best = self._counted(prices, weights, below)
        finer = [_between(known, useful[0]) if useful else _FREE for known, useful in zip(prices, best, strict=True)]
        both = tuple(tuple(dict.fromkeys((*useful, *more))) for useful, more in zip(best, finer, strict=True))
        return tuple(useful[:_MAX_PRICES] or _FREE for useful in self._counted(both, weights, below))

    def _counted(self, prices: Prices, weights: Array, below: float) -> list[tuple[MemoryPrice, ...]]:
        """Return the prices of each stage, the most useful first."""
        duals = duals_of(self._chain, prices, weights)
        tables = self._tables(duals, below)
        _, others = paths(self._chain, tables, weights, duals.unit_ps)
        shares: list[dict[MemoryPrice, float]] = [{} for _ in range(self._stages)]
        for stage_on_group, table in tables.items():
            self._count(duals, stage_on_group, others[stage_on_group] + table, shares[stage_on_group[0]])
        return [tuple(sorted(priced, key=priced.__getitem__, reverse=True)) for priced in shares]

    def _count(
        self, duals: Duals, stage_on_group: tuple[int, int], through: Array, counted: dict[MemoryPrice, float]
    ) -> None:
        """Credit each price for every run that it bounds best, the more the shorter the path through it."""
        if not np.isfinite(least := float(through.min())):
            return
        rows, near = duals.rows_of(stage_on_group), np.argwhere(through <= least + _NEAR * abs(least))
        runs, share = self._chain.number[near[:, 0], near[:, 1]], 1 / (_NEAR * abs(least) / 30 + 1e-300)
        costs = duals.whole[runs[:, None], rows, near[:, 2:3], near[:, 3:]]
        for row, value in zip(costs.argmax(1), through[tuple(near.T)], strict=True):
            price = duals.rows[rows[row]][1]
            counted[price] = counted.get(price, 0.0) + float(np.exp((least - value) * share))

    def _candidates(self, time: float, exposed: float) -> Prices:
        """Return candidate prices of a byte by stage, from the lower hulls of the options' costs over their memory."""
        problem, candidates = self._chain.problem, []
        for stage, count in enumerate(problem.in_flight):
            all_in_flight, slopes = count == problem.num_microbatches, set[float]()
            for group in {group for at, group in self._chain.sent if at == stage}:
                for o in problem.device_groups[group].options:
                    memory = o.state_bytes + count * o.activation_bytes + (not all_in_flight) * o.late_bytes
                    slopes |= set(slopes_of(hull(time * o.time_ps + exposed * o.exposed_ps, memory)))
            ordered = sorted(slopes)
            sampled = np.linspace(0, len(ordered) - 1, min(len(ordered), _MAX_SLOPES))
            phases = bounds.phases_of(self._chain, stage)
            moments = [(n, 1.0) for n in range(len(phases))]
            moments += [(n, share) for n, (_, comes, _) in enumerate(phases) if comes for share in (0.5, 0.0)]
            of_slopes = [
                MemoryPrice(ps_per_byte=ordered[int(i)], phase=n, last_layer=x) for i in sampled for n, x in moments
            ]
            candidates.append((*_FREE, *of_slopes))
        return tuple(candidates)

    def _weights(self, time: float, exposed: float) -> Array:
        return np.array([(time, exposed)] * self._stages)


def _between(prices: Sequence[MemoryPrice], best: MemoryPrice) -> tuple[MemoryPrice, ...]:
    """Return prices between the neighbours of the best price, at the same moment of a stage."""
    known = sorted({price.ps_per_byte for price in prices})
    at = known.index(best.ps_per_byte)
    low, high = known[max(0, at - 1)], known[min(len(known) - 1, at + 1)]
    values = [*np.linspace(low, known[at], 5), *np.linspace(known[at], high, 5)[1:]]
    return tuple(replace(best, ps_per_byte=float(value)) for value in values)
