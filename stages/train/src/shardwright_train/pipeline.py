"""One training step of a rank: its action list, with the messages to and from the neighbouring pipeline stages."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright_formats.plan import GradientReduction, Plan
from shardwright_formats.schedule import Pass, actions
from shardwright_train.parallel.data_parallel import torch_dtype
from shardwright_train.parallel.groups import Groups
from shardwright_train.stage import Mark, StageModule, incoming_layout

__all__ = ["Pipeline", "no_mark", "run_step"]


def no_mark(_name: str) -> None:
    """Record nothing."""


@dataclass(frozen=True)
class Pipeline:
    """A rank's place in the pipeline.

    Sends go forward and backward over a group each, and asynchronously, so that no two ranks ever wait for each
    other's send (with one NCCL communicator for both directions 1F1B would).
    """

    plan: Plan
    index: int
    previous: int | None
    next: int | None
    forward_group: dist.ProcessGroup | None
    backward_group: dist.ProcessGroup | None
    input_shape: tuple[int, int, int] | None
    device: torch.device

    @classmethod
    def of(cls, plan: Plan, rank: int, groups: Groups, device: torch.device) -> "Pipeline":
        """The place of a rank under a plan: rank j of a stage sends to rank j of the next."""
        index = next(i for i, stage in enumerate(plan.stages) if rank in stage.ranks)
        me = plan.stages[index].ranks.index(rank)
        column = tuple(stage.ranks[me] for stage in plan.stages)
        several = len(column) > 1
        layout = incoming_layout(plan, index)
        shape = None
        if layout is not None:
            part = layout.rectangle(me, plan.microbatch_samples, plan.model.sequence_length)
            (boundary,) = plan.model.types[plan.model.layers[0]].outputs
            shape = (part.batch_end - part.batch_start, part.sequence_end - part.sequence_start, boundary.features)
        return cls(
            plan=plan,
            index=index,
            previous=column[index - 1] if index > 0 else None,
            next=column[index + 1] if index + 1 < len(column) else None,
            forward_group=groups.among("forward", column) if several else None,
            backward_group=groups.among("backward", column) if several else None,
            input_shape=shape,
            device=device,
        )


@dataclass
class _Flight:
    """What a step holds on the way: activations of microbatches not yet gone backward, and messages not yet taken."""

    inputs: dict[int, Tensor | None] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    sends: list[tuple[dist.Work, Tensor]] = field(default_factory=list)


def run_step(stage: StageModule, place: Pipeline, batch: Tensor, mark: Mark = no_mark) -> Tensor:
    """Forward and backward of a global batch of token numbers [global_batch_size, s + 1].

    Leaves the gradients of the mean cross entropy over all tokens of the batch in the parameters. Returns this rank's
    part of that mean: the sum over all ranks is the loss, and ranks away from the last pipeline stage have 0.
    """
    plan = place.plan
    flight = _Flight()
    tokens_in_batch = plan.global_batch_size * plan.model.sequence_length
    loss = torch.zeros((), dtype=torch.float64)
    for kind, microbatch in actions(plan.schedule, len(plan.stages), plan.num_microbatches, place.index):
        if kind is Pass.FORWARD:
            rows = batch[microbatch * plan.microbatch_samples : (microbatch + 1) * plan.microbatch_samples]
            output = _forward(stage, place, flight, microbatch, rows.to(place.device), mark)
            if place.next is None:
                output = output / tokens_in_batch
                loss += output.detach().to("cpu", torch.float64)
            flight.outputs[microbatch] = output
        else:
            last = microbatch == plan.num_microbatches - 1
            every = plan.gradient_reduction is GradientReduction.EVERY_MICROBATCH
            stage.prepare_backward(last or every, last)
            _backward(place, flight, microbatch, mark)
    for work, _ in flight.sends:
        work.wait()
    return loss / plan.head.tp_size


def _forward(stage: StageModule, place: Pipeline, flight: _Flight, microbatch: int, rows: Tensor, mark: Mark) -> Tensor:
    x = None
    if place.previous is not None:
        assert place.input_shape is not None
        x = torch.empty(place.input_shape, dtype=torch_dtype(place.plan.precision.compute), device=place.device)
        dist.recv(x, place.previous, group=place.forward_group)
        x.requires_grad_()
    mark("forward")
    flight.inputs[microbatch] = x
    output: Tensor = stage(x, rows[:, :-1], rows[:, 1:], mark)
    mark(f"{'layers' if place.next is not None else 'head'}.forward")
    if place.next is not None:
        _send(flight, output.detach(), place.next, place.forward_group)
    return output


def _backward(place: Pipeline, flight: _Flight, microbatch: int, mark: Mark) -> None:
    x, output = flight.inputs.pop(microbatch), flight.outputs.pop(microbatch)
    grad = None
    if place.next is not None:
        grad = torch.empty_like(output)
        dist.recv(grad, place.next, group=place.backward_group)
    mark("backward")
    output.backward(grad)
    mark(f"{'layers' if place.previous is not None else 'embedding'}.backward")
    if x is not None:
        assert x.grad is not None and place.previous is not None
        _send(flight, x.grad, place.previous, place.backward_group)


def _send(flight: _Flight, x: Tensor, rank: int, group: dist.ProcessGroup | None) -> None:
    # The tensor is kept beside its request: its memory must not be used again before it has gone.
    flight.sends = [(work, sent) for work, sent in flight.sends if not work.is_completed()]
    x = x.contiguous()
    work = dist.isend(x, rank, group=group)
    assert work is not None
    flight.sends.append((work, x))
