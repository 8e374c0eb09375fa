"""Random plans with split backward passes: of every family and with every strategy that there is."""

from compared_families import FAMILIES
from context_plans import context_plans
from frozen_models import frozen_plan, lora_plan
from msgspec.structs import replace
from random_plans import random_plan, uneven_plan
from shared_experts import shared_plans
from special_plans import in_groups
from tiny_models import tiny

from shardwright.types import GradientReduction, LayerStrategy, Plan, Recompute, Schedule

DTYPES = ("float64", "bfloat16", "float32")
SEVERAL = ("swin", "t5", "whisper", "llava", "deepseek_v3", "modernbert")
"""Families of several kinds of layers, some of which end with a product that is not summed over ranks."""


def split(plan: Plan) -> Plan:
    """The same plan with split backward passes; what was in several chunks of a stage is in one.

    Of chunks in stages of unequal width the plan stays as it is: layers would come to other ranks.
    """
    chunks, stages = len(plan.stages[0].layers), len(plan.stages)
    if chunks > 1 and len({len(stage.ranks) for stage in plan.stages}) > 1:
        return plan
    ranges = [stage.layers[chunk] for chunk in range(chunks) for stage in plan.stages]
    joined = [(ranges[i * chunks][0], ranges[(i + 1) * chunks - 1][1]) for i in range(stages)]
    return replace(
        plan,
        name=f"split {plan.name}",
        schedule=Schedule.ZERO_BUBBLE,
        gradient_reduction=GradientReduction.DEFERRED,
        stages=tuple(replace(stage, layers=(held,)) for stage, held in zip(plan.stages, joined, strict=True)),
        num_microbatches=max(m for m in (1, 2, 4) if plan.global_batch_size % (m * _widest(plan)) == 0),
    )


def split_plans(world_size: int) -> list[Plan]:
    """Plans on 2 or 4 ranks."""
    drawn = [random_plan(tiny(name), 300 + i, world_size, DTYPES[i % 3]) for i, name in enumerate(FAMILIES)]
    drawn += [*shared_plans(world_size), *context_plans(world_size)[::3]]
    drawn += [
        lora_plan("queries and values", 1, world_size),
        frozen_plan("matrices between", 2, world_size),
        frozen_plan("all but the last two", 3, world_size),
    ]
    if world_size == 4:
        drawn += in_groups(4)
        drawn += [uneven_plan(tiny(name), 310 + i, 4) for i, name in enumerate(FAMILIES[::4])]
    several = [random_plan(tiny(name), 320 + i, world_size) for i, name in enumerate(SEVERAL)]
    drawn += [replace(plan, name=f"selective {plan.name}", layers=_selective(plan)) for plan in several]
    return [plan for plan in map(split, drawn) if plan.schedule.splits]


def _selective(plan: Plan) -> tuple[LayerStrategy, ...]:
    return tuple(replace(layer, recompute=Recompute.SELECTIVE) for layer in plan.layers)


def _widest(plan: Plan) -> int:
    return max(layer.dp_size for layer in (plan.embedding, plan.head, *plan.layers))
