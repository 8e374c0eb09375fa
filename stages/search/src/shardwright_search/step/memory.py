"""The memory of a pipeline stage: one recurrence over its layers, for a plan's numbers and for columns of labels alike.

In a phase with k microbatches in flight a stage holds its state, (k - 1) times its activations, and the most that one
more microbatch holds on its way: while layer j works, the activations of the layers up to j, j's workspace, and the
gradients. These are the gradients of all layers, or in the first backward pass those of the layers from j on. If sums
of earlier microbatches' gradients are kept in addition to the gradients that a backward pass makes, all sums exist from
the second backward pass on, and that pass makes its own gradients layer by layer. In addition the stage holds what it
received of each microbatch in flight, what it is receiving for the next pass (taken to be as large), and the gradients
of one microbatch's inputs and outputs.

For a stage with several chunks the action list is walked. A chunk's gradients are made by its first backward pass,
layer by layer. While a microbatch is on its way through a chunk, the most that it holds there comes on top of the
activations and gradients that all chunks hold. The runtime frees an output when a message of the next stage shows that
it was received, or when the next chunk of the same stage takes it for its input; so it is counted for several chunks.
For a stage with one chunk, outputs are counted until their backward pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shardwright.plan.schedules.passes import Pass
from shardwright.plan.schedules.schedule import PipelineSchedule
from shardwright.types import Model
from shardwright_search.step.pareto import Ints, Numbers


class Phase(NamedTuple):
    """A part of a step in which a pipeline stage may hold the most."""

    in_flight: int
    late: bool = False
    """True if the gradients of this backward pass are made layer by layer, and do not all exist from its start."""
    summed: bool = True
    """True if gradients of earlier backward passes exist, summed in place or separately from the last gradients."""


def phases(in_flight: int, num_microbatches: int, keeps_sums: bool = False) -> tuple[Phase, ...]:
    """Return the phases in which a stage's memory may be at its peak; `keeps_sums`: some layer keeps gradient sums.

    If all microbatches are in flight before the first backward pass, that pass has them all but makes the gradients
    only now; the passes after it have one less. With one microbatch more, one forward pass runs while the gradients of
    the first backward pass are held; with still more, forward passes run while sums and the last gradients are held.
    """
    if in_flight == num_microbatches:
        first = Phase(in_flight, late=True, summed=False)
        return (first,) if in_flight == 1 else (first, Phase(in_flight - 1, late=keeps_sums))
    if keeps_sums and in_flight == num_microbatches - 1:
        return Phase(in_flight, summed=False), Phase(in_flight, late=True)
    return (Phase(in_flight),)


def min_phases(in_flight: int, num_microbatches: int, keeps_sums: bool) -> tuple[Phase, ...]:
    """Return phases whose memory every stage with this many micro-batches in flight, or more, reaches or exceeds."""
    if in_flight == num_microbatches:
        return phases(in_flight, num_microbatches, keeps_sums)
    return (Phase(in_flight, late=keeps_sums),)


class LayerMemory(NamedTuple):
    """Bytes of a layer [options, phases]."""

    static: Numbers
    """Bytes all phase long."""
    late: Numbers
    """Bytes from the layer's own pass on."""
    activation: Numbers
    """Activations of the microbatch on its way."""
    workspace: Numbers
    """Bytes in the layer's forward or backward pass."""

    def take(self, rows: Ints | int) -> "LayerMemory":
        """Return the options in these rows."""
        return LayerMemory._make(column[rows] for column in self)


def layer_memory(
    parts: Sequence[Phase],
    state: ArrayLike,
    gradients: ArrayLike,
    sums: ArrayLike,
    activation: ArrayLike,
    workspace: ArrayLike,
) -> LayerMemory:
    """Return the memory of a layer, or of each of its options, from the bytes of each kind.

    If `sums` is 0, the gradients are made only once, in the first backward pass.
    """
    kinds = (state, gradients, sums, activation, workspace)
    states, made, before, kept, working = (np.asarray(kind, float)[..., None] for kind in kinds)
    others = np.array([phase.in_flight - 1.0 for phase in parts])
    comes, summed = (np.array(flags) for flags in zip(*((p.late, p.summed) for p in parts), strict=True))
    late = made * (comes & (~summed | (before > 0)))
    return LayerMemory(states + others * kept + before * summed + made - late, late, kept, working)


class StageMemory(NamedTuple):
    """Bytes of a stage's layers so far [labels, phases]."""

    resident: Numbers
    """Bytes at the end, the activations of the last microbatch included."""
    peak: Numbers
    """The most so far, with the late gradients."""

    def take(self, rows: Ints | int) -> "StageMemory":
        """Return the labels in these rows."""
        return StageMemory(self.resident[rows], self.peak[rows])

    def then(self, layer: LayerMemory) -> "StageMemory":
        """Return the memory with one more layer at the end."""
        working = self.resident + layer.activation + layer.workspace
        resident = self.resident + layer.static + layer.activation
        return StageMemory(resident, layer.static + layer.late + np.maximum(self.peak, working))


def no_layers(parts: Sequence[Phase], received: ArrayLike) -> StageMemory:
    """Return the memory before the first layer: the received inputs of the micro-batches in flight.

    The inputs count twice more: for the gradient of one, and for what is received for the next pass.
    """
    resident = np.asarray(received, float)[..., None] * np.array([phase.in_flight + 2.0 for phase in parts])
    return StageMemory(resident, resident)


def frees_outputs(model: Model) -> bool:
    """Return whether an output's memory can be freed once it was sent.

    A layer that passes on several tensors may pass on one that its stage received and keeps.
    """
    return len(model.boundary) == 1


class PassCounts(NamedTuple):
    """A pass of a stage, and the stage's memory during it."""

    kind: Pass
    chunk: int
    """The chunk that is worked on."""
    in_flight: tuple[int, ...]
    """Microbatches by chunk whose activations are held, without the one on its way."""
    deferred: tuple[int, ...]
    """Microbatches by chunk of which a pass after the backward pass still needs something."""
    freed: tuple[int, ...]
    """Microbatches among these by chunk whose outputs the next stage is known to have received."""
    made: tuple[bool, ...]
    """True for each chunk whose gradients exist, because it has been through a backward pass before."""
    makes: bool
    """True in the first backward pass of the chunk worked on."""
    unreceived: tuple[int, ...]
    """Gradients by chunk that were sent and are not known to be received, if backward passes are split."""


def pass_counts(
    schedule: PipelineSchedule, num_stages: int, num_microbatches: int, stage: int, num_chunks: int
) -> Iterator[PassCounts]:
    """Yield the counts at every action of a stage, in order."""
    ways = (1, -1) if schedule.name.splits else (1,)
    here = schedule.actions(num_stages, num_microbatches, stage, num_chunks)
    sides = _sides(schedule, num_stages, num_microbatches, stage, num_chunks, ways)
    made, unread = [False] * num_chunks, {way: [0] * num_chunks for way in (1, -1)}
    kept = {kind.needs: [0] * num_chunks for kind in schedule.kinds if kind.needs is not None}
    in_flight, later = kept[Pass.FORWARD], [counts for needs, counts in kept.items() if needs != Pass.FORWARD]
    leaves = [(chunk, 1) in sides for chunk in range(num_chunks)]
    for number, (kind, microbatch, chunk) in enumerate(here):
        if kind.needs is not None:
            kept[kind.needs][chunk] -= 1
        if (side := sides.get((chunk, -kind.way))) is not None:
            # Messages from this stage itself are taken with the action.
            known = number if side.is_own else side.numbers[kind, microbatch, side.chunk]
            for each in side.waiting:
                unread[each.way][each.chunk] -= each.taken_at <= known
            side.waiting[:] = [each for each in side.waiting if each.taken_at > known]
        freed = tuple((count - unread[1][at]) * leaves[at] for at, count in enumerate(in_flight))
        deferred, makes = tuple(map(sum, zip(*later, strict=True))), kind.makes_gradients and not made[chunk]
        yield PassCounts(kind, chunk, tuple(in_flight), deferred, freed, tuple(made), makes, tuple(unread[-1]))
        if kind in kept:
            kept[kind][chunk] += 1
        made[chunk] |= kind.makes_gradients
        if kind.way in ways and (side := sides.get((chunk, kind.way))) is not None:
            side.waiting.append(_Sent(side.numbers[kind, microbatch, side.chunk], kind.way, chunk))
            unread[kind.way][chunk] += 1


class _Sent(NamedTuple):
    """A message that its receiver is not known to have taken."""

    taken_at: int
    """Number of the receiver's action that it is for."""
    way: int
    chunk: int
    """The chunk of the sender."""


class _Side(NamedTuple):
    """A chunk with which a stage's chunk exchanges messages, on another stage or the same one."""

    chunk: int
    is_own: bool
    numbers: Mapping[tuple[Pass, int, int], int]
    """The index of each action (pass, microbatch, chunk) in its stage's action list."""
    waiting: list[_Sent]
    """Messages that its stage is not known to have taken."""


def _sides(
    schedule: PipelineSchedule,
    num_stages: int,
    num_microbatches: int,
    stage: int,
    num_chunks: int,
    ways: Sequence[int],
) -> dict[tuple[int, int], _Side]:
    """Return by chunk and step (1: next, -1: previous) the neighbours on stages that receive messages of these ways."""
    way = schedule.name.way(num_stages, num_chunks)
    index = {place: number for number, place in enumerate(way)}
    ends = ((chunk, step, index[stage, chunk] + step) for chunk in range(num_chunks) for step in (1, -1))
    places = {(chunk, step): way[end] for chunk, step, end in ends if 0 <= end < len(way)}
    receivers = dict.fromkeys(peer for (_, step), (peer, _) in places.items() if step in ways)
    lists = {peer: schedule.actions(num_stages, num_microbatches, peer, num_chunks) for peer in receivers}
    numbers = {
        peer: dict[tuple[Pass, int, int], int]((action, i) for i, action in enumerate(own))
        for peer, own in lists.items()
    }
    waiting = {peer: list[_Sent]() for peer in receivers}
    return {
        at: _Side(chunk, peer == stage, numbers[peer], waiting[peer])
        for at, (peer, chunk) in places.items()
        if peer in receivers
    }


def layer_passes(gradients: ArrayLike, activation: ArrayLike, workspace: ArrayLike) -> LayerMemory:
    """Return a layer's bytes for one micro-batch [options, 2]: in passes that make no gradients, and that make them.

    Parameters, optimizer states and the gradients of earlier passes are not included: they are counted separately.
    """
    made = np.multiply.outer(np.asarray(gradients, float), [0.0, 1.0])
    kept, working = (np.asarray(kind, float)[..., None] for kind in (activation, workspace))
    return LayerMemory(np.zeros_like(made), made, kept, working)
