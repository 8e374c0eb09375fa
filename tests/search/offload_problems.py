"""Random problems whose layers may take host memory, with budgets of it that bind."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product

import numpy as np
from interleaved_problems import every_interleaved, random_interleaved
from msgspec.structs import replace
from random_problems import every_plan, random_problem, random_unequal, with_tight_budgets

from shardwright_search.solver.interleaved_problem import InterleavedProblem
from shardwright_search.solver.problem import DeviceGroup, Options, Problem

Move = Callable[[np.random.Generator, Options], Options]
_SHARES = 0, 0.05, 0.2, 0.5
"""Shares of the needs that are below the budget."""


@lru_cache(maxsize=2_000)
def random_with_offload(seed: int) -> Problem:
    """A problem of any kind of pipeline; every other one has stages of unequal width."""
    made: Callable[[int], Problem] = (random_problem, random_unequal)[seed % 2]
    rng, problem = np.random.default_rng([seed, 3]), made(seed)
    # Of every third problem layers move activations, or both, beside states.
    ways = (_states_moved, _activations_moved) if seed % 3 == 0 else (_states_moved,)
    groups = tuple(_hosted(rng, group, (1, 2), ways) for group in problem.device_groups)
    problem = with_tight_budgets(rng, replace(problem, device_groups=groups))
    needs = np.sort(np.concatenate([found.host.max(0) for found in every_plan(problem)]))
    budgets = [float(needs[int(len(needs) * rng.choice(_SHARES))]) for _ in groups]
    pairs = zip(problem.device_groups, budgets, strict=True)
    return replace(problem, device_groups=tuple(replace(group, host_budget_bytes=host) for group, host in pairs))


@lru_cache(maxsize=2_000)
def random_interleaved_with_offload(seed: int) -> InterleavedProblem:
    """A problem of the interleaved schedule."""
    rng, problem = np.random.default_rng([seed, 3]), random_interleaved(seed)
    fields = {name: getattr(problem, name) for name in InterleavedProblem.__struct_fields__}
    group = _hosted(rng, problem.group, tuple({*problem.positions}))
    hosted = InterleavedProblem(**fields | {"group": group})
    needs = sorted(plan.host_bytes for plan in every_interleaved(hosted))
    budget = float(needs[int(len(needs) * rng.choice(_SHARES))]) if needs else 0.0
    return InterleavedProblem(**fields | {"group": replace(group, host_budget_bytes=budget)})


def _hosted(
    rng: np.random.Generator, group: DeviceGroup, kinds: tuple[int, ...], ways: Sequence[Move] = ()
) -> DeviceGroup:
    """The group with further options of some types that hold less on the device, and some of it on the host."""
    options = list(group.options)
    for kind, moved in product(kinds, ways or (_states_moved,)):
        pairs = zip(options[kind], moved(rng, options[kind]), strict=True)
        options[kind] = Options._make(map(np.concatenate, pairs))
    return replace(group, options=tuple(options))


def _states_moved(rng: np.random.Generator, o: Options) -> Options:
    moved = np.floor(o.state_bytes * rng.random(len(o.state_bytes)))
    later = o.exposed_ps + rng.integers(0, 1 + int(o.time_ps.max()) // 4, len(moved)).astype(float)
    return o._replace(state_bytes=o.state_bytes - moved, exposed_ps=later, host_bytes=moved)


def _activations_moved(rng: np.random.Generator, o: Options) -> Options:
    moved = np.floor(o.activation_bytes * rng.random(len(o.activation_bytes)))
    time = o.time_ps + rng.integers(0, 1 + int(o.time_ps.max()) // 4, len(moved)).astype(float)
    return o._replace(
        time_ps=time,
        activation_bytes=o.activation_bytes - moved,
        workspace_bytes=o.workspace_bytes + moved,
        host_activation_bytes=moved,
    )
