"""Plans that no draw gives: chunks that lack layers, states that groups share out, replicas behind a cut."""

import msgspec
from random_plans import bare_plan, random_plan
from tiny_models import tiny

from shardwright.types.plan import GradientReduction, Plan, Schedule
from shardwright.types.strategy import DataParallel, LayerStrategy, Recompute, SequenceParallel, Strategy

__all__ = ["chunked_plan", "hollow_plan", "in_groups", "mixed_plan", "replicas_behind_a_cut"]


def chunked_plan() -> Plan:
    """A plan as a search makes it of 4 layers in chunks of 2, of which the first and the last one lack all."""
    plan = bare_plan(tiny("llama"), 1, 2)
    ranges = (((0, 0), (2, 4)), ((0, 2), (4, 4)))
    stages = tuple(
        msgspec.structs.replace(stage, layers=layers) for stage, layers in zip(plan.stages, ranges, strict=True)
    )
    assert len(plan.layers) == 4 and plan.schedule is Schedule.INTERLEAVED_1F1B
    return msgspec.structs.replace(plan, name="chunks that lack layers", stages=stages)


def hollow_plan(tied: bool = False) -> Plan:
    """A plan as a layout of Megatron-LM has it, `E|tt|t|||t||L`: of 4 chunks a stage several have no layers."""
    plan = bare_plan(tiny("llama", tie_word_embeddings=tied), 1, 2)
    ranges = (((0, 0), (2, 3), (3, 3), (4, 4)), ((0, 2), (3, 3), (3, 4), (4, 4)))
    stages = tuple(
        msgspec.structs.replace(stage, layers=layers) for stage, layers in zip(plan.stages, ranges, strict=True)
    )
    assert len(plan.layers) == 4 and plan.schedule is Schedule.INTERLEAVED_1F1B
    return msgspec.structs.replace(plan, name=f"hollow chunks, tied {tied}", stages=stages)


def _sharded_in_groups(world_size: int, tied: bool) -> Plan:
    """Every kind of layer whose states groups of ranks share out, beside such as all share out, or none."""
    plan = random_plan(tiny("llama", tie_word_embeddings=tied), 3, world_size, stages=1)
    half = {"data_parallel": DataParallel.ZERO3, "shard_size": world_size // 2}
    whole = {"tp_size": 1, "dp_size": world_size}
    grid = {"tp_size": 2, "dp_size": world_size // 2}
    if world_size > 4:
        inner = {"data_parallel": DataParallel.ZERO2, "shard_size": 2}
        layers = [{**grid, **inner}, {**grid, **inner, "tp_consecutive": False}]
    else:
        layers = [{**whole, "data_parallel": DataParallel.ZERO2, "shard_size": 2}, {**grid, "data_parallel": "zero3"}]
    layers += [{**whole, **half}, {**grid, **half, "sequence_parallel": SequenceParallel.ULYSSES, "recompute": "full"}]
    return msgspec.structs.replace(
        plan,
        name=f"shard groups on {world_size}, tied {tied}",
        layers=tuple(LayerStrategy(type="block", **layer) for layer in layers),  # type: ignore[arg-type]
        embedding=Strategy(**whole, **half),  # type: ignore[arg-type]
        head=Strategy(**whole, data_parallel=DataParallel.ZERO2, shard_size=2),
        num_microbatches=2,
        schedule=Schedule.ONE_F_ONE_B,
        gradient_reduction=GradientReduction.EVERY_MICROBATCH if tied else GradientReduction.DEFERRED,
    )


def in_groups(world_size: int) -> list[Plan]:
    """Plans of one stage whose states groups of ranks share out, with and without a tied embedding."""
    return [_sharded_in_groups(world_size, tied) for tied in (False, True)]


def replicas_behind_a_cut() -> Plan:
    """Replicated layers whose inputs come from another stage: gradients must be there before they are reduced."""
    plan = random_plan(tiny("vit"), 4, 4, stages=2)
    sharding = {"tp_size": 1, "dp_size": 2}
    layers = tuple(LayerStrategy(type=kind, **sharding, recompute=Recompute.FULL) for kind in plan.model.layers)
    return msgspec.structs.replace(
        plan,
        name="replicas behind a cut",
        embedding=Strategy(**sharding),
        head=Strategy(**sharding),
        layers=layers,
        gradient_reduction=GradientReduction.DEFERRED,
        num_microbatches=1,
    )


def mixed_plan() -> Plan:
    """A plan on two ranks of one stage that does everything at once, which mutations break, too."""
    plan = random_plan(tiny("llama", tie_word_embeddings=True), 1, 2, stages=1)
    split = {"tp_size": 2, "dp_size": 1}
    shared = {"tp_size": 1, "dp_size": 2}
    layers = (
        LayerStrategy(type="block", **split, sequence_parallel=SequenceParallel.MEGATRON),
        LayerStrategy(type="block", **shared, recompute=Recompute.FULL),
        LayerStrategy(type="block", **shared, data_parallel=DataParallel.ZERO3),
        LayerStrategy(type="block", **split, recompute=Recompute.FULL),
    )
    embedding = Strategy(**shared, data_parallel=DataParallel.ZERO2)
    head = Strategy(**split, sequence_parallel=SequenceParallel.MEGATRON)
    return msgspec.structs.replace(
        plan,
        name="mixed",
        layers=layers,
        embedding=embedding,
        head=head,
        num_microbatches=2,
        schedule=Schedule.ONE_F_ONE_B,
    )
