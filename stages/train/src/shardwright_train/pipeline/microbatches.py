"""The microbatches of a rank's share of a global batch, each with the mask that its layers share."""

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from shardwright_formats.semantics.chunks import stage_actions
from shardwright_formats.semantics.schedules.passes import Action
from shardwright_formats.types import ITEMSIZE
from shardwright_models.facts import Mask
from shardwright_train.data.share import DOCUMENTS, Batch
from shardwright_train.models.masks import MASK, document_mask
from shardwright_train.parallel.data import torch_dtype
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.stage import Stage


@dataclass
class Microbatches:
    """The microbatches of a batch, each with the one mask that all its layers on this rank read.

    The mask is made for the first chunk of a microbatch, kept here until the last one has it, and then lives as long as
    what the layers keep of it for their backward passes.
    """

    stage: Stage
    batch: Batch
    """Batch on the device."""
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def taken_by(self, action: Action) -> Batch:
        """Return the microbatch of a forward pass, its layers' mask aside."""
        samples = self.stage.context.share.of_each
        return {name: x[action.microbatch * samples :][:samples] for name, x in self.batch.items()}

    def masked(self, batch: Batch, action: Action) -> Batch:
        """Return a microbatch with the mask that its layers share, where its samples tell their documents apart."""
        context = self.stage.context
        if DOCUMENTS not in batch or not self.stage.has_blocks:
            return batch
        mask = self._masks.pop(action.microbatch, None)
        if mask is None:
            padding = batch["attention_mask"] if context.family.facts.mask is Mask.PADDING else None
            mask = document_mask(batch[DOCUMENTS], torch_dtype(context.plan.precision.compute), padding)
        if action.chunk < len(self.stage.chunks) - 1:
            self._masks[action.microbatch] = mask
        return {**batch, MASK: mask}


def mask_bytes(context: RankContext) -> int:
    """Return the most bytes of masks that a rank holds at once where its samples tell their documents apart."""
    plan, stage = context.plan, context.stage_index
    ranges = plan.stages[stage].layers
    if all(low == high for low, high in ranges):
        return 0
    passes, alive, largest = Counter[int](), 0, 0
    for _, microbatch, _ in stage_actions(plan, stage):
        alive += passes[microbatch] == 0
        passes[microbatch] += 1
        largest = max(largest, alive)
        alive -= passes[microbatch] == 2 * len(ranges)
    return largest * context.share.of_each * plan.model.sequence_length**2 * ITEMSIZE[plan.precision.compute]
