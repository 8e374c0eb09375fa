"""A rank's place in the pipeline, and the messages to and from the neighbouring pipeline stages."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import ge
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.plan.chunks import Cut, cuts, needs_gradient, stage_actions
from shardwright.plan.schedules.passes import Action, Pass
from shardwright_train.parallel.collectives import Window, window
from shardwright_train.parallel.data import torch_dtype
from shardwright_train.pipeline.layer import RankContext

_ADDS = 2
"""Number of backward passes of a chunk until one adds to existing gradients."""


class TensorPiece(NamedTuple):
    """The piece of a tensor that one other rank sends or receives."""

    rank: int
    group: dist.ProcessGroup | None
    """Group of the two ranks, for only this direction; None if the other rank is absent, and nothing is sent."""
    window: Window


@dataclass(frozen=True)
class Port:
    """A connection through which one pass's messages enter or leave a model chunk of this rank."""

    there: tuple[int, int]
    """Pipeline stage and chunk number at the other side of the cut."""
    order: Mapping[Action, int]
    """Index of each action in the list of actions of the ranks at the other side."""
    shapes: tuple[tuple[int, int, int], ...]
    """Shape of this rank's part of each tensor [samples, positions, features]."""
    pieces: tuple[tuple[TensorPiece, ...], ...]
    """Pieces that other ranks send or receive of each tensor."""


class Handover(NamedTuple):
    """A connection between two chunks of this rank: the outputs of one are the inputs of the other."""

    chunk: int
    """The chunk at the other side of the cut."""


Connection = Port | Handover


@dataclass(frozen=True)
class Pipeline:
    """A rank's place in the pipeline: the source and destination of its chunks' messages, by pass and chunk.

    Every pair of ranks has a separate process group for each direction and, with several chunks, another one for the
    way around from the last stage to the first. So no message waits for a message of another kind: NCCL runs the
    operations of one communicator in order, and two ranks that send to each other over the same one would deadlock.
    """

    context: RankContext
    incoming: Mapping[tuple[Pass, int], Connection]
    outgoing: Mapping[tuple[Pass, int], Connection]

    @classmethod
    def of_rank(cls, context: RankContext) -> "Pipeline":
        """Return a rank's place in the pipeline; no gradients are sent back if nothing before a cut is trained."""
        incoming, outgoing = dict[tuple[Pass, int], Connection](), dict[tuple[Pass, int], Connection]()
        for cut in cuts(context.plan):
            for kind, source, target in cut.ways(needs_gradient(context.plan, *cut.target)):
                if source[0] == context.stage_index:
                    outgoing[kind, source[1]] = _connection(context, cut, kind, target, sends=True)
                if target[0] == context.stage_index:
                    incoming[kind, target[1]] = _connection(context, cut, kind, source, sends=False)
        return cls(context, incoming, outgoing)

    def actions(self) -> tuple[Action, ...]:
        """Return this rank's actions in a step, in order."""
        return stage_actions(self.context.plan, self.context.stage_index)


@dataclass(frozen=True)
class StageAlone(Pipeline):
    """A rank's place in a simulated pipeline: the inputs and gradients it receives have shapes, but no values."""

    @classmethod
    def of_pipeline(cls, pipeline: Pipeline) -> "StageAlone":
        """Return a rank's place in a pipeline, with connections that neither send nor receive."""
        incoming, outgoing = (
            {key: port if isinstance(port, Handover) else _cut_off(port) for key, port in ports.items()}
            for ports in (pipeline.incoming, pipeline.outgoing)
        )
        return cls(pipeline.context, incoming, outgoing)

    def actions(self) -> tuple[Action, ...]:
        """Return the rank's actions in a step, shortened to those that reach its peak memory."""
        return until_fullest(super().actions())


def _connection(context: RankContext, cut: Cut, kind: Pass, there: tuple[int, int], sends: bool) -> Connection:
    plan, me = context.plan, context.me
    if cut.is_local:
        return Handover(there[1])
    layout = cut.before if sends is (kind.way > 0) else cut.after
    ranks = plan.stages[there[0]].ranks
    shapes, pieces = [], []
    for tensor in cut.tensors:
        size = plan.microbatch_samples, tensor.sequence_length
        shard = layout.activation_shard(me, *size)
        shapes.append((shard.batch_end - shard.batch_start, shard.sequence_end - shard.sequence_start, tensor.features))
        exchanged = []
        for source, target, piece in cut.transfers(kind, *size):
            mine, other = (source, target) if sends else (target, source)
            if mine == me:
                pair = (context.rank, ranks[other]) if sends else (ranks[other], context.rank)
                group = context.groups.edge(kind, cut.around, pair)
                exchanged.append(TensorPiece(ranks[other], group, window(piece, shard)))
        pieces.append(tuple(exchanged))
    order = {action: i for i, action in enumerate(stage_actions(plan, there[0]))}
    return Port(there, order, tuple(shapes), tuple(pieces))


class _Sent(NamedTuple):
    """A message being sent; its tensor's memory must not be reused before it is sent."""

    stage: int
    taken_at: int
    """Index of the receiver's action that receives the message."""
    work: dist.Work | None
    tensor: Tensor

    def wait(self) -> None:
        """Wait until the message is sent."""
        if self.work is not None:
            self.work.wait()


class _Expected(NamedTuple):
    """A piece that is being received into a separate tensor, or in place if the place is contiguous."""

    target: Tensor
    buffer: Tensor
    work: dist.Work


@dataclass
class Messages:
    """The messages of a step: pending receives, sends not yet known to be received, and handovers between chunks."""

    pipeline: Pipeline
    expected: dict[Action, tuple[list[Tensor], list[_Expected]]] = field(default_factory=dict)
    sends: list[_Sent] = field(default_factory=list)
    handed: dict[Action, list[Tensor]] = field(default_factory=dict)

    def expect(self, action: Action) -> None:
        """Start to receive an action's inputs; called when the previous action begins, so that both overlap."""
        port = self.pipeline.incoming.get((action.kind, action.chunk))
        if isinstance(port, Port):
            context = self.pipeline.context
            dtype = torch_dtype(context.plan.precision.compute)
            tensors = [torch.empty(shape, dtype=dtype, device=context.device) for shape in port.shapes]
            self.expected[action] = tensors, list(_receives(tensors, port))

    def received(self, action: Action) -> list[Tensor]:
        """Wait for an action's inputs and return them; there are none at the ends of the model.

        Their arrival also shows that the neighbours have received all messages up to the action that sent them. Gloo
        can only tell that a message is sent by waiting for it.
        """
        port = self.pipeline.incoming.get((action.kind, action.chunk))
        if port is None:
            return []
        if isinstance(port, Handover):
            return self.handed.pop(action)
        tensors, coming = self.expected.pop(action)
        for target, buffer, work in coming:
            work.wait()
            if buffer is not target:
                target.copy_(buffer)
        stage, chunk = port.there
        # The neighbour runs its actions in order: its message proves that it has received all that precedes it, so
        # waiting for these sends costs nothing and frees their memory.
        done = port.order[action._replace(chunk=chunk)]
        before, self.sends = self.sends, []
        for sent in before:
            if sent.stage == stage and sent.taken_at <= done:
                sent.wait()
            else:
                self.sends.append(sent)
        return tensors

    def send(self, tensors: Sequence[Tensor], action: Action) -> None:
        """Send the outputs of an action."""
        port = self.pipeline.outgoing[action.kind, action.chunk]
        if isinstance(port, Handover):
            self.handed[action._replace(chunk=port.chunk)] = list(tensors)
            return
        stage, chunk = port.there
        taken_at = port.order[action._replace(chunk=chunk)]
        for x, pieces in zip(tensors, port.pieces, strict=True):
            for piece in pieces:
                part = x[piece.window].contiguous()
                work = None if piece.group is None else dist.isend(part, piece.rank, group=piece.group)
                self.sends.append(_Sent(stage, taken_at, work, part))

    def send_after_the_last(self, tensors: Sequence[Tensor], action: Action) -> None:
        """Send outputs, and wait for all earlier sends unless later messages will confirm that they were received.

        For steps in which this stage runs only forward passes. The receivers have already begun to receive the earlier
        sends, as no rank is two actions ahead of the next one. In a V the receiver also sends outputs here, which
        confirm them.
        """
        port = self.pipeline.outgoing[action.kind, action.chunk]
        coming = (other for (kind, _), other in self.pipeline.incoming.items() if kind is Pass.FORWARD)
        if isinstance(port, Handover) or any(
            isinstance(other, Port) and other.there[0] == port.there[0] for other in coming
        ):
            self.send(tensors, action)
            return
        before, self.sends = self.sends, []
        self.send(tensors, action)
        for sent in before:
            sent.wait()

    def wait(self) -> None:
        """Wait until all messages are sent."""
        for sent in self.sends:
            sent.wait()


def _receives(tensors: Sequence[Tensor], port: Port) -> Iterator[_Expected]:
    for x, pieces in zip(tensors, port.pieces, strict=True):
        for piece in pieces:
            if piece.group is None:
                continue
            target = x[piece.window]
            # Collectives and sends need contiguous memory; part of a sequence dimension is not.
            buffer = (
                target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
            )
            work = dist.irecv(buffer, piece.rank, group=piece.group)
            assert work is not None
            yield _Expected(target, buffer, work)


def until_fullest(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return a stage's actions for the first microbatches, as many as it takes to reach the peak memory of a step.

    These are the microbatches that begin before every chunk has added to existing gradients. From then on each forward
    pass reuses memory that a backward pass has freed, so the peak no longer grows. One more microbatch begins than is
    added, because the very last backward pass reduces gradients instead of adding them. With weight passes the peak
    grows until the last of the fullest moments (`most_held`), and one more microbatch must begin after it, because the
    gradients of the last microbatch are not added to any.
    """
    chunks, gone, begun = {action.chunk for action in actions}, dict[tuple[Pass, int], int](), set[int]()
    making = {action.kind for action in actions if action.kind.makes_gradients}
    left = set(most_held(actions)) if Pass.WEIGHT in making else set()
    fullest = 0
    for (kind, microbatch, chunk), held in zip(actions, _held(actions), strict=True):
        begun.add(microbatch)
        gone[kind, chunk] = gone.get((kind, chunk), 0) + 1
        left.discard(held)
        is_added = all(gone.get((each, there), 0) >= _ADDS for each in making for there in chunks)
        if len(begun) > _ADDS and is_added and not left:
            fullest = fullest or len(begun) + (Pass.WEIGHT in making)
            if len(begun) >= fullest:
                break
    return tuple(action for action in actions if action.microbatch in begun)


_Held = tuple[int, ...]
"""What a stage with weight passes holds, three numbers for each chunk: microbatches whose backward pass is due,
microbatches whose weight pass is due, and whether gradients exist."""


def _held(actions: Sequence[Action]) -> Iterator[_Held]:
    """Yield what a stage holds after each action."""
    chunks = sorted({action.chunk for action in actions})
    done = Counter[tuple[Pass, int]]()
    for action in actions:
        done[action.kind, action.chunk] += 1
        counts = [[done[kind, chunk] for kind in Pass] for chunk in chunks]
        yield tuple(n for f, b, w in counts for n in (f - b, b - w, w > 0))


def most_held(actions: Sequence[Action]) -> frozenset[_Held]:
    """Return what a stage with weight passes holds at its fullest moments: no other holds as much in every number."""
    held = set(_held(actions))
    return frozenset(each for each in held if not any(more != each and all(map(ge, more, each)) for more in held))


def holds_as_much(actions: Sequence[Action], whole: Sequence[Action]) -> bool:
    """Return whether, for each moment of a whole step, some moment of `actions` holds at least as much of all."""
    held = most_held(actions)
    return all(any(all(map(ge, more, each)) for more in held) for each in most_held(whole))


def _cut_off(port: Port) -> Port:
    """Return the port with messages that are not sent, but occupy memory as real ones do."""
    return replace(port, pieces=tuple(tuple(piece._replace(group=None) for piece in pieces) for pieces in port.pieces))
