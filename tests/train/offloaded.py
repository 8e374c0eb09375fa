"""Plans some of whose layers keep their optimizer states in host memory."""

import random
from collections.abc import Iterable

from msgspec.structs import replace

from shardwright.types import Offload, Plan, Recompute, Schedule


def with_offload(plans: Iterable[Plan], number: int = 0) -> list[Plan]:
    """The plans with a random half of the layers, at least one, offloaded; those of Muon with AdamW."""
    return [_offloaded(plan, random.Random(f"{plan.name}/{number}")) for plan in plans]


def _offloaded(plan: Plan, draw: random.Random) -> Plan:
    chosen = {draw.randrange(len(plan.layers)), *(i for i in range(len(plan.layers)) if draw.random() < 0.5)}
    layers = (replace(x, offload=Offload.OPTIMIZER) if i in chosen else x for i, x in enumerate(plan.layers))
    optimizer = "adamw" if plan.optimizer == "muon" else plan.optimizer
    return replace(plan, name=f"offload {plan.name}", layers=tuple(layers), optimizer=optimizer)


def with_moved_activations(plans: Iterable[Plan], number: int = 0) -> list[Plan]:
    """The plans with activations of a random half of the layers in host memory, of some with their states, too.

    Of a layer that cannot move its activations as it is, they are its input: it is recomputed. Schedules that hold
    several chunks, or split backward passes, become 1F1B; plans of several chunks are left out.
    """
    alone = (plan for plan in plans if all(len(stage.layers) == 1 for stage in plan.stages) and not plan.compile)
    return [_moved(plan, random.Random(f"{plan.name}/{number}/activations")) for plan in alone]


def _moved(plan: Plan, draw: random.Random) -> Plan:
    chosen = {draw.randrange(len(plan.layers)), *(i for i in range(len(plan.layers)) if draw.random() < 0.5)}
    kinds = (Offload.ACTIVATIONS, *([] if plan.optimizer == "muon" else [Offload.BOTH]))
    layers = list(plan.layers)
    for i in chosen:
        layer = layers[i] if layers[i].moves_activations else replace(layers[i], recompute=Recompute.FULL)
        layers[i] = replace(layer, offload=draw.choice(kinds))
    schedule = Schedule.ONE_F_ONE_B if plan.schedule.splits or plan.schedule.interleaves else plan.schedule
    return replace(plan, name=f"moved {plan.name}", layers=tuple(layers), schedule=schedule)
