"""The plans that run on a null device: whatever a random draw gives, with everything that kernels depend on."""

from collections.abc import Iterator, Sequence

from compared_families import FAMILIES, PACKED
from context_plans import context_plans
from frozen_models import LORA, lora_plan
from msgspec import UNSET
from msgspec.structs import replace
from offloaded import with_moved_activations, with_offload
from random_plans import random_plan
from shared_experts import shared_plans
from tiny_models import tiny

from shardwright.types import Attention, Cluster, Model, NodeGroup, NodeType, Plan, Precision
from shardwright_train.models.base import describe, family_named

DEVICE = "NVIDIA H200"
WORLDS = (1, 2, 4, 8)
_WIDTHS = ("hidden_size", "n_embd", "d_model", "d_kv", "embed_dim")
PRECISIONS = (Precision(parameters="float32", compute="bfloat16", reduce="float32"), Precision())


def of_families(families: Sequence[str]) -> Iterator[Plan]:
    """A random plan of each family for worlds of 1 to 8 ranks."""
    for number, family in enumerate(families):
        yield from (random_plan(tiny(family), number + world, world) for world in WORLDS)


def with_experts(families: Sequence[str]) -> Iterator[Plan]:
    """Experts that ranks share out, and their features."""
    yield from _of(families, (*shared_plans(2), *shared_plans(4)))


def with_context(families: Sequence[str]) -> Iterator[Plan]:
    """Positions that attend to those of other ranks, over gathered keys and round rings, some of documents."""
    yield from _of(families, (*context_plans(2), *context_plans(4)))


def packed(families: Sequence[str]) -> Iterator[Plan]:
    """Samples of several documents."""
    drawn = (random_plan(tiny(family), number, world) for number, family in enumerate(PACKED) for world in WORLDS)
    yield from _of(families, [replace(plan, name=f"packed {plan.name}") for plan in drawn])


def with_low_rank(families: Sequence[str]) -> Iterator[Plan]:
    """Low-rank matrices beside frozen ones."""
    yield from _of(families, [lora_plan(name, 0, world) for name in LORA for world in WORLDS])


def with_offload_to_the_host(families: Sequence[str]) -> Iterator[Plan]:
    """States and activations in pinned memory, each with copies on streams of their own."""
    drawn = [random_plan(tiny(family), number + 20, 2) for number, family in enumerate(families)]
    yield from (*with_offload(drawn[::2]), *with_moved_activations(drawn))


PARTS = {
    "families": of_families,
    "experts": with_experts,
    "context": with_context,
    "packing": packed,
    "LoRA": with_low_rank,
    "offload": with_offload_to_the_host,
}


def on_null_device(plan: Plan, precision: Precision) -> Plan:
    """The same plan on GPUs, for a wider model, computing in a precision with the fastest attention that they have."""
    ranks = plan.world_size
    node = NodeType(device=DEVICE, devices_per_node=ranks, memory_bytes=140 << 30)
    cluster = Cluster(name="null", nodes=(NodeGroup(node_type="gpu", count=1),), node_types={"gpu": node})
    model = _wide(plan.model)
    return replace(plan, model=model, cluster=cluster, precision=precision, attention=Attention.AUTO)


def _wide(model: Model) -> Model:
    """The same model, in most families with heads of 8 features in place of 4, which kernels do not take in 16 bits."""
    wider = {key: 2 * model.config[key] for key in _WIDTHS if key in model.config}
    if model.low_rank is not UNSET or "rope_scaling" in model.config:  # which has a factor for each feature
        return model
    family = family_named(model.family, "test")
    config = model.config | family.facts.counted(model.layers, model.config) | wider
    return describe(family, config, model.name, model.sequence_length)


def _of(families: Sequence[str], plans: Sequence[Plan]) -> Iterator[Plan]:
    return (plan for plan in plans if plan.model.family in families)


assert set(PACKED) <= set(FAMILIES)
