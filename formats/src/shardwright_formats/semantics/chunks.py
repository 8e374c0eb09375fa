"""Model chunks: which layers each has, which one a microbatch goes to next, and how its input lies over the ranks."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from shardwright_formats.semantics.layout import Layout, layout_of
from shardwright_formats.semantics.schedule import Pass, actions
from shardwright_formats.types.model import EMBEDDING, HEAD
from shardwright_formats.types.plan import Plan
from shardwright_formats.types.strategy import DataParallel, Strategy

__all__ = ["chunk_layers", "gathers_spared", "incoming_layout", "next_chunk", "sent_layout"]


def chunk_layers(plan: Plan, stage: int, chunk: int) -> Iterator[tuple[str, str, Strategy]]:
    """Name, type and strategy of each layer of a model chunk, embedding and head included, in order."""
    if stage == chunk == 0:
        yield EMBEDDING, EMBEDDING, plan.embedding
    low, high = plan.stages[stage].layers[chunk]
    for i in range(low, high):
        yield f"layers[{i}]", plan.layers[i].type, plan.layers[i]
    if stage == len(plan.stages) - 1 and chunk == len(plan.stages[stage].layers) - 1:
        yield HEAD, HEAD, plan.head


def next_chunk(plan: Plan, stage: int, chunk: int) -> tuple[int, int] | None:
    """Stage and number of the model chunk that a microbatch goes to next; None behind the last."""
    if stage + 1 < len(plan.stages):
        return stage + 1, chunk
    return (0, chunk + 1) if chunk + 1 < len(plan.stages[stage].layers) else None


def sent_layout(plan: Plan, stage: int, chunk: int) -> Layout | None:
    """The layout in which the layer before a model chunk leaves its output; None before the first chunk."""
    if stage == chunk == 0:
        return None
    first = plan.stages[stage].layers[chunk][0]
    return layout_of(plan.layers[first - 1] if first > 0 else plan.embedding)


def incoming_layout(plan: Plan, stage: int, chunk: int) -> Layout | None:
    """The layout in which a model chunk receives its input; None of the first chunk.

    A stage as wide as the one before receives what was there, rank from rank, and redistributes it; ranks of stages of
    unequal width send the pieces straight to where the chunk's first layer wants them. Either way the messages are
    `redistribution_plan(sent_layout, incoming_layout)` forward and its reverse backward.
    """
    sent = sent_layout(plan, stage, chunk)
    if sent is None or sent.stage_size == len(plan.stages[stage].ranks):
        return sent
    return layout_of(next(strategy for _, _, strategy in chunk_layers(plan, stage, chunk)))


def gathers_spared(plan: Plan, stage: int, chunk: int) -> Counter[tuple[str, Pass | bool | None]]:
    """How often ZeRO-3 need not gather a layer for a pass of a step, by the layer's name and the pass.

    Where a pass begins with the layer that the rank's pass before has ended with, that layer stays gathered.
    """
    layers, chunks = list(chunk_layers(plan, stage, chunk)), len(plan.stages[stage].layers)
    own = actions(plan.schedule, len(plan.stages), plan.num_microbatches, stage, chunks)
    pairs = [(a.kind, b.kind) for a, b in pairwise(own) if a.chunk == b.chunk == chunk]
    found: Counter[tuple[str, Pass | bool | None]] = Counter()
    for during, (name, _, strategy) in zip(Pass, (layers[0], layers[-1]) if layers else (), strict=False):
        if strategy.data_parallel is DataParallel.ZERO3:
            found[name, during] = sum(here is not during is there for here, there in pairs)
    return found
