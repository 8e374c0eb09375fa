"""Plans that stay good where the profile may be wrong: scenarios, and how far a plan is from the best one of each.

The regret of a plan in a scenario is T / T* - 1 with T* the least T of all plans there. The plan of the least largest
regret is what Kouvelis and Yu (Robust Discrete Optimization, 1997) call the relative robust decision, here among the
best and near plans of all scenarios.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from shardwright_formats.types import Cluster, ScenarioRegret
from shardwright_formats.types.hardware_profile import Collective, HardwareProfile
from shardwright_search.cost_model.layer import picoseconds
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.cost_model.scaling import Scaling, scaled
from shardwright_search.solver.targets import Best
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import Robust
from shardwright_search.step.pareto import Numbers

Flags = NDArray[np.bool_]
Points = Callable[[HardwareProfile], Flags]
"""Some of a profile's points [points]."""
NOMINAL = "the profile as it is"
_NORMAL_95 = 1.96
"""Standard deviations of a normal distribution in half of its central 95 %."""


class Scenario(NamedTuple):
    """What may be true instead of the profiles."""

    name: str
    profiles: Profiles


class Regrets(msgspec.Struct, frozen=True, eq=False):
    """Plans, and how much longer than the best of them each takes in every scenario."""

    names: tuple[str, ...]
    """Of the scenarios, the profile as it is first."""
    plans: tuple[Best[Configuration], ...]
    """As they score with the profile as it is."""
    shares: Numbers
    """[scenarios, plans]."""

    def least(self, near: float) -> tuple[Best[Configuration], ...]:
        """The plans whose largest regret is within a share of the least one, by score."""
        worst = 1 + self.shares.max(0)
        kept = [self.plans[i] for i in np.flatnonzero(worst <= worst.min() * (1 + near))]
        return tuple(sorted(kept, key=lambda best: best.score))

    def reported(self, chosen: Best[Configuration], nominal: Best[Configuration]) -> tuple[ScenarioRegret, ...]:
        """The regrets of two of the plans."""
        known = [_identity(best) for best in self.plans]
        columns = self.shares[:, [known.index(_identity(best)) for best in (chosen, nominal)]]
        return tuple(
            ScenarioRegret(scenario=name, regret=float(own), nominal_regret=float(other))
            for name, (own, other) in zip(self.names, columns, strict=True)
        )


def scenarios(profiles: Profiles, cluster: Cluster, robust: Robust) -> tuple[Scenario, ...]:
    """The profile as it is; everything longer by its spread; each kind of link slow. What changes nothing is left out.

    Times inside a layer hold the messages of tensor and sequence parallelism: a slow link leaves them as they are.
    """
    found = [Scenario(NOMINAL, profiles)]
    if robust.spreads > 0 and _has_spread(profiles):
        name = f"layers {robust.spreads:g} standard errors longer, messages likewise"
        found.append(Scenario(name, longer(profiles, robust.spreads)))
    if robust.slow_link > 1:
        for link, points_of in _links(profiles, cluster):
            slower = profiles.each(partial(_slower, points_of=points_of, factor=robust.slow_link))
            found.append(Scenario(f"{link} {robust.slow_link:g} times as slow", slower))
    return tuple(found)


def _slower(profiles: Profiles, points_of: Points, factor: float) -> Profiles:
    return scaled(profiles, Scaling(collectives=np.where(points_of(profiles.hardware), factor, 1.0)))


def longer(profiles: Profiles, standard_errors: float) -> Profiles:
    """Every layer's times and every collective longer by so many standard errors.

    Half of a collective's 95 % interval is 1.96 standard errors.
    """
    errors = standard_errors / _NORMAL_95
    return profiles.each(
        lambda own: scaled(
            own,
            Scaling(standard_errors=standard_errors, collectives=1 + errors * own.hardware.points["interval"]),
        )
    )


def regrets_of(
    instance: Instance,
    near: Sequence[Best[Configuration]],
    robust: Robust,
    search: Callable[[str, Instance], Sequence[Best[Configuration]]],
) -> Regrets:
    """The near plans of every scenario, each priced in all of them; `near` are those of the profile as it is.

    `search` finds those of another scenario. Its best plan is one of them, if its search was done; else the best one
    known stands in for it.
    """
    costs, found = instance.costs, list(near)
    every = scenarios(costs.profiles, costs.cluster, robust)
    prices = [instance, *(_repriced(instance, scenario.profiles) for scenario in every[1:])]
    for scenario, other in zip(every[1:], prices[1:], strict=True):
        found += search(scenario.name, other)
    plans = {_identity(best): best for best in found}
    scores = np.array([[_score(other, best) for best in plans.values()] for other in prices])
    retold = tuple(_retold(instance, best, score) for best, score in zip(plans.values(), scores[0], strict=True))
    return Regrets(tuple(scenario.name for scenario in every), retold, scores / scores.min(1, keepdims=True) - 1)


def _repriced(instance: Instance, profiles: Profiles) -> Instance:
    """The same request with other profiles; they say the same of memory."""
    return Instance.made(instance.request, replace(instance.costs, profiles=profiles), instance.budgets)


def _retold(instance: Instance, best: Best[Configuration], score: float) -> Best[Configuration]:
    """A plan of any scenario as its score with the profile as it is."""
    target = best.target._replace(offset_ps=float(picoseconds(instance.costs.step_overhead_s)))
    return Best(target, best.found._replace(objective_ps=target.time_ps(score)), score)


def _identity(best: Best[Configuration]) -> tuple[object, ...]:
    return best.target.configuration, best.found.solution


def _score(instance: Instance, best: Best[Configuration]) -> float:
    plan = instance.plan(best.target.configuration, best.found.solution)
    evaluation = evaluate(plan, instance.costs.profiles, instance.costs, timeline=False)
    return evaluation.objective_ps * best.target.scale


def _links(profiles: Profiles, cluster: Cluster) -> Iterator[tuple[str, Points]]:
    """The kinds of link that a cluster has and a profile knows, with what tells the points measured on each."""
    inside = any(node.devices_per_node > 1 for node in cluster.node_types.values())
    several = sum(group.count for group in cluster.nodes) > 1
    kinds: tuple[tuple[str, bool, Points], ...] = (
        ("sends inside a node", inside, lambda of: _is_send(of) & ~_is_across(of)),
        ("sends across nodes", several, lambda of: _is_send(of) & _is_across(of)),
        ("collectives across nodes", several, lambda of: ~_is_send(of) & _is_across(of)),
    )
    for name, there, points_of in kinds:
        if there and any(points_of(own.hardware).any() for own in profiles.per_device):
            yield name, points_of


def _is_send(hardware: HardwareProfile) -> Flags:
    return np.asarray(hardware.points["collective"] == Collective.P2P.encode())


def _is_across(hardware: HardwareProfile) -> Flags:
    return np.asarray(hardware.points["ranks_per_node"] < hardware.points["group_size"])


def _has_spread(profiles: Profiles) -> bool:
    errors = any(points.errors.any() for own in profiles.per_device for points in own.layers.values())
    return errors or any(own.hardware.points["interval"].any() for own in profiles.per_device)
