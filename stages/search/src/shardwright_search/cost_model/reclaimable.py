"""Memory that a rank is observed to use beyond its plan's needs, and that the allocator reclaims when needed.

A search counts what a plan needs. Tensors that messages have used on another stream stay until the host has waited for
these, or until the allocator has no other place.
"""

from collections.abc import Sequence
from math import ceil

from shardwright.estimate.notes import SPARE_SHARE
from shardwright.plan.axes import axes_of
from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import ITEMSIZE, LayerStrategy, Plan, SequenceParallel
from shardwright_search.cost_model.profiles import Profiles

_INPUTS = 2
"""Inputs of a block that tensor-parallel ranks gather: of attention and of the feed-forward part."""
_WAITED_FOR = 2
"""Micro-batches of a pipeline whose inputs are free again when the host has waited for their messages.

Fitted to the given runs of the playbook: of those with 2, 4 and 8 stages, which hold none, a half and three quarters.
"""


def kept_bytes(
    plan: Plan, needed_bytes: Sequence[int], device_bytes: Sequence[int], profiles: Profiles
) -> tuple[int, ...]:
    """Return the bytes of gathered inputs that a rank of each stage holds beyond its needs.

    They are kept while there is room in the part of its device that plans may use by default.
    """
    kept = kept_if_it_fits(plan, profiles)
    room = (int((1 - SPARE_SHARE) * most) - needed for needed, most in zip(needed_bytes, device_bytes, strict=True))
    return tuple(max(0, min(pair)) for pair in zip(kept, room, strict=True))


def kept_if_it_fits(plan: Plan, profiles: Profiles) -> tuple[int, ...]:
    """The bytes that a rank of each stage holds of gathered inputs until their place is needed."""
    if not profiles.held.gathered_inputs:
        return (0,) * len(plan.stages)
    schedule, stages = schedule_of(plan.schedule), len(plan.stages)
    share = 1 - _WAITED_FOR / stages if stages > 1 else 1.0
    return tuple(
        ceil(
            schedule.in_flight(stages, plan.num_microbatches, index)
            * share
            * sum(_gathered_bytes(plan, plan.layers[low:high]) for low, high in stage.layers)
        )
        for index, stage in enumerate(plan.stages)
    )


def _gathered_bytes(plan: Plan, layers: Sequence[LayerStrategy]) -> float:
    """Return the bytes of a micro-batch's full inputs of some layers, beyond the rank's own shard."""
    tensor = plan.model.boundary[-1]
    size = ITEMSIZE[plan.precision.compute] * tensor.features * tensor.sequence_length
    gathered = (layer for layer in layers if layer.sequence_parallel is SequenceParallel.MEGATRON)
    return sum(
        _INPUTS * size * axes_of(layer).rank_samples(plan.microbatch_samples) * (1 - 1 / axes_of(layer).region.size)
        for layer in gathered
    )
