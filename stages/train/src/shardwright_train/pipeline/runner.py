"""One training step of a rank: its action list, with the messages to and from the neighbouring pipeline stages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright_formats.semantics.communication import incoming_layout
from shardwright_formats.semantics.schedule import Action, Pass, actions
from shardwright_formats.types.plan import GradientReduction, Plan
from shardwright_formats.types.strategy import SequenceParallel
from shardwright_train.measurement.record import MicrobatchChunk, StepHook
from shardwright_train.models.base import Batch, States
from shardwright_train.parallel.data import torch_dtype
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.rng import RNGKey
from shardwright_train.parallel.vocab import IGNORED
from shardwright_train.pipeline.stage import Stage

__all__ = ["Pipeline", "Step", "no_hook", "run_step"]


def no_hook(name: str, at: MicrobatchChunk | None = None) -> None:
    """Record nothing."""


@dataclass(frozen=True)
class _Neighbour:
    """Whom a chunk exchanges messages with on one side, and over which groups."""

    rank: int
    chunk: int
    """The neighbour's own."""
    order: Mapping[Action, int]
    """When the neighbour does what."""
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup

    def over(self, kind: Pass) -> dist.ProcessGroup:
        """The group that carries the messages of forward or of backward passes."""
        return self.forward if kind is Pass.FORWARD else self.backward


@dataclass(frozen=True)
class Pipeline:
    """A rank's place in the pipeline: for each of its chunks the neighbours and the shapes of what comes in.

    Sends go forward and backward over a group each, and asynchronously, so that no two ranks ever wait for each
    other's send (with one NCCL communicator for both directions 1F1B would). Rank j of a stage sends to rank j of the
    next; interleaved, the last stage sends to the first over groups of their own.
    """

    plan: Plan
    index: int
    previous: tuple[_Neighbour | None, ...]
    next: tuple[_Neighbour | None, ...]
    input_shapes: tuple[tuple[tuple[int, int, int], ...], ...]
    device: torch.device

    @classmethod
    def of(cls, plan: Plan, rank: int, groups: Groups, device: torch.device) -> "Pipeline":
        """The place of a rank under a plan."""
        index = plan.stage_of_rank(rank)
        me = plan.stages[index].ranks.index(rank)
        column = tuple(stage.ranks[me] for stage in plan.stages)
        chunks = range(len(plan.stages[index].layers))
        last = len(column) - 1

        def neighbour(chunk: int, step: int) -> _Neighbour | None:
            around = not 0 <= index + step <= last
            if around and chunk + step not in chunks:
                return None
            suffix = " around" if around else ""
            over = (groups.among(direction + suffix, column) for direction in ("forward", "backward"))
            there = (index + step) % len(column)
            todo = actions(plan.schedule, len(column), plan.num_microbatches, there, len(chunks))
            order = {action: i for i, action in enumerate(todo)}
            return _Neighbour(column[there], chunk + step if around else chunk, order, *over)

        def shapes(chunk: int) -> tuple[tuple[int, int, int], ...]:
            layout = incoming_layout(plan, index, chunk)
            if layout is None:
                return ()
            parts = (
                (layout.activation_shard(me, plan.microbatch_samples, tensor.sequence_length), tensor.features)
                for tensor in plan.model.boundary
            )
            return tuple(
                (p.batch_end - p.batch_start, p.sequence_end - p.sequence_start, features) for p, features in parts
            )

        return cls(
            plan=plan,
            index=index,
            previous=tuple(neighbour(chunk, -1) for chunk in chunks),
            next=tuple(neighbour(chunk, 1) for chunk in chunks),
            input_shapes=tuple(shapes(chunk) for chunk in chunks),
            device=device,
        )


class _Sent(NamedTuple):
    """A message on its way; its tensor's memory must not be used again before it has gone."""

    rank: int
    taken_at: int
    """Number of the receiver's action that takes it."""
    work: dist.Work
    tensor: Tensor


@dataclass
class _Flight:
    """What a step holds on the way: activations of microbatches not yet gone backward, and messages not yet taken."""

    inputs: dict[MicrobatchChunk, States] = field(default_factory=dict)
    outputs: dict[MicrobatchChunk, States] = field(default_factory=dict)
    sends: list[_Sent] = field(default_factory=list)

    def send(self, x: Tensor, to: _Neighbour, action: Action) -> None:
        """Send what a neighbour's action needs."""
        x = x.contiguous()
        work = dist.isend(x, to.rank, group=to.over(action.kind))
        assert work is not None
        self.sends.append(_Sent(to.rank, to.order[action], work, x))

    def receive(self, x: Tensor, source: _Neighbour, action: Action) -> None:
        """Wait for what a neighbour's action made, which also tells that it has taken all messages up to there.

        Gloo does not say of a message whether it has gone, other than by waiting for it.
        """
        dist.recv(x, source.rank, group=source.over(action.kind))
        done = source.order[action]
        kept = []
        for sent in self.sends:
            if sent.rank == source.rank and sent.taken_at <= done:
                sent.work.wait()
            else:
                kept.append(sent)
        self.sends = kept


@dataclass(frozen=True)
class Step:
    """What one step works on: its batch, what its random numbers are for, and by how much its loss is scaled."""

    batch: Batch
    """Of the whole global batch."""
    seed: int = 0
    number: int = 0
    loss_scale: float = 1.0

    @cached_property
    def counted(self) -> int:
        """Number of labels that count."""
        return int((self.batch["labels"] != IGNORED).sum().item())


def run_step(stage: Stage, place: Pipeline, step: Step, hook: StepHook = no_hook) -> Tensor:
    """Forward and backward of a global batch.

    Leaves in the parameters the gradients of `loss_scale` times the mean loss over all labels of the batch that count.
    Returns this rank's part of that mean, unscaled: the sum over all ranks is the loss, and ranks away from the end of
    the model have 0.
    """
    plan = place.plan
    flight = _Flight()
    loss = torch.zeros((), dtype=torch.float64)
    chunks = len(stage.chunks)
    todo = actions(plan.schedule, len(plan.stages), plan.num_microbatches, place.index, chunks)
    every = plan.gradient_reduction is GradientReduction.EVERY_MICROBATCH
    for number, (kind, microbatch, chunk) in enumerate(todo):
        if kind is Pass.FORWARD:
            output = _forward(stage, place, flight, (microbatch, chunk), step, hook)
            if isinstance(output, Tensor):
                output = output / step.counted
                loss += output.detach().to("cpu", torch.float64)
                output = (output * step.loss_scale,)
            flight.outputs[microbatch, chunk] = output
            del output  # else it would outlive its backward pass
        else:
            last = not any(kind is Pass.BACKWARD and later == chunk for kind, _, later in todo[number + 1 :])
            stage.chunks[chunk].prepare_backward(last or every, last)
            _backward(place, flight, (microbatch, chunk), hook)
            stage.chunks[chunk].start_reductions()
    for sent in flight.sends:
        sent.work.wait()
    stage.finish_gradients()
    head = plan.head
    # Without Ulysses each rank of the head's group has computed the whole loss of its samples.
    return loss if head.sequence_parallel is SequenceParallel.ULYSSES else loss / head.tp_size


def _forward(
    stage: Stage, place: Pipeline, flight: _Flight, at: MicrobatchChunk, step: Step, hook: StepHook
) -> States | Tensor:
    def event(name: str) -> None:
        hook(name, at)

    event("forward.begin")
    microbatch, chunk = at
    samples = place.plan.microbatch_samples
    states: States = ()
    source, target = place.previous[chunk], place.next[chunk]
    if source is not None:
        dtype = torch_dtype(place.plan.precision.compute)
        states = tuple(torch.empty(shape, dtype=dtype, device=place.device) for shape in place.input_shapes[chunk])
        for x in states:
            flight.receive(x, source, Action(Pass.FORWARD, microbatch, source.chunk))
            x.requires_grad_()
    rows = {k: v[microbatch * samples : (microbatch + 1) * samples].to(place.device) for k, v in step.batch.items()}
    event("forward.wait")
    flight.inputs[at] = states
    rng_key: RNGKey = (step.seed, step.number, microbatch)
    output: States | Tensor = stage.chunks[chunk](states, rows, rng_key, event)
    event(f"{'layers' if target is not None else 'head'}.forward")
    event("forward.end")
    if target is not None:
        for x in output:
            flight.send(x.detach(), target, Action(Pass.FORWARD, microbatch, target.chunk))
    return output


def _backward(place: Pipeline, flight: _Flight, at: MicrobatchChunk, hook: StepHook) -> None:
    hook("backward.begin", at)
    states, outputs = flight.inputs.pop(at), flight.outputs.pop(at)
    microbatch, chunk = at
    source, target = place.previous[chunk], place.next[chunk]
    grads: list[Tensor | None] = [None] * len(outputs)
    if target is not None:
        for i, x in enumerate(outputs):
            grads[i] = grad = torch.empty_like(x)
            flight.receive(grad, target, Action(Pass.BACKWARD, microbatch, target.chunk))
    hook("backward.wait", at)
    torch.autograd.backward(outputs, grads)
    hook(f"{'layers' if source is not None else 'embedding'}.backward", at)
    hook("backward.end", at)
    if source is not None:
        for x in states:
            # What nothing here has used has no gradient, but the stage before waits for one.
            grad = torch.zeros_like(x) if x.grad is None else x.grad
            flight.send(grad, source, Action(Pass.BACKWARD, microbatch, source.chunk))
