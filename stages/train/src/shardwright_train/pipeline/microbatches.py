"""The microbatches of a step on a rank: their positions in the order of its plan, and the masks that layers share."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardwright_formats.semantics.chunks import stage_actions
from shardwright_formats.semantics.schedules.passes import Action
from shardwright_formats.types import ITEMSIZE, Attention
from shardwright_models.facts import Mask
from shardwright_train.data.share import DOCUMENTS, Batch
from shardwright_train.models.masks import Places, document_mask, image_masks, padding_mask, shared_mask, window_mask
from shardwright_train.parallel.data import torch_dtype
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.stage import Stage


@dataclass
class Microbatches:
    """The microbatches of a batch, each with the masks that all its layers on this rank read: one for each window.

    They are made for the first chunk of a microbatch, kept here until the last one has them, and then live as
    long as what the layers keep of them for their backward passes.
    """

    stage: Stage
    batch: Batch
    """Batch on the device."""
    _masks: dict[int, Batch] = field(default_factory=dict)

    def taken_by(self, action: Action) -> Batch:
        """Return the microbatch of a forward pass, its layers' masks aside."""
        samples = self.stage.context.share.local_samples
        return {name: x[action.microbatch * samples :][:samples] for name, x in self.batch.items()}

    def masked(self, batch: Batch, action: Action) -> Batch:
        """Return a microbatch with the masks that its layers share, where these differ from another microbatch's."""
        if not self.stage.has_blocks or not (wanted := self._wanted(batch)):
            return batch
        masks = self._masks.pop(action.microbatch, None)
        if masks is None:
            masks = self._made(batch, wanted)
        if action.chunk < len(self.stage.chunks) - 1:
            self._masks[action.microbatch] = masks
        return {**batch, **masks}

    def _wanted(self, batch: Batch) -> tuple[tuple[int | None, Places], ...]:
        """Return the windows and places of this rank's blocks whose masks hold documents, images or padding."""
        context = self.stage.context
        if DOCUMENTS in batch or context.family.facts.images_ahead:
            return context.masks
        padded = context.family.facts.mask is Mask.PADDING and context.attention != Attention.FLASH_ATTENTION_2.value
        return tuple(pair for pair in context.masks if pair[0] is not None) if padded else ()

    def _made(self, batch: Batch, wanted: Sequence[tuple[int | None, Places]]) -> Batch:
        """Return the masks of a microbatch for each of some windows and places."""
        context, mask = self.stage.context, self.stage.context.family.facts.mask
        dtype = torch_dtype(context.plan.precision.compute)
        if (facts := context.family.facts).images_ahead:
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
    """Return a batch on the device, its positions in the order in which ranks hold them; pixels keep theirs.

    The host waits for none of the copies: its side is pinned.
    """
    there = {name: x.to(context.device, non_blocking=True) for name, x in batch.items()}
    if context.order is None:
        return there
    beside = context.family.objective.beside_positions
    return {name: x if name in beside else x[:, context.order] for name, x in there.items()}


def mask_bytes(context: RankContext) -> int:
    """Return the most bytes of masks that a rank holds at once where its samples tell their documents apart."""
    plan, stage = context.plan, context.stage_index
    ranges = plan.stages[stage].layers
    passes, alive, largest = Counter[int](), 0, 0
    for _, microbatch, _ in stage_actions(plan, stage):
        alive += passes[microbatch] == 0
        passes[microbatch] += 1
        largest = max(largest, alive)
        alive -= passes[microbatch] == 2 * len(ranges)
    rows = sum(places.attending.stop - places.attending.start for _, places in context.masks)
    elements: int = largest * context.share.local_samples * rows * plan.model.sequence_length
    return elements * ITEMSIZE[plan.precision.compute]
