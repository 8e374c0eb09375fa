"""Plans some of whose layers keep their optimizer states in host memory."""

import random
from collections.abc import Iterable

from msgspec.structs import replace

from shardwright.types import Offload, Plan


def with_offload(plans: Iterable[Plan], number: int = 0) -> list[Plan]:
    """The plans with a random half of the layers, at least one, offloaded; those of Muon with AdamW."""
    return [_offloaded(plan, random.Random(f"{plan.name}/{number}")) for plan in plans]


def _offloaded(plan: Plan, draw: random.Random) -> Plan:
    chosen = {draw.randrange(len(plan.layers)), *(i for i in range(len(plan.layers)) if draw.random() < 0.5)}
    layers = (replace(x, offload=Offload.OPTIMIZER) if i in chosen else x for i, x in enumerate(plan.layers))
    optimizer = "adamw" if plan.optimizer == "muon" else plan.optimizer
    return replace(plan, name=f"offload {plan.name}", layers=tuple(layers), optimizer=optimizer)
