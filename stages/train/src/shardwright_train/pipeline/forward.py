"""Forward passes alone, in the order of a rank's action list, for evaluation under a plan."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from shardwright_formats.semantics.schedules.passes import Action, Pass
from shardwright_formats.types import SequenceParallel
from shardwright_train.data.share import Batch
from shardwright_train.parallel.rng import RNGKey
from shardwright_train.parallel.vocab import IGNORED
from shardwright_train.pipeline.microbatches import Microbatches
from shardwright_train.pipeline.p2p import Messages, Pipeline
from shardwright_train.pipeline.stage import Stage

_NOTHING_IS_DRAWN: RNGKey = (0, 0, 0)


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

    Returns the sum of the loss over the labels that count, and their number, in float64: this rank's parts, which add
    up over all ranks; ranks away from the end of the model have 0. At any moment the messages of no more than two
    microbatches are in flight.
    """
    context = pipeline.context
    todo = [action for action in pipeline.actions() if action.kind is Pass.FORWARD]
    messages = Messages(pipeline)
    microbatches = Microbatches(stage, {name: x.to(context.device, non_blocking=True) for name, x in batch.items()})
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
        output = chunk(states, microbatch, _NOTHING_IS_DRAWN, _no_hook, _no_hook)
        if (action.kind, action.chunk) in pipeline.outgoing:
            messages.send_after_the_last(output, action)
        else:
            totals += _parts(stage, action, output, microbatch)
    messages.wait()
    return totals


def _parts(stage: Stage, action: Action, loss: Tensor, microbatch: Batch) -> Tensor:
    """Return this rank's part of a microbatch's summed loss and of its number of labels.

    Each rank of the head's group has the same samples, and the full loss of them; with Ulysses that of its positions.
    """
    head = stage.chunks[action.chunk].layers[-1]
    counted = (microbatch["labels"][head.samples] != IGNORED).sum().double()
    ranks = head.strategy.tp_size
    split = head.strategy.sequence_parallel is SequenceParallel.ULYSSES
    return torch.stack([loss.double() / (1 if split else ranks), counted / ranks])


def _no_hook(*_: object) -> None:
    """Do nothing: no event of a forward pass is timed, and no auxiliary loss is part of an evaluation."""
