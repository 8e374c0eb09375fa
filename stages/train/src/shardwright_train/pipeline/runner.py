"""A training step, or an evaluation, of one rank: its passes, in the order of its schedule's actions.

A schedule is a list of actions (kind of pass, microbatch, chunk); the simulator of the search plays the same list. For
M microbatches with N labels in all, the runner accumulates

    gradient = scale * d/dw sum_m sum_i CE(m, i) / N,

so that neither M, nor the schedule, nor the number of labels in a single microbatch changes the result.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from shardwright.models.traits import Mask
from shardwright.plan.axes import axes_of
from shardwright.plan.chunks import stage_actions
from shardwright.plan.expert_placement import expert_slices
from shardwright.plan.schedules.passes import Action, Pass
from shardwright.types import ITEMSIZE, Attention, GradientReduction
from shardwright_train.data.share import DOCUMENTS, Batch, BatchShare
from shardwright_train.models.masks import Places, document_mask, image_masks, padding_mask, shared_mask, window_mask
from shardwright_train.models.mtp import further_labels, with_further
from shardwright_train.models.stock import States, WithLoss
from shardwright_train.parallel.data import torch_dtype
from shardwright_train.parallel.rng import RNGKey
from shardwright_train.parallel.vocab import IGNORED
from shardwright_train.pipeline.layer import Layer, RankContext
from shardwright_train.pipeline.p2p import Messages, Pipeline
from shardwright_train.pipeline.stage import Stage

MTP_FACTOR = 0.1
"""Default factor of the losses of further tokens, as in Megatron-LM's mtp_loss_scaling_factor."""

# The microbatches of a batch.


@dataclass
class Microbatches:
    """The micro-batches of a batch, each with the attention masks that this rank's layers need, one per window.

    A mask is made for a microbatch's first chunk and kept until its last chunk has read it; after that it lives only as
    long as the layers' saved tensors need it.
    """

    stage: Stage
    batch: Batch
    """Batch on the device."""
    _masks: dict[int, Batch] = field(default_factory=dict)

    def taken_by(self, action: Action) -> Batch:
        """Return the microbatch of a forward pass, without masks."""
        samples = self.stage.context.share.local_samples
        return {name: x[action.microbatch * samples :][:samples] for name, x in self.batch.items()}

    def masked(self, batch: Batch, action: Action) -> Batch:
        """Return a micro-batch with its layers' masks, if masks differ between micro-batches."""
        if not self.stage.has_blocks or not (wanted := self._wanted(batch)):
            return batch
        masks = self._masks.pop(action.microbatch, None)
        if masks is None:
            masks = self._made(batch, wanted)
        if action.chunk < len(self.stage.chunks) - 1:
            self._masks[action.microbatch] = masks
        return {**batch, **masks}

    def _wanted(self, batch: Batch) -> tuple[tuple[int | None, Places], ...]:
        """Return the windows and places for which a micro-batch's documents, images or padding require masks."""
        context = self.stage.context
        facts = context.family.facts.attention
        if DOCUMENTS in batch or facts.images_ahead:
            return context.masks
        padded = facts.mask is Mask.PADDING and context.attention != Attention.FLASH_ATTENTION_2.value
        return tuple(pair for pair in context.masks if pair[0] is not None) if padded else ()

    def _made(self, batch: Batch, wanted: Sequence[tuple[int | None, Places]]) -> Batch:
        """Return the masks of a microbatch, one for each of the `wanted` windows and places."""
        context, mask = self.stage.context, self.stage.context.family.facts.attention.mask
        dtype = torch_dtype(context.plan.precision.compute)
        if (facts := context.family.facts).attention.images_ahead:
            return image_masks(batch, facts.configured(context.plan.model.config), wanted, dtype)
        padding = batch["attention_mask"] if mask is Mask.PADDING else None
        masks = {}
        for window, places in wanted:
            if DOCUMENTS in batch:
                made = document_mask(batch[DOCUMENTS], dtype, padding, places)
            else:
                made = padding_mask(batch["attention_mask"], dtype, context.attention)
            within = None if window is None else window_mask(places, window, made, mask)
            masks[shared_mask(window, places.attending)] = made if within is None else torch.minimum(made, within)
        return masks


def on_device(batch: Batch, context: RankContext) -> Batch:
    """Return a batch on the device, with its positions in the order in which ranks hold them; pixels keep theirs.

    The host waits for none of the copies: its side is pinned.
    """
    there = {name: x.to(context.device, non_blocking=True) for name, x in batch.items()}
    if context.depths:
        there = with_further(there, context.depths, embeds=context.embeds_further)
    if context.order is None:
        return there
    beside = context.family.objective.beside_positions
    return {name: x if name in beside else x[:, context.order] for name, x in there.items()}


def mask_bytes(context: RankContext) -> int:
    """Return the peak bytes of masks on a rank if documents are separated."""
    plan, stage = context.plan, context.stage_index
    ranges = plan.stages[stage].layers
    passes, alive, largest = Counter[int](), 0, 0
    for _, microbatch, _ in (action for action in stage_actions(plan, stage) if action.kind.way):
        alive += passes[microbatch] == 0
        passes[microbatch] += 1
        largest = max(largest, alive)
        alive -= passes[microbatch] == 2 * len(ranges)
    rows = sum(places.attending.stop - places.attending.start for _, places in context.masks)
    elements: int = largest * context.share.local_samples * rows * plan.model.sequence_length
    return elements * ITEMSIZE[plan.precision.compute]


# The passes.


MicrobatchChunk = tuple[int, int]
"""A microbatch and a model chunk: a range of layers of the pipeline stage."""
_NOTHING_IS_DRAWN: RNGKey = (0, 0, 0)


class StepHook(Protocol):
    """A callable that a step calls at each of its events.

    A forward or backward pass, as the `<kind>`, calls it with `<kind>.begin`, with `<kind>.wait` once the messages that
    it needs have arrived, with `<segment>.<kind>` at the end of each segment (or of a part of it), and with
    `<kind>.end`. A weight pass calls it with `weight.begin` and `weight.end`. Events outside of passes are `start`,
    `reduced` and `optimizer`.
    """

    def __call__(self, name: str, at: MicrobatchChunk | None = None) -> None:
        """Record an event, in the pass of a microbatch through a chunk or outside of passes."""


def no_hook(*_: object, **__: object) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Step:
    """The inputs of one step: its batch, the keys of its random numbers, and the scale of its loss."""

    batch: Batch
    """This rank's share of the global batch, in host memory."""
    counted: int
    """Number of labels that count in the whole global batch."""
    further: tuple[int, ...] = ()
    """The same number for the labels 1, 2, ... positions further, if the model predicts these, too."""
    mtp_factor: float = MTP_FACTOR
    """Factor of the mean of these further labels' losses."""
    seed: int = 0
    number: int = 1
    """Number of the step, from 1."""
    loss_scale: float = 1.0

    @classmethod
    def of_batch(cls, batch: Batch, share: BatchShare, number: int = 1) -> "Step":
        """Return a step on a global batch that every rank has."""
        further = further_labels(batch, share.depths).unbind(-1) if share.depths else ()
        counted, *others = (int((labels != IGNORED).sum().item()) for labels in (batch["labels"], *further))
        return cls(share.part_of(batch), counted, tuple(others), number=number)


class ForwardHook(Protocol):
    """What a step calls around its forward passes."""

    def before(self, layer: str) -> None:
        """Prepare a layer's forward pass, before its parameters are gathered or read."""

    def after_forward(self) -> None:
        """Note the end of a forward pass through a chunk."""


def run_step(stage: Stage, pipeline: Pipeline, step: Step, around: ForwardHook, hook: StepHook = no_hook) -> Tensor:
    """Run the forward and backward passes of a global batch, and return this rank's part of the loss.

    Leaves in the parameters the gradients of `loss_scale` times the loss: the mean cross entropy over all labels of the
    batch that count, plus the mean over all samples of blocks' auxiliary losses. The result is unscaled: the sum over
    all ranks is the loss. If the model predicts further tokens, their mean losses follow, depth by depth. For a family
    with auxiliary losses [1 + experts] follow: the auxiliary part of the loss, and how often each expert of each layer
    was chosen. All ranks that compute the same positions count them.
    """
    plan, todo = pipeline.context.plan, pipeline.actions()
    passes = _Passes(stage, pipeline, step, hook, around, Messages(pipeline))
    reduces_each = plan.gradient_reduction is GradientReduction.EVERY_MICROBATCH
    # Receives are posted one action ahead, so that a message arrives while the action before it computes.
    passes.messages.expect(todo[0])
    for number, (action, following) in enumerate(zip(todo, [*todo[1:], None], strict=True)):
        kind, _, chunk = action
        # FSDP2 must know the last pass of a chunk that makes gradients: it reshards and cleans up after that one.
        last = not any(each.makes_gradients and later == chunk for each, _, later in todo[number + 1 :])
        if not stage.computes(action):
            passes.no_backward(action, following, last)
            continue
        play = passes.of_kind(kind)
        if kind.makes_gradients:
            stage.chunks[chunk].prepare_backward(last or reduces_each, last)
        # ZeRO-3 gathers the first layer of the next action during this one; actions without computation gather nothing.
        if kind.way:
            stage.prepare_gathers(action, next(filter(stage.gathers_for, todo[number + 1 :]), None))
        play(action, following)
        if kind.way and kind.makes_gradients:
            # A layer whose inputs need no gradient (the embedding) has no autograd hook that would start its reduction.
            stage.chunks[chunk].start_reductions()
    passes.messages.wait()
    stage.finish_gradients()
    # Each rank that shares the vocabulary has computed the full loss of its samples.
    loss, *further = passes.losses_of_head / axes_of(plan.head).dense.tensor.size
    if not pipeline.context.family.auxiliary_loss:
        return torch.stack([loss, *further]) if further else loss
    auxiliary = passes.auxiliary / plan.global_batch_size
    return torch.cat([torch.stack([loss + auxiliary, *further, auxiliary]), passes.assignments])


@dataclass
class _Passes:
    """The passes of one step, and the autograd graphs of the microbatches in flight."""

    stage: Stage
    pipeline: Pipeline
    step: Step
    hook: StepHook
    around: ForwardHook
    messages: Messages
    inputs: dict[MicrobatchChunk, States] = field(default_factory=dict)
    ends: dict[MicrobatchChunk, tuple[Tensor | GradientEdge | None, ...]] = field(default_factory=dict)
    """Roots of the backward passes: the loss, or the gradient edges of outputs, so that sent outputs can be freed."""
    microbatches: Microbatches = field(init=False)
    losses_of_head: Tensor = field(init=False)
    """The loss, and the mean loss of each depth that predicts further tokens [1 + depths]."""
    losses: defaultdict[MicrobatchChunk, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Auxiliary losses of blocks: further roots of the backward passes."""
    auxiliary: Tensor = field(init=False)
    """This rank's part of the sum of the auxiliary losses."""
    assignments: Tensor = field(init=False)
    """How often each expert of each layer is chosen on this rank: whole numbers, exact in float64."""
    experts: Mapping[str, slice] = field(init=False)
    """Slice of each layer's experts in `assignments`, by the layer's name."""
    segments: defaultdict[MicrobatchChunk, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Segment events of a microbatch in a chunk for which the hook has been called."""

    def __post_init__(self) -> None:
        device = self.pipeline.context.device
        self.microbatches = Microbatches(self.stage, on_device(self.step.batch, self.pipeline.context))
        # In float64, so that the order of microbatches does not show in a sum over many of them.
        self.losses_of_head = torch.zeros(1 + len(self.step.further), dtype=torch.float64, device=device)
        self.auxiliary = self.losses_of_head.new_zeros(())
        slices = expert_slices(self.pipeline.context.plan.model)
        self.experts = {f"layers[{number}]": part for number, part in slices.items()}
        self.assignments = self.auxiliary.new_zeros(max((part.stop for part in self.experts.values()), default=0))

    def of_kind(self, kind: Pass) -> Callable[[Action, Action | None], None]:
        """Return the method that runs a kind of pass."""
        methods = {Pass.FORWARD: self.forward, Pass.BACKWARD: self.backward, Pass.WEIGHT: self.weight}
        if kind not in methods:
            raise ValueError(f"the runtime does not run passes of kind {kind}")
        return methods[kind]

    def forward(self, action: Action, following: Action | None) -> None:
        kind, microbatch, chunk = action
        at, leaves = (microbatch, chunk), (kind, chunk) in self.pipeline.outgoing
        self.hook("forward.begin", at)
        here = self.stage.chunks[chunk]
        for layer in here.layers[:1]:
            self.around.before(layer.name)
        here.gathers.start(Pass.FORWARD)
        states = tuple(self._received(action, following))
        if here.needs_gradient:
            # Received tensors are leaves: after the backward pass their .grad is what the stage before waits for.
            states = self.inputs[at] = tuple(x.requires_grad_() for x in states)
        batch = self.microbatches.taken_by(action)
        self.hook("forward.wait", at)
        batch = self.microbatches.masked(batch, action)
        rng_key = (self.step.seed, self.step.number, microbatch)
        noted = partial(self._note_segment, at), partial(self._note_loss, at)
        output = here(states, batch, rng_key, *noted, self.around.before)
        self.around.after_forward()
        self.hook(f"{'layers' if leaves else 'head'}.forward", at)
        self.hook("forward.end", at)
        if leaves:
            send = self.messages.send if self.stage.has_backward else self.messages.send_after_the_last
            send([x.detach() for x in output], action)
            if here.has_backward:
                # An edge keeps the graph but not the output itself, which would otherwise live until the backward pass.
                self.ends[at] = tuple(get_gradient_edge(x) if x.requires_grad else None for x in output)
        else:
            mean = self._mean(output)
            self.ends[at] = (mean * self.step.loss_scale,)

    def _mean(self, sums: Tensor) -> Tensor:
        """Return a micro-batch's part of the loss from its summed cross entropy [] or [1 + depths], and note it.

        The sum is divided by the number of labels of the whole batch, as microbatches may hold different numbers.
        """
        if not self.step.further:
            mean = sums / self.step.counted
            self.losses_of_head += mean.detach()
            return mean
        first, *further = (x / max(1, n) for x, n in zip(sums, (self.step.counted, *self.step.further), strict=True))
        loss: Tensor = first + sum(further) * (self.step.mtp_factor / len(further))
        self.losses_of_head += torch.stack([loss, *further]).detach()
        return loss

    def backward(self, action: Action, following: Action | None) -> None:
        kind, microbatch, chunk = action
        at, leaves = (microbatch, chunk), (kind, chunk) in self.pipeline.outgoing
        self.hook("backward.begin", at)
        self.stage.chunks[chunk].gathers.start(Pass.BACKWARD)
        states, ends, losses = self.inputs.pop(at, ()), self.ends.pop(at), self.losses.pop(at, [])
        gradients: list[Tensor | None] = [*self._received(action, following)] or [None] * len(ends)
        share = self.step.loss_scale / self.pipeline.context.plan.global_batch_size
        self.hook("backward.wait", at)
        # An output computed only by frozen parameters has no edge; the next stage sends a gradient for it all the same.
        given = [(end, gradient) for end, gradient in zip(ends, gradients, strict=True) if end is not None]
        roots: Sequence[Any] = [*(end for end, _ in given), *losses]
        torch.autograd.backward(roots, [*(each for _, each in given), *(torch.full_like(x, share) for x in losses)])
        self.stage.chunks[chunk].end_backward()
        self._end_segments(at)
        self.hook("backward.end", at)
        if leaves:
            # An unused input has no gradient, but the previous stage waits for a message.
            self.messages.send([torch.zeros_like(x) if x.grad is None else x.grad for x in states], action)

    def weight(self, action: Action, following: Action | None) -> None:
        at = action.microbatch, action.chunk
        self.hook("weight.begin", at)
        self._received(action, following)
        self.stage.chunks[action.chunk].make_weight_gradients()
        self.hook("weight.end", at)

    def no_backward(self, action: Action, following: Action | None, last: bool) -> None:
        """Go through the events of a backward or weight pass whose chunk has nothing to train."""
        at = action.microbatch, action.chunk
        self.hook(f"{action.kind}.begin", at)
        self._received(action, following)
        if action.kind.way:
            self.hook(f"{action.kind}.wait", at)
            self._end_segments(at)
        if last:
            self.stage.chunks[action.chunk].end_step()
        self.hook(f"{action.kind}.end", at)

    def _note_segment(self, at: MicrobatchChunk, name: str) -> None:
        self.segments[at].append(name)
        self.hook(name, at)

    def _end_segments(self, at: MicrobatchChunk) -> None:
        """Call the hook for the segments that end with this backward pass, and that it was not called for before."""
        noted = self.segments.pop(at, [])
        for name in (f"{segment}.backward" for segment in reversed(self.stage.chunks[at[1]].segments)):
            if name not in noted:
                self.hook(name, at)

    def _note_loss(self, at: MicrobatchChunk, layer: Layer, output: WithLoss) -> None:
        self.losses[at].append(output.loss)
        self.auxiliary += output.loss.detach() / layer.replicas
        if output.counts is not None:
            self.assignments[self.experts[layer.name]] += output.counts

    def _received(self, action: Action, following: Action | None) -> list[Tensor]:
        """Return the inputs of an action, after starting to receive the inputs of the following one."""
        if following is not None:
            self.messages.expect(following)
        return self.messages.received(action)


@contextmanager
def evaluating(stage: Stage) -> Iterator[None]:
    """Disable dropout and gradients inside; afterwards the stage is as before, its parameters sharded."""
    modes = [(module, module.training) for chunk in stage.chunks for module in chunk.modules()]
    for chunk in stage.chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
            if isinstance(module, FSDPModule):
                module.reshard()  # what ZeRO-2 otherwise does after a backward pass


def run_forward(stage: Stage, pipeline: Pipeline, batch: Batch) -> Tensor:
    """Run the forward passes of a rank's share of a global batch, inside `evaluating`.

    Returns [2] in float64: the sum of the loss over the labels that count, and their number. These are this rank's
    parts, which add up over all ranks; ranks without the head have 0. At any moment the messages of no more than two
    microbatches are in flight.
    """
    context = pipeline.context
    todo = [action for action in pipeline.actions() if action.kind is Pass.FORWARD]
    messages = Messages(pipeline)
    microbatches = Microbatches(stage, on_device(batch, context))
    totals = torch.zeros(2, dtype=torch.float64, device=context.device)
    messages.expect(todo[0])
    for action, following in zip(todo, [*todo[1:], None], strict=True):
        stage.prepare_gathers(action, following)
        chunk = stage.chunks[action.chunk]
        chunk.gathers.start(Pass.FORWARD)
        if following is not None:
            messages.expect(following)
        states = tuple(messages.received(action))
        microbatch = microbatches.masked(microbatches.taken_by(action), action)
        output = chunk(states, microbatch, _NOTHING_IS_DRAWN, no_hook, no_hook, no_hook)
        if (action.kind, action.chunk) in pipeline.outgoing:
            messages.send_after_the_last(output, action)
        else:
            totals += _parts(stage, action, output, microbatch)
    messages.wait()
    return totals


def _parts(stage: Stage, action: Action, loss: Tensor, microbatch: Batch) -> Tensor:
    """Return this rank's part of a micro-batch's summed loss, and of its number of labels.

    Ranks that split the vocabulary have the same loss, and all ranks with the same samples the same labels: each counts
    its fraction.
    """
    head = stage.chunks[action.chunk].layers[-1]
    counted = (microbatch["labels"][head.samples] != IGNORED).sum().double()
    axes = axes_of(head.strategy)
    loss = loss.reshape(-1)[0].double()  # losses of further tokens are not reported
    return torch.stack([loss / axes.dense.tensor.size, counted / axes.layout.sample_ranks])
