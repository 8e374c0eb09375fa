"""Plans that stay good where the profile may be wrong: scenarios, and how far a plan is from the best one of each.

The regret of a plan in a scenario is T / T* - 1 with T* the least T of all plans there. The plan of the least largest
regret is what Kouvelis and Yu (Robust Discrete Optimization, 1997) call the relative robust decision, here among the
best and near plans of all scenarios.
"""

from collections.abc import Callable, Sequence
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
from shardwright_search.cost_model.profiles import Profiles, Scaling, scaled
from shardwright_search.solver.targets import Best
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import Robust
from shardwright_search.step.pareto import Numbers

NOMINAL = "the profile as it is"
_NORMAL_95 = 1.96
"""Standard deviations of a normal distribution in half of its central 95 %."""
_LINKS = (
    ("sends inside a node", True, False),
    ("sends across nodes", True, True),
    ("collectives across nodes", False, True),
)
"""The kinds of link by name: whether their messages are sends, and whether they go across nodes."""


class Scenario(NamedTuple):
    """Profiles that may be true instead of those that were measured."""

    name: str
    profiles: Profiles


class Regrets(msgspec.Struct, frozen=True, eq=False):
    """Plans, and how much longer than the best of them each takes in all scenarios."""

    names: tuple[str, ...]
    """The scenarios' names, the profile as it is first."""
    plans: tuple[Best[Configuration], ...]
    """The plans as they score with the profile as it is."""
    shares: Numbers
    """The regrets [scenarios, plans]."""

    def least(self, near: float) -> tuple[Best[Configuration], ...]:
        """Return the plans whose largest regret is within a share of the least one, by score."""
        worst = 1 + self.shares.max(0)
        kept = [self.plans[i] for i in np.flatnonzero(worst <= worst.min() * (1 + near))]
        return tuple(sorted(kept, key=lambda best: best.score))

    def reported(self, chosen: Best[Configuration], nominal: Best[Configuration]) -> tuple[ScenarioRegret, ...]:
        """Return the regrets of two of the plans."""
        known = [_identity(best) for best in self.plans]
        columns = self.shares[:, [known.index(_identity(best)) for best in (chosen, nominal)]].tolist()
        return tuple(
            ScenarioRegret(scenario=name, regret=regret, nominal_regret=nominal_regret)
            for name, (regret, nominal_regret) in zip(self.names, columns, strict=True)
        )


def scenarios(profiles: Profiles, cluster: Cluster, robust: Robust) -> tuple[Scenario, ...]:
    """Return the profile as it is; all longer by their spread; each kind of link slow; without what changes nothing.

    Times inside a layer hold the messages of tensor and sequence parallelism: a slow link leaves them as they are.
    """
    listed = [Scenario(NOMINAL, profiles)]
    if robust.spreads > 0 and any(map(_has_spread, profiles.per_device)):
        name = f"layers {robust.spreads:g} standard errors longer, messages likewise"
        listed.append(Scenario(name, longer(profiles, robust.spreads)))
    inside = any(node.devices_per_node > 1 for node in cluster.node_types.values())
    several = sum(group.count for group in cluster.nodes) > 1
    for name, *link in _LINKS if robust.slow_link > 1 else ():
        there = several if link[1] else inside
        if there and any(_is_on(each.hardware, *link).any() for each in profiles.per_device):
            slower = profiles.each(partial(_slower, factor=robust.slow_link, link=link))
            listed.append(Scenario(f"{name} {robust.slow_link:g} times as slow", slower))
    return tuple(listed)


def _is_on(hardware: HardwareProfile, is_send: bool, is_across: bool) -> NDArray[np.bool_]:
    """Return which of a profile's points [points] were measured on a kind of link."""
    points = hardware.points
    sends, across = points["collective"] == Collective.P2P.encode(), points["ranks_per_node"] < points["group_size"]
    return np.asarray((sends == is_send) & (across == is_across))


def _slower(profiles: Profiles, factor: float, link: Sequence[bool]) -> Profiles:
    return scaled(profiles, Scaling(collectives=np.where(_is_on(profiles.hardware, *link), factor, 1.0)))


def _has_spread(profiles: Profiles) -> bool:
    layers = profiles.layers.values()
    return bool(profiles.hardware.points["interval"].any()) or any(points.errors.any() for points in layers)


def longer(profiles: Profiles, standard_errors: float) -> Profiles:
    """Return profiles with the times of all layers and all collectives longer by so many standard errors.

    Half of a collective's 95 % interval is 1.96 standard errors.
    """

    def changed(profile: Profiles) -> Profiles:
        collectives = 1 + standard_errors / _NORMAL_95 * profile.hardware.points["interval"]
        return scaled(profile, Scaling(standard_errors=standard_errors, collectives=collectives))

    return profiles.each(changed)


def regrets_of(
    instance: Instance,
    near: Sequence[Best[Configuration]],
    robust: Robust,
    search: Callable[[str, Instance], Sequence[Best[Configuration]]],
) -> Regrets:
    """Return the near plans of all scenarios, each priced in all; `near` are those of the profile as it is.

    `search` finds those of another scenario. Its best plan is one of them, if its search was done; else the best one
    known stands in for it.
    """
    costs, best_plans = instance.costs, list(near)
    nominal, *others = scenarios(costs.profiles, costs.cluster, robust)
    instances = [instance]
    for scenario in others:  # the same request with other profiles, which say the same of memory
        repriced = Instance.made(instance.request, replace(costs, profiles=scenario.profiles), instance.budgets)
        best_plans += search(scenario.name, repriced)
        instances.append(repriced)
    plans = {_identity(best): best for best in best_plans}.values()
    scores = np.array([[_score(each, best) for best in plans] for each in instances])
    rescored = tuple(_rescored(instance, best, score) for best, score in zip(plans, scores[0], strict=True))
    names = tuple(scenario.name for scenario in (nominal, *others))
    return Regrets(names, rescored, scores / scores.min(1, keepdims=True) - 1)


def _rescored(instance: Instance, best: Best[Configuration], score: float) -> Best[Configuration]:
    """Return a plan of any scenario with its score under the profile as it is."""
    target = best.target._replace(offset_ps=float(picoseconds(instance.costs.step_overhead_s)))
    return Best(target, best.priced._replace(objective_ps=target.time_ps(score)), score)


def _identity(best: Best[Configuration]) -> tuple[object, ...]:
    return best.target.configuration, best.priced.solution


def _score(instance: Instance, best: Best[Configuration]) -> float:
    plan = instance.plan(best.target.configuration, best.priced.solution)
    evaluation = evaluate(plan, instance.costs.profiles, instance.costs, timeline=False)
    return evaluation.objective_ps * best.target.scale
