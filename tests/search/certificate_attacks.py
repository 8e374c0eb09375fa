"""Forged certificates of claims that are false, on problems whose budgets are exact to the byte."""

from collections.abc import Iterable

import numpy as np
from msgspec.structs import replace
from random_problems import best_of, every_plan, random_problem, random_unequal, with_budgets

from shardwright.plan.schedules.schedule import ClosedForm
from shardwright.types import Band, ConfigurationProof, MemoryPrice
from shardwright_search.certificate.bounds import chain_of, phases_of
from shardwright_search.certificate.check import Way, Ways, confirms
from shardwright_search.solver.problem import DeviceGroup, Options, Problem

__all__ = ["SPLIT_FORMS", "accepted", "exact_problem", "forged_proof", "one_way"]

SPLIT_FORMS = ClosedForm(fill=0, steady=1, once=0), ClosedForm(fill=1, steady=0, once=0)
"""The slowest stage alone, and a sum of stages."""
_LARGEST = 1e15
"""The largest number that a certificate may hold as a dual value."""
_BYTES = "state_bytes", "late_bytes", "sum_bytes", "activation_bytes", "workspace_bytes"


def accepted(seeds: Iterable[int]) -> dict[int, str]:
    """Forge a proof for each seed, and return those false claims that are confirmed, in words."""
    wrong = {}
    for seed in seeds:
        rng = np.random.default_rng([seed, 30])
        problem = exact_problem(seed)
        if (
            seed % 3 == 0 and problem.pp_size > 1
        ):  # as bounds of split backward passes are, in which times count zero times
            problem = replace(problem, closed_form=SPLIT_FORMS[seed % 2])
        best = best_of(problem)
        claim = best + float(rng.choice([1, best * 10 ** rng.uniform(-12, 0)]))
        if confirms(problem, forged_proof(problem, rng), claim):
            wrong[seed] = f"a plan takes {best:.0f} ps, and a claim of {claim:.1f} is confirmed"
    return wrong


def one_way(problem: Problem) -> tuple[str, Ways]:
    """A configuration of any name whose bound is proven in one way."""
    return "any", lambda bound_ps: [Way("any", problem, bound_ps)]


def exact_problem(seed: int) -> Problem:
    """Return a tiny problem of gigabytes and milliseconds whose budget is what some plan needs, to the byte."""
    rng = np.random.default_rng([seed, 29])
    made = (random_problem, random_unequal)[int(rng.integers(2))]
    problem = _single_stage(seed) if rng.random() < 0.6 else made(seed)
    time, size = 10 ** rng.uniform(3, 8), 10 ** rng.uniform(5, 9)
    groups = tuple(_scaled(rng, group, time, size) for group in problem.device_groups)
    sends = {cut: _whole(rng, sent, time) for cut, sent in problem.sends_ps.items()}
    problem = replace(
        problem,
        device_groups=groups,
        sends_ps=sends,
        boundary_bytes=_whole(rng, problem.boundary_bytes, size),
        tied_ps=_whole(rng, problem.tied_ps, time),
    )
    needs = np.sort(np.concatenate([plans.memory.max(0) for plans in every_plan(problem)]))
    budget = int(needs[int(len(needs) * rng.choice([0, 0, 0, 0.02, 0.2, 0.6]))])
    return with_budgets(problem, [budget] * len(groups))


def _single_stage(seed: int) -> Problem:
    """Return a problem with one stage: rounding is not hidden there by memory that another stage leaves free."""
    return next(problem for problem in map(random_problem, range(seed, seed + 50)) if problem.pp_size == 1)


def _scaled(rng: np.random.Generator, group: DeviceGroup, time: float, size: float) -> DeviceGroup:
    options = tuple(_scaled_options(rng, of_kind, time, size) for of_kind in group.options)
    return replace(group, options=options, redistribution_ps=_whole(rng, group.redistribution_ps, time))


def _scaled_options(rng: np.random.Generator, options: Options, time: float, size: float) -> Options:
    times = {name: _whole(rng, getattr(options, name), time) for name in ("time_ps", "exposed_ps")}
    return options._replace(**times, **{name: _whole(rng, getattr(options, name), size) for name in _BYTES})


def _whole(rng: np.random.Generator, values: np.ndarray, factor: float) -> np.ndarray:
    """Return whole numbers near multiples; what is 0 or infinite stays."""
    return np.where(np.isfinite(values), np.round(values * factor * rng.uniform(0.99, 1.01, values.shape)), values)


def forged_proof(problem: Problem, rng: np.random.Generator) -> ConfigurationProof:
    """Return a proof of the right shape whose numbers are anything that a file can hold."""
    chain, form = chain_of(problem, layouts := bool(rng.random() < 0.7)), problem.closed_form
    phases = [len(phases_of(chain, stage)) for stage in range(problem.pp_size)]
    most = max(float(o.time_ps.max()) for group in problem.device_groups for o in group.options) * len(problem.layers)
    ends = sorted({float(end) for end in rng.uniform(0.05, 1, int(rng.integers(0, 4))) * most if end > 0})
    bands = tuple(
        Band(
            slowest_below_ps=end,
            slowest_weights=_weights(rng, len(phases), form.steady),
            exposed_weights=_weights(rng, len(phases), form.once),
            prices=_prices(rng, phases),
        )
        for end in (*ends, None)
    )
    return ConfigurationProof(configuration="any", layouts=layouts, time_prices=_prices(rng, phases), bands=bands)


def _weights(rng: np.random.Generator, stages: int, total: float) -> tuple[float, ...]:
    if rng.random() < 0.2:
        return tuple((10 ** rng.uniform(-3, 15, stages)).tolist())
    return tuple((rng.dirichlet([1] * stages) * total * rng.choice([0, 1, 1, 1 + 1e-12])).tolist())


def _prices(rng: np.random.Generator, phases: list[int]) -> tuple[tuple[MemoryPrice, ...], ...]:
    """Return prices by stage; with several stages one of them is 0, as no price suits a stage with memory left."""
    free = (MemoryPrice(ps_per_byte=0.0),) * (len(phases) > 1)
    return tuple((*free, *(_price(rng, count) for _ in range(int(rng.integers(1, 3))))) for count in phases)


def _price(rng: np.random.Generator, phases: int) -> MemoryPrice:
    value = float(rng.choice([0.0, _LARGEST, 10 ** rng.uniform(-3, 15)], p=[0.1, 0.4, 0.5]))
    share = float(rng.choice([0.0, 0.5, 1.0, rng.random()], p=[0.2, 0.1, 0.5, 0.2]))
    return MemoryPrice(ps_per_byte=value, phase=int(rng.integers(phases)), last_layer=share)
