"""One training step of a rank: its action list, with the messages to and from the neighbouring pipeline stages."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright_formats.plan import GradientReduction, Plan
from shardwright_formats.schedule import Pass, actions
from shardwright_formats.strategy import SequenceParallel
from shardwright_formats.traffic import incoming_layout
from shardwright_train.families.base import Batch, States
from shardwright_train.parallel.data_parallel import torch_dtype
from shardwright_train.parallel.groups import Groups
from shardwright_train.parallel.randomness import Draw
from shardwright_train.parallel.vocabulary import IGNORED
from shardwright_train.record import StepMark, Turn
from shardwright_train.stage import Stage

__all__ = ["Pipeline", "Step", "no_mark", "run_step"]


def no_mark(name: str, turn: Turn | None = None) -> None:
    """Record nothing."""


@dataclass(frozen=True)
class _Neighbour:
    """Whom a chunk exchanges messages with on one side, and over which groups."""

    rank: int
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


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
            return _Neighbour(column[(index + step) % len(column)], *over)

        def shapes(chunk: int) -> tuple[tuple[int, int, int], ...]:
            layout = incoming_layout(plan, index, chunk)
            if layout is None:
                return ()
            parts = (
                (layout.rectangle(me, plan.microbatch_samples, tensor.sequence_length), tensor.features)
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


@dataclass
class _Flight:
    """What a step holds on the way: activations of microbatches not yet gone backward, and messages not yet taken."""

    inputs: dict[Turn, States] = field(default_factory=dict)
    outputs: dict[Turn, States] = field(default_factory=dict)
    sends: list[tuple[dist.Work, Tensor]] = field(default_factory=list)


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


def run_step(stage: Stage, place: Pipeline, step: Step, mark: StepMark = no_mark) -> Tensor:
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
            output = _forward(stage, place, flight, (microbatch, chunk), step, mark)
            if isinstance(output, Tensor):
                output = output / step.counted
                loss += output.detach().to("cpu", torch.float64)
                output = (output * step.loss_scale,)
            flight.outputs[microbatch, chunk] = output
            del output  # else it would outlive its backward pass
        else:
            last = not any(kind is Pass.BACKWARD and later == chunk for kind, _, later in todo[number + 1 :])
            stage.chunks[chunk].prepare_backward(last or every, last)
            _backward(place, flight, (microbatch, chunk), mark)
    for work, _ in flight.sends:
        work.wait()
    stage.finish_gradients()
    head = plan.head
    # Without Ulysses each rank of the head's group has computed the whole loss of its samples.
    return loss if head.sequence_parallel is SequenceParallel.ULYSSES else loss / head.tp_size


def _forward(stage: Stage, place: Pipeline, flight: _Flight, turn: Turn, step: Step, mark: StepMark) -> States | Tensor:
    def at(name: str) -> None:
        mark(name, turn)

    at("forward.begin")
    microbatch, chunk = turn
    samples = place.plan.microbatch_samples
    states: States = ()
    source, target = place.previous[chunk], place.next[chunk]
    if source is not None:
        dtype = torch_dtype(place.plan.precision.compute)
        states = tuple(torch.empty(shape, dtype=dtype, device=place.device) for shape in place.input_shapes[chunk])
        for x in states:
            dist.recv(x, source.rank, group=source.forward)
            x.requires_grad_()
    rows = {k: v[microbatch * samples : (microbatch + 1) * samples].to(place.device) for k, v in step.batch.items()}
    at("forward.wait")
    flight.inputs[turn] = states
    draw: Draw = (step.seed, step.number, microbatch)
    output: States | Tensor = stage.chunks[chunk](states, rows, draw, at)
    at(f"{'layers' if target is not None else 'head'}.forward")
    at("forward.end")
    if target is not None:
        for x in output:
            _send(flight, x.detach(), target.rank, target.forward)
    return output


def _backward(place: Pipeline, flight: _Flight, turn: Turn, mark: StepMark) -> None:
    mark("backward.begin", turn)
    states, outputs = flight.inputs.pop(turn), flight.outputs.pop(turn)
    source, target = place.previous[turn[1]], place.next[turn[1]]
    grads: list[Tensor | None] = [None] * len(outputs)
    if target is not None:
        for i, x in enumerate(outputs):
            grads[i] = grad = torch.empty_like(x)
            dist.recv(grad, target.rank, group=target.backward)
    mark("backward.wait", turn)
    torch.autograd.backward(outputs, grads)
    mark(f"{'layers' if source is not None else 'embedding'}.backward", turn)
    mark("backward.end", turn)
    if source is not None:
        for x in states:
            # What nothing here has used has no gradient, but the stage before waits for one.
            _send(flight, torch.zeros_like(x) if x.grad is None else x.grad, source.rank, source.backward)


def _send(flight: _Flight, x: Tensor, rank: int, group: dist.ProcessGroup) -> None:
    # The tensor is kept beside its request: its memory must not be used again before it has gone.
    flight.sends = [(work, sent) for work, sent in flight.sends if not work.is_completed()]
    x = x.contiguous()
    work = dist.isend(x, rank, group=group)
    assert work is not None
    flight.sends.append((work, x))
