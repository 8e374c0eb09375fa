"""A pipeline stage without its neighbours, run up to its peak memory, to see whether its device suffices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright_formats.semantics.schedules.passes import Action, Pass
from shardwright_train.pipeline.p2p import Pipeline, Port

_ADDS = 2
"""Number of backward passes of a chunk until one adds to existing gradients."""


@dataclass(frozen=True)
class StageAlone(Pipeline):
    """A rank's place in a simulated pipeline: inputs and gradients have their shapes, and no values."""

    @classmethod
    def of_pipeline(cls, pipeline: Pipeline) -> "StageAlone":
        """Return the place of a rank in a pipeline, without sends and receives."""
        incoming, outgoing = (
            {key: _cut_off(port) for key, port in ports.items()} for ports in (pipeline.incoming, pipeline.outgoing)
        )
        return cls(pipeline.context, incoming, outgoing)

    def actions(self) -> tuple[Action, ...]:
        """Return the rank's actions in a step, for as many microbatches as reach its peak memory."""
        return until_fullest(super().actions())


def until_fullest(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return a stage's actions of the microbatches that begin before every chunk has added to existing gradients.

    From then on each forward pass reuses memory that a backward pass has freed: the peak does not grow further.
    """
    chunks, gone, begun = {action.chunk for action in actions}, dict[int, int](), set[int]()
    for kind, microbatch, chunk in actions:
        begun.add(microbatch)
        gone[chunk] = gone.get(chunk, 0) + (kind is Pass.BACKWARD)
        if all(gone.get(each, 0) >= _ADDS for each in chunks):
            break
    return tuple(action for action in actions if action.microbatch in begun)


def _cut_off(port: Port) -> Port:
    """Return the port with messages that stay here, and hold their memory as long as real ones."""
    return replace(port, pieces=tuple(tuple(piece._replace(group=None) for piece in pieces) for pieces in port.pieces))
