"""The context parallelism that the runtime supports for a model, from its family's facts."""

from collections.abc import Iterator
from typing import NamedTuple

from shardwright.io import BadInput
from shardwright.models.facts import Family
from shardwright.models.registry import FAMILIES
from shardwright.models.traits import Mask
from shardwright.plan.axes import axes_of
from shardwright.types.cluster import Cluster
from shardwright.types.model import Model
from shardwright.types.plan import NARROW_BITS, Attention, Plan, Precision
from shardwright.types.strategy import (
    PARTS,
    RECOMPUTE_PARTS,
    ContextParallel,
    Recompute,
    RecomputeChoice,
    RecomputedPart,
)

WITHOUT_FLASH = "attends to no positions of other ranks, as cp_size asks for"
"""The reason why some attention kernels are not used with context parallelism."""
_RING_MASKS = (Mask.CAUSAL, Mask.NONE)
_MULTIPLES = {"bfloat16": 8, "float16": 8, "float32": 4}
"""Number, by format, of which head widths must be multiples in kernels that return logarithms: 16 bytes of elements."""


class Obstacle(NamedTuple):
    """Why the runtime cannot shard positions as requested, and what to do instead."""

    problem: str
    remedy: str


def gpu_format(precision: Precision, cluster: Cluster) -> str | None:
    """Return the number format in which a plan's attention computes on GPUs, or None if the cluster has CPUs."""
    if any(cluster.node_types[group.node_type].on_cpu for group in cluster.nodes):
        return None
    return "bfloat16" if precision.compute in NARROW_BITS else precision.compute


def context_obstacle(
    model: Model, attention: Attention, compile: bool = False, on_gpu: str | None = None
) -> Obstacle | None:
    """Return why no layer of a model can have a cp_size above 1 with an attention kernel, or None if layers can.

    `on_gpu`: the number format of attention on GPUs, whose kernels support only some head widths; None without GPUs.
    For families without facts, as in descriptions made from other systems' profiles, no obstacle is known.
    """
    return next(_context_obstacles(model, attention, compile, on_gpu), None)


def ring_obstacle(model: Model, attention: Attention) -> Obstacle | None:
    """Return why ring attention does not support a model with an attention kernel, or None if it does.

    Obstacles of single layer types, such as a window, are found by `misfit`.
    """
    return next(_ring_obstacles(model, attention), None)


def plan_obstacle(plan: Plan) -> Obstacle | None:
    """Return the first feature of a plan's context parallelism that the runtime does not support, or None."""
    if not any(axes_of(strategy).shares_context for strategy in (plan.embedding, *plan.layers, plan.head)):
        return None
    on_gpu = gpu_format(plan.precision, plan.cluster)
    obstacle = context_obstacle(plan.model, plan.attention, plan.compile, on_gpu)
    rings = any(layer.context is ContextParallel.RING for layer in plan.layers)
    return ring_obstacle(plan.model, plan.attention) if obstacle is None and rings else obstacle


def _context_obstacles(model: Model, attention: Attention, compile: bool, on_gpu: str | None) -> Iterator[Obstacle]:
    if attention is Attention.FLASH_ATTENTION_2:
        yield Obstacle(f"attention {attention} {WITHOUT_FLASH}", "use auto, sdpa or eager")
    if attention is Attention.SDPA_CUDNN:
        yield Obstacle(f"attention {attention} {WITHOUT_FLASH}", "use sdpa_flash, which computes all attention")
    if compile:
        problem = "compile: blocks that attend to positions of other ranks (cp_size) are not compiled"
        yield Obstacle(problem, "leave it out")
    if (facts := FAMILIES.get(model.family)) is None:
        return
    key = facts.dropouts.attention
    if facts.configured(model.config).get(key):
        problem = f"cp_size above 1 drops nothing inside attention, for which {key} has a rate"
        yield Obstacle(problem, f"describe the model with {key} 0, or split positions by sequence_parallel")
    if facts.joined_by is not None:
        problem = "cp_size above 1 is not for images among a text, which keep their order"
        yield Obstacle(problem, "use sequence_parallel")
    multiple = _MULTIPLES.get(on_gpu or "", 1)
    if attention is not Attention.EAGER and (odd := _odd_heads(model, facts, multiple)) is not None:
        problem = f"cp_size above 1 attends in {on_gpu} on a GPU with heads of a multiple of {multiple} features"
        yield Obstacle(f"{problem}, the model's have {odd}", "split positions by sequence_parallel")


def _odd_heads(model: Model, facts: Family, multiple: int) -> int | None:
    """Return the first head width that the kernels which attend block by block do not support, or None.

    These kernels are used with masks that a kernel creates itself; attention that adds anything else to scores is
    computed as on one rank.
    """
    if facts.attention.mask not in _RING_MASKS or facts.attention.sinks:
        return None
    attended = (region.attention for kind in model.types.values() for region in kind.regions)
    heads = (each for each in attended if each is not None and each.window is None and not each.alibi)
    # Keys and values are padded to equal width first.
    widest = (max(each.head_features, each.features_of_values) for each in heads)
    return next((features for features in widest if features % multiple), None)


def _ring_obstacles(model: Model, attention: Attention) -> Iterator[Obstacle]:
    facts = FAMILIES.get(model.family)
    if facts is not None and facts.attention.mask not in _RING_MASKS:
        yield _no_ring(f"adds no {facts.attention.mask} to scores, as {model.family} models do")
    if attention is Attention.EAGER or (facts is not None and Attention.SDPA not in facts.kernels):
        yield _no_ring("computes only with the kernels of sdpa")
    heads = (region.attention for kind in model.types.values() for region in kind.regions)
    if any(each is not None and each.keys != each.queries for each in heads):
        yield _no_ring("attends to no other sequence than the queries'")


def _no_ring(lack: str) -> Obstacle:
    return Obstacle(f"context ring {lack}", "use gather")


# The kinds of recomputation that the word `parts` stands for, which depend on a model's attention.


def recompute_kinds(asked: RecomputeChoice, model: Model) -> tuple[Recompute, ...]:
    """Return the requested kinds of recomputation, which are listed or given by the word `parts`.

    For that word, sets with latents are only included if the model has latents. Raises BadInput if the parts of the
    model's blocks are not known.
    """
    if asked != PARTS:
        return asked
    facts = FAMILIES.get(model.family)
    if facts is None:
        problem = f"recompute {PARTS}: parts of {model.family} blocks are not known"
        raise BadInput(f"model {model.name}", problem, "list kinds such as none and full")
    latents = facts.attention.latents(facts.configured(model.config)) is not None
    return tuple(kind for kind in RECOMPUTE_PARTS if latents or RecomputedPart.LATENTS not in kind.parts)
