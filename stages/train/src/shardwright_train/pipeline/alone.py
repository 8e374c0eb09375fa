"""A pipeline stage without its neighbours, up to where it holds the most: to see whether its memory suffices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright_formats.semantics.schedules.passes import Action, Pass
from shardwright_train.pipeline.p2p import Pipeline, Port

_ADDS = 2
"""Backward passes of a chunk until one adds to gradients that are there."""


@dataclass(frozen=True)
class StageAlone(Pipeline):
    """A rank's place in a pipeline that is not there: inputs and gradients have their shapes, and no values."""

    @classmethod
    def of_pipeline(cls, pipeline: Pipeline) -> "StageAlone":
        """The same place; nothing is sent or received."""
        incoming, outgoing = (
            {key: _cut_off(port) for key, port in ports.items()} for ports in (pipeline.incoming, pipeline.outgoing)
        )
        return cls(pipeline.context, incoming, outgoing)

    def actions(self) -> tuple[Action, ...]:
        """What the rank does in a step, of the microbatches alone that it takes to hold the most."""
        return until_fullest(super().actions())


def until_fullest(actions: Sequence[Action]) -> tuple[Action, ...]:
    """A stage's actions of the microbatches that begin before every chunk has added to gradients that were there.

    From then on each forward pass takes what a backward pass has given back: no more is held at any later time.
    """
    chunks, gone, begun = {action.chunk for action in actions}, dict[int, int](), set[int]()
    for kind, microbatch, chunk in actions:
        begun.add(microbatch)
        gone[chunk] = gone.get(chunk, 0) + (kind is Pass.BACKWARD)
        if all(gone.get(each, 0) >= _ADDS for each in chunks):
            break
    return tuple(action for action in actions if action.microbatch in begun)


def _cut_off(port: Port) -> Port:
    """The port with messages that stay here: they hold their memory as long as they would on their way."""
    return replace(port, pieces=tuple(tuple(piece._replace(group=None) for piece in pieces) for pieces in port.pieces))
