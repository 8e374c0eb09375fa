"""A rank's place in the pipeline, and the messages to and from the neighbouring pipeline stages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from shardwright_formats.semantics.chunks import incoming_layout
from shardwright_formats.semantics.schedule import Action, Pass, actions
from shardwright_train.pipeline.layer import RankContext

__all__ = ["InTransit", "Neighbour", "Pipeline"]


@dataclass(frozen=True)
class Neighbour:
    """Whom a chunk exchanges messages with on one side, and over which groups."""

    rank: int
    chunk: int
    """The neighbour's own."""
    order: Mapping[Action, int]
    """When the neighbour does what."""
    groups: Mapping[Pass, dist.ProcessGroup]
    """What carries the messages of forward and of backward passes."""


@dataclass(frozen=True)
class Pipeline:
    """A rank's place in the pipeline: for each of its chunks the neighbours and the shapes of what comes in.

    Sends go forward and backward over a group each, and asynchronously, so that no two ranks ever wait for each
    other's send (with one NCCL communicator for both directions 1F1B would). Rank j of a stage sends to rank j of the
    next; interleaved, the last stage sends to the first over groups of their own.
    """

    context: RankContext
    previous: tuple[Neighbour | None, ...]
    next: tuple[Neighbour | None, ...]
    input_shapes: tuple[tuple[tuple[int, int, int], ...], ...]

    @classmethod
    def of(cls, context: RankContext) -> "Pipeline":
        """The place of a rank under a plan."""
        chunks = range(len(context.plan.stages[context.stage_index].layers))
        return cls(
            context,
            previous=tuple(_neighbour(context, chunk, -1) for chunk in chunks),
            next=tuple(_neighbour(context, chunk, 1) for chunk in chunks),
            input_shapes=tuple(_input_shapes(context, chunk) for chunk in chunks),
        )

    def actions(self) -> tuple[Action, ...]:
        """What this rank does in a step, in order."""
        plan = self.context.plan
        return actions(
            plan.schedule, len(plan.stages), plan.num_microbatches, self.context.stage_index, len(self.previous)
        )


def _neighbour(context: RankContext, chunk: int, step: int) -> Neighbour | None:
    plan, there = context.plan, context.stage_index + step
    column = tuple(stage.ranks[context.me] for stage in plan.stages)
    chunks = len(plan.stages[context.stage_index].layers)
    around = there not in range(len(column))
    if around and chunk + step not in range(chunks):
        return None
    there, suffix = there % len(column), " around" if around else ""
    todo = actions(plan.schedule, len(column), plan.num_microbatches, there, chunks)
    return Neighbour(
        rank=column[there],
        chunk=chunk + step if around else chunk,
        order={action: i for i, action in enumerate(todo)},
        groups={kind: context.groups.among(kind.value + suffix, column) for kind in Pass},
    )


def _input_shapes(context: RankContext, chunk: int) -> tuple[tuple[int, int, int], ...]:
    plan = context.plan
    layout = incoming_layout(plan, context.stage_index, chunk)
    if layout is None:
        return ()
    shards = (
        (layout.activation_shard(context.me, plan.microbatch_samples, tensor.sequence_length), tensor.features)
        for tensor in plan.model.boundary
    )
    return tuple((s.batch_end - s.batch_start, s.sequence_end - s.sequence_start, features) for s, features in shards)


class _Sent(NamedTuple):
    """A message on its way; its tensor's memory must not be used again before it has gone."""

    rank: int
    taken_at: int
    """Number of the receiver's action that takes it."""
    work: dist.Work
    tensor: Tensor


@dataclass
class InTransit:
    """The messages that a rank has sent and that are not yet known to be taken."""

    sends: list[_Sent] = field(default_factory=list)

    def send(self, x: Tensor, to: Neighbour, action: Action) -> None:
        """Send what a neighbour's action needs."""
        x = x.contiguous()
        work = dist.isend(x, to.rank, group=to.groups[action.kind])
        assert work is not None
        self.sends.append(_Sent(to.rank, to.order[action], work, x))

    def receive(self, x: Tensor, source: Neighbour, action: Action) -> None:
        """Wait for what a neighbour's action made, which also tells that it has taken all messages up to there.

        Gloo does not say of a message whether it has gone, other than by waiting for it.
        """
        dist.recv(x, source.rank, group=source.groups[action.kind])
        done = source.order[action]
        taken = [sent for sent in self.sends if sent.rank == source.rank and sent.taken_at <= done]
        self.sends = [sent for sent in self.sends if not (sent.rank == source.rank and sent.taken_at <= done)]
        for sent in taken:
            sent.work.wait()

    def wait(self) -> None:
        """Wait until all have gone."""
        for sent in self.sends:
            sent.work.wait()
