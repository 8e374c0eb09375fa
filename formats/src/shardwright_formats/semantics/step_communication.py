"""Every byte that a rank moves in one step of a plan: the formulas of `placement`, put together."""

from collections.abc import Iterator

from shardwright_formats.semantics.communication import (
    Cause,
    Message,
    loss_messages,
    parameter_messages,
    partial_gradient_bytes,
    redistribution_messages,
    region_messages,
)
from shardwright_formats.semantics.layout import Layout, layout_of, parameter_layout
from shardwright_formats.semantics.tied_weights import (
    pieces_from_owners,
    pieces_to_owners,
    ranks_of_replicas,
    tied_parameters,
)
from shardwright_formats.types.hardware_profile import Collective
from shardwright_formats.types.model import EMBEDDING, HEAD
from shardwright_formats.types.plan import ITEMSIZE, GradientReduction, Plan
from shardwright_formats.types.strategy import Strategy

__all__ = ["chunk_layers", "incoming_layout", "step_messages"]

_NORM_BYTES = 3 * 8
"""Loss, squared gradient norm and the wish to stop, in float64."""


def chunk_layers(plan: Plan, stage: int, chunk: int) -> Iterator[tuple[str, str, Strategy]]:
    """Name, type and strategy of what one range of layers of a pipeline stage holds, in order."""
    if stage == chunk == 0:
        yield EMBEDDING, EMBEDDING, plan.embedding
    low, high = plan.stages[stage].layers[chunk]
    for i in range(low, high):
        yield f"layers[{i}]", plan.layers[i].type, plan.layers[i]
    if stage == len(plan.stages) - 1 and chunk == len(plan.stages[stage].layers) - 1:
        yield HEAD, HEAD, plan.head


def incoming_layout(plan: Plan, stage: int, chunk: int) -> Layout | None:
    """The layout in which a range of layers receives its input: that of the layer before it; None on the first."""
    if stage == chunk == 0:
        return None
    first = plan.stages[stage].layers[chunk][0]
    return layout_of(plan.layers[first - 1] if first > 0 else plan.embedding)


def step_messages(plan: Plan, rank: int) -> tuple[Message, ...]:
    """What one rank takes part in during one step; sends are counted by the sender."""
    stage = plan.stage_of_rank(rank)
    found: list[Message] = []
    for chunk in range(len(plan.stages[stage].layers)):
        found += _chunk_messages(plan, rank, stage, chunk)
    found += _partial_sums(plan, rank, stage)
    found += _tied(plan, rank)
    if plan.world_size > 1:
        found.append(Message(Cause.NORM, Collective.ALL_REDUCE, plan.world_size, _NORM_BYTES))
    return tuple(found)


def _chunk_messages(plan: Plan, rank: int, stage: int, chunk: int) -> Iterator[Message]:
    me = plan.stages[stage].ranks.index(rank)
    model, samples, microbatches = plan.model, plan.microbatch_samples, plan.num_microbatches
    compute, reduce = ITEMSIZE[plan.precision.compute], ITEMSIZE[plan.precision.reduce]
    every = plan.gradient_reduction is GradientReduction.EVERY_MICROBATCH
    current = incoming_layout(plan, stage, chunk)
    if current is not None:
        yield from _sends(plan, current, me)
    elements = list(chunk_layers(plan, stage, chunk))
    for name, type_name, strategy in elements:
        kind, wanted = model.types[type_name], layout_of(strategy)
        if current is not None:
            yield from redistribution_messages(model.boundary, current, wanted, me, samples, compute, microbatches)
        current = wanted
        yield from parameter_messages(kind, strategy, compute, reduce, microbatches, every)
        yield from region_messages(model, type_name, strategy, samples, compute, microbatches)
        if name == HEAD:
            yield from loss_messages(kind, strategy, samples, compute, microbatches)
    if current is not None and (not elements or elements[-1][0] != HEAD):
        yield from _sends(plan, current, me)


def _sends(plan: Plan, layout: Layout, me: int) -> Iterator[Message]:
    """What goes to the next stage forward, or to the one before backward: as much either way."""
    for tensor in plan.model.boundary:
        part = layout.activation_shard(me, plan.microbatch_samples, tensor.sequence_length)
        size = part.tokens * tensor.features * ITEMSIZE[plan.precision.compute]
        yield Message(Cause.PIPELINE, Collective.P2P, 2, size, plan.num_microbatches)


def _partial_sums(plan: Plan, rank: int, stage: int) -> Iterator[Message]:
    """One message for each tensor-parallel grid that the stage's layers lie on."""
    me = plan.stages[stage].ranks.index(rank)
    sizes: dict[Layout, int] = {}
    for chunk in range(len(plan.stages[stage].layers)):
        for _, type_name, strategy in chunk_layers(plan, stage, chunk):
            stored = ITEMSIZE[plan.precision.parameters]
            size = partial_gradient_bytes(plan.model.types[type_name], strategy, me, stored)
            layout = parameter_layout(strategy)
            sizes[layout] = sizes.get(layout, 0) + size
    for layout, size in sizes.items():
        if size:
            yield Message(Cause.PARTIAL_GRADIENTS, Collective.ALL_REDUCE, layout.tp_size, size)


def _tied(plan: Plan, rank: int) -> Iterator[Message]:
    tied = tied_parameters(plan)
    members = ranks_of_replicas(tied)
    if rank in members:
        stored = ITEMSIZE[plan.precision.parameters]
        for pieces in (pieces_to_owners(tied), pieces_from_owners(tied)):
            sent = sum(p.numel for p in pieces if p.source == rank != p.target)
            yield Message(Cause.TIED_PARAMETERS, Collective.ALL_TO_ALL, len(members), sent * stored)
