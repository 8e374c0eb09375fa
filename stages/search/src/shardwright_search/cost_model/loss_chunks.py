"""The cost of a head that computes its logits in chunks of positions, and again in the backward pass."""

from typing import NamedTuple

from shardwright.estimate.parts import layer_parts
from shardwright.optimizers.registry import ADAMW, shards_of
from shardwright.plan.axes import axes_of
from shardwright.types import HEAD, ITEMSIZE, Model, Precision, Strategy
from shardwright.types.model_profile import LayerFigures, StateRow


class LossChunks(NamedTuple):
    """The number of chunks in which a rank computes its logits, with the model and precision."""

    number: int
    model: Model
    precision: Precision

    def figures(
        self, whole: LayerFigures[float], strategy: Strategy, samples: int, states: StateRow
    ) -> LayerFigures[float]:
        """Return the figures of a head with chunks, from the figures of a head that computes all logits at once.

        Logits are kept of one chunk; the backward pass repeats the forward one, and adds each chunk's gradients of
        matrices to sums in float32 at least, at the rate at which the optimizer's step was profiled to move bytes.
        """
        kind, axes, itemsize = self.model.types[HEAD], axes_of(strategy), ITEMSIZE[self.precision.compute]
        kept = sum(part.inside for part in layer_parts(self.model, HEAD)[-1:]) / axes.layout.sample_ranks
        kept *= itemsize * axes.rank_samples(samples)
        held, wide = shards_of(kind, states.tp_size), max(itemsize, ITEMSIZE["float32"])
        trained = sum(each.numel for each in held)
        moved = self.number * trained * (itemsize + 2 * wide)
        step_bytes = ADAMW.step_bytes(held, self.precision)
        summed_s = moved * states.optimizer_s / step_bytes if step_bytes else 0.0
        return whole._replace(
            backward_s=whole.backward_s + whole.forward_s + summed_s,
            activation_bytes=max(0.0, whole.activation_bytes - kept * (1 - 1 / self.number)),
            workspace_bytes=whole.workspace_bytes + trained * (itemsize + wide),
        )
