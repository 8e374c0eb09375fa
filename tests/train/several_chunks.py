"""Plans of split backward passes in several chunks a stage: V-shaped, and interleaved."""

from compared_families import FAMILIES
from context_plans import context_plans
from frozen_models import frozen_plan, lora_plan
from msgspec.structs import replace
from random_plans import random_plan
from shared_experts import shared_plans
from tiny_models import tiny

from shardwright.types import GradientReduction, Plan, Schedule

TURNING = tuple(schedule for schedule in Schedule if schedule.turns)
SCHEDULES = *TURNING, Schedule.INTERLEAVED_ZERO_BUBBLE
FOUR = 4
"""Layers of which each of four stages of a V has some, cut as evenly as they can be: of five one has none."""


def in_chunks(plan: Plan, schedule: Schedule, chunks: int = 2) -> Plan:
    """The same layers in equal chunks, as far as they can be; of several stages of equal width."""
    pp_size, count = len(plan.stages), len(plan.layers)
    assert pp_size > 1 and len({len(stage.ranks) for stage in plan.stages}) == 1
    held: list[list[tuple[int, ...]]] = [[] for _ in plan.stages]
    for number, (stage, _) in enumerate(schedule.way(pp_size, chunks)):
        held[stage].append(tuple(at * count // (chunks * pp_size) for at in (number, number + 1)))
    return replace(
        plan,
        name=f"{schedule} {plan.name}",
        schedule=schedule,
        gradient_reduction=GradientReduction.DEFERRED,
        stages=tuple(replace(stage, layers=tuple(layers)) for stage, layers in zip(plan.stages, held, strict=True)),
        num_microbatches=max(m for m in (1, 2, 4, 8) if plan.global_batch_size % (m * _widest(plan)) == 0),
    )


def several_chunks(world_size: int) -> list[Plan]:
    """Plans of every family on 2 or 4 ranks, and of tied, frozen and low-rank parameters, experts and contexts."""
    models = [tiny(name) for name in FAMILIES]
    most = [world_size if i % 4 < 2 and len(model.layers) == FOUR else 2 for i, model in enumerate(models)]
    drawn = [random_plan(model, 700 + i, world_size, stages=most[i]) for i, model in enumerate(models)]
    drawn += [random_plan(tiny("llama", tie_word_embeddings=True), 710 + i, world_size, stages=2) for i in range(4)]
    drawn += [*shared_plans(world_size), *context_plans(world_size)[::3]]
    drawn += [
        lora_plan("queries and values", 1, world_size),
        frozen_plan("matrices between", 2, world_size),
        frozen_plan("all but the last two", 3, world_size),
    ]
    drawn = [plan for plan in drawn if len(plan.stages) == 2 or (len(plan.stages) == 4 and len(plan.layers) == FOUR)]
    drawn = [plan for plan in drawn if len({len(stage.ranks) for stage in plan.stages}) == 1]
    # Of four layers in rising order a third of four stages has none.
    takes = [SCHEDULES if len(plan.stages) == 2 else TURNING for plan in drawn]
    return [in_chunks(plan, each[i % len(each)]) for i, (plan, each) in enumerate(zip(drawn, takes, strict=True))]


def joint(plan: Plan) -> Plan:
    """The same layers with joint backward passes: those of a V in one chunk, most of them on another stage."""
    if plan.schedule.turns:
        return replace(in_chunks(plan, Schedule.ONE_F_ONE_B, 1), num_microbatches=plan.num_microbatches)
    return replace(plan, schedule=Schedule.INTERLEAVED_1F1B if plan.schedule.interleaves else Schedule.ONE_F_ONE_B)


def _widest(plan: Plan) -> int:
    return max(layer.dp_size for layer in (plan.embedding, plan.head, *plan.layers))
