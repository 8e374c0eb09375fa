"""Model chunks: the layers of each chunk, and the tensors sent between chunks."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from shardwright.plan.axes import Layout, layout_of
from shardwright.plan.layout import Transfer, parameter_groups, redistribution_plan
from shardwright.plan.schedules.passes import Action, Pass
from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import EMBEDDING, HEAD, BoundaryTensor, DataParallel, Plan, Schedule, Strategy


def chunk_layers(plan: Plan, stage: int, chunk: int) -> Iterator[tuple[str, str, Strategy]]:
    """Yield name, type and strategy of each layer of a model chunk, embedding and head included, in order."""
    way = plan.way
    if (stage, chunk) == way[0]:
        yield EMBEDDING, EMBEDDING, plan.embedding
    low, high = plan.stages[stage].layers[chunk]
    for i in range(low, high):
        yield f"layers[{i}]", plan.layers[i].type, plan.layers[i]
    if (stage, chunk) == way[-1]:
        yield HEAD, HEAD, plan.head


def placed(ranges: Sequence[tuple[int, int]], schedule: Schedule, pp_size: int) -> list[tuple[tuple[int, int], ...]]:
    """Return each stage's layer ranges; `ranges`: all ranges, in the order in which a micro-batch goes through them."""
    held: list[list[tuple[int, int]]] = [[] for _ in range(pp_size)]
    for (stage, _), layers in zip(schedule.way(pp_size, len(ranges) // pp_size), ranges, strict=True):
        held[stage].append(layers)
    return list(map(tuple, held))


def stage_actions(plan: Plan, stage: int) -> tuple[Action, ...]:
    """Return a pipeline stage's actions in one step, in order."""
    stages, schedule = plan.stages, schedule_of(plan.schedule)
    return schedule.actions(len(stages), plan.num_microbatches, stage, len(stages[stage].layers))


def needs_gradient(plan: Plan, stage: int, chunk: int) -> bool:
    """Return whether a chunk's backward pass sends a gradient to the chunk before: something before it is trained."""
    if (stage, chunk) == plan.way[0]:
        return False
    first, _ = plan.stages[stage].layers[chunk]
    return plan.model.types[plan.layers[first - 1].type if first else EMBEDDING].has_backward


def has_backward(plan: Plan, stage: int, chunk: int) -> bool:
    """Return whether a backward pass goes through a model chunk."""
    kinds = (kind for _, kind, _ in chunk_layers(plan, stage, chunk))
    return needs_gradient(plan, stage, chunk) or any(plan.model.types[kind].has_backward for kind in kinds)


def computed_actions(plan: Plan, stage: int) -> tuple[Action, ...]:
    """Return a pipeline stage's actions, except for backward passes of chunks through which no gradient goes."""
    backward = [has_backward(plan, stage, chunk) for chunk in range(len(plan.stages[stage].layers))]
    return tuple(a for a in stage_actions(plan, stage) if backward[a.chunk] or not a.kind.makes_gradients)


class Cut(NamedTuple):
    """The boundary that a micro-batch crosses from one model chunk to the next.

    If both chunks are on the same pipeline stage, no message is sent. Chunks are (stage, index of the layer range on
    the stage). Point-to-point messages follow `redistribution_plan(before, after)` in the forward pass, and
    `redistribution_plan(after, before)` in the backward pass.
    """

    source: tuple[int, int]
    target: tuple[int, int]
    before: Layout
    """Layout in which the source's last layer leaves its output and receives the output's gradient."""
    after: Layout
    """Layout in which the target receives the tensors. If both stages have the same number of ranks, it is `before`,
    and the target redistributes them; otherwise it is the layout of the target's first layer."""
    tensors: tuple[BoundaryTensor, ...]
    """Tensors that cross the cut: the input of the target's first layer."""

    @property
    def around(self) -> bool:
        """Return whether the cut leads back to an earlier pipeline stage (interleaved and V-shaped schedules)."""
        return self.source[0] > self.target[0]

    @property
    def is_local(self) -> bool:
        """Return whether both chunks are on the same pipeline stage, so that ranks pass tensors to themselves."""
        return self.source[0] == self.target[0]

    def ways(self, gradient: bool = True) -> tuple[tuple[Pass, tuple[int, int], tuple[int, int]], ...]:
        """Return pass, sender and receiver of each kind of message over the cut; `gradient`: are gradients sent?"""
        ends = {1: (self.source, self.target), -1: (self.target, self.source)}
        kinds = (kind for kind in Pass if kind.way and (gradient or not kind.makes_gradients))
        return tuple((kind, *ends[kind.way]) for kind in kinds)

    def transfers(self, kind: Pass, samples: int, sequence_length: int) -> tuple[Transfer, ...]:
        """Return the transfers over the cut in a pass of `kind`; ranks are counted within their stages."""
        return redistribution_plan(*(self.before, self.after)[:: kind.way], samples, sequence_length)


def cuts(plan: Plan) -> tuple[Cut, ...]:
    """Return all cuts, in the order in which a micro-batch crosses them.

    A chunk without layers passes on its input in the same layout.
    """
    layers = [tuple(chunk_layers(plan, *place)) for place in plan.way]
    crossed, before = list[Cut](), layout_of(plan.embedding)
    for i, (source, target) in enumerate(pairwise(plan.way)):
        before = layout_of(layers[i][-1][2]) if layers[i] else before
        name, _, first = next(layer for there in layers[i + 1 :] for layer in there)
        after = layout_of(first) if layers[i + 1] else before
        received = before if before.stage_size == after.stage_size else after
        crossed.append(Cut(source, target, before, received, plan.model.received_by(name)))
    return tuple(crossed)


def sending_cuts(plan: Plan) -> tuple[Cut, ...]:
    """Return the cuts between different pipeline stages, where messages are sent."""
    return tuple(cut for cut in cuts(plan) if not cut.is_local)


def incoming_layout(plan: Plan, stage: int, chunk: int) -> Layout | None:
    """Return the layout in which a model chunk receives its input; None for the first chunk."""
    return next((cut.after for cut in cuts(plan) if cut.target == (stage, chunk)), None)


def gathers_spared(plan: Plan, stage: int, chunk: int) -> Counter[tuple[str, Pass | bool | None]]:
    """Return how often ZeRO-3 need not gather a layer for a pass of a step, by the layer's name and the pass.

    If a pass begins with the layer with which the rank's previous pass ended, that layer is still gathered.
    """
    layers = list(chunk_layers(plan, stage, chunk))
    actions = [action for action in computed_actions(plan, stage) if action.kind.way]
    pairs = [(a.kind, b.kind) for a, b in pairwise(actions) if a.chunk == b.chunk == chunk]
    spared: Counter[tuple[str, Pass | bool | None]] = Counter()
    ends = {kind: layers[0 if kind.way > 0 else -1] for kind in Pass if kind.way and layers}
    for during, (name, kind, strategy) in ends.items():
        # A backward pass ends before the layers through which no gradient goes.
        groups = parameter_groups(plan.model.types[kind], strategy)
        zero3 = any(group.strategy.data_parallel is DataParallel.ZERO3 for group in groups)
        if zero3 and plan.model.types[kind].has_backward:
            spared[name, during] = sum(here is not during is there for here, there in pairs)
    return spared
