"""A training step of a rank: forward and backward passes in the order of its action list."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwright_formats.semantics.schedules.passes import Action, Pass
from shardwright_formats.types import GradientReduction, SequenceParallel
from shardwright_train.data.share import Batch, Share
from shardwright_train.models.base import States
from shardwright_train.parallel.vocab import IGNORED
from shardwright_train.pipeline.microbatches import Microbatches
from shardwright_train.pipeline.p2p import Messages, Pipeline
from shardwright_train.pipeline.stage import Stage

MicrobatchChunk = tuple[int, int]
"""A microbatch and a model chunk: a range of layers of the pipeline stage."""


class StepHook(Protocol):
    """A callable that a step calls at each of its events.

    A pass calls it with `<kind>.begin`, `<kind>.wait` once the messages are there that it begins with,
    `<segment>.<kind>` at the end of each segment (or of a part of it) and `<kind>.end`, where kind is `forward` or
    `backward`; outside of passes stand `start`, `reduced` and `optimizer`.
    """

    def __call__(self, name: str, at: MicrobatchChunk | None = None) -> None:
        """Record an event, in the pass of a microbatch through a chunk or outside of passes."""


def no_hook(name: str, at: MicrobatchChunk | None = None) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Step:
    """The inputs of one step: its batch, the keys of its random numbers, and the scale of its loss."""

    batch: Batch
    """This rank's share of the global batch, in host memory."""
    counted: int
    """Number of labels that count in the whole global batch."""
    seed: int = 0
    number: int = 1
    """Number of the step, from 1."""
    loss_scale: float = 1.0

    @classmethod
    def of(cls, batch: Batch, share: Share, seed: int = 0, number: int = 1) -> "Step":
        """Return a step on a global batch that every rank has."""
        return cls(share.part_of(batch), int((batch["labels"] != IGNORED).sum().item()), seed, number)


def run_step(stage: Stage, pipeline: Pipeline, step: Step, hook: StepHook = no_hook) -> Tensor:
    """Run forward and backward of a global batch.

    Leaves in the parameters the gradients of `loss_scale` times the loss: the mean over all labels of the batch that
    count, and of blocks' auxiliary losses the mean over all samples. Returns this rank's part of the loss, unscaled:
    the sum over all ranks is the loss. A family with auxiliary losses has [2]: the loss, and their part of it.
    """
    plan, todo = pipeline.context.plan, pipeline.actions()
    passes = _Passes(stage, pipeline, step, hook, Messages(pipeline))
    reduces_each = plan.gradient_reduction is GradientReduction.EVERY_MICROBATCH
    passes.messages.expect(todo[0])
    for number, (action, following) in enumerate(zip(todo, [*todo[1:], None], strict=True)):
        kind, _, chunk = action
        if kind is Pass.FORWARD:
            stage.prepare_gathers(action, following)
            passes.forward(action, following)
        else:
            last = not any(kind is Pass.BACKWARD and later == chunk for kind, _, later in todo[number + 1 :])
            stage.chunks[chunk].prepare_backward(last or reduces_each, last)
            stage.prepare_gathers(action, following)
            passes.backward(action, following)
            stage.chunks[chunk].start_reductions()
    passes.messages.wait()
    stage.finish_gradients()
    # Without Ulysses each rank of the head's group has computed the full loss of its samples.
    head = plan.head
    loss = passes.loss if head.sequence_parallel is SequenceParallel.ULYSSES else passes.loss / head.tp_size
    if not pipeline.context.family.auxiliary_loss:
        return loss
    auxiliary = passes.auxiliary / plan.global_batch_size
    return torch.stack([loss + auxiliary, auxiliary])


@dataclass
class _Passes:
    """The passes of one step, and the activations of microbatches that have not yet gone backward."""

    stage: Stage
    pipeline: Pipeline
    step: Step
    hook: StepHook
    messages: Messages
    inputs: dict[MicrobatchChunk, States] = field(default_factory=dict)
    ends: dict[MicrobatchChunk, States | tuple[GradientEdge, ...]] = field(default_factory=dict)
    """Starts of the backward passes: the loss, or the edges of outputs, whose memory is freed once sent."""
    microbatches: Microbatches = field(init=False)
    loss: Tensor = field(init=False)
    losses: defaultdict[MicrobatchChunk, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Auxiliary losses of blocks, at which backward passes start, too."""
    auxiliary: Tensor = field(init=False)
    """This rank's part of the sum of the auxiliary losses."""

    def __post_init__(self) -> None:
        device = self.pipeline.context.device
        # The host waits for none of these copies: its side is pinned.
        batch = {name: x.to(device, non_blocking=True) for name, x in self.step.batch.items()}
        self.microbatches = Microbatches(self.stage, batch)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.auxiliary = torch.zeros_like(self.loss)

    def forward(self, action: Action, following: Action | None) -> None:
        kind, microbatch, chunk = action
        at, leaves = (microbatch, chunk), (kind, chunk) in self.pipeline.outgoing
        self.hook("forward.begin", at)
        self.stage.chunks[chunk].gathers.start(Pass.FORWARD)
        states = self.inputs[at] = tuple(x.requires_grad_() for x in self._received(action, following))
        batch = self.microbatches.taken_by(action)
        self.hook("forward.wait", at)
        batch = self.microbatches.masked(batch, action)
        rng_key = (self.step.seed, self.step.number, microbatch)
        hook, note_loss = (lambda name: self.hook(name, at)), partial(self._note_loss, at)
        output = self.stage.chunks[chunk](states, batch, rng_key, hook, note_loss)
        self.hook(f"{'layers' if leaves else 'head'}.forward", at)
        self.hook("forward.end", at)
        if leaves:
            self.messages.send([x.detach() for x in output], action)
            self.ends[at] = tuple(map(get_gradient_edge, output))
        else:
            mean = output / self.step.counted
            self.loss += mean.detach()
            self.ends[at] = (mean * self.step.loss_scale,)

    def backward(self, action: Action, following: Action | None) -> None:
        kind, microbatch, chunk = action
        at, leaves = (microbatch, chunk), (kind, chunk) in self.pipeline.outgoing
        self.hook("backward.begin", at)
        self.stage.chunks[chunk].gathers.start(Pass.BACKWARD)
        states, ends, losses = self.inputs.pop(at), self.ends.pop(at), self.losses.pop(at, [])
        gradients: list[Tensor | None] = [*self._received(action, following)] or [None] * len(ends)
        share = self.step.loss_scale / self.pipeline.context.plan.global_batch_size
        self.hook("backward.wait", at)
        torch.autograd.backward((*ends, *losses), [*gradients, *(torch.full_like(x, share) for x in losses)])
        self.hook(f"{'layers' if leaves else 'embedding'}.backward", at)
        self.hook("backward.end", at)
        if leaves:
            # What nothing here has used has no gradient, but the stage before waits for one.
            self.messages.send([torch.zeros_like(x) if x.grad is None else x.grad for x in states], action)

    def _note_loss(self, at: MicrobatchChunk, loss: Tensor, replicas: int) -> None:
        self.losses[at].append(loss)
        self.auxiliary += loss.detach() / replicas

    def _received(self, action: Action, following: Action | None) -> list[Tensor]:
        """Return an action's inputs once received, and start to receive those of the next."""
        if following is not None:
            self.messages.expect(following)
        return self.messages.received(action)
