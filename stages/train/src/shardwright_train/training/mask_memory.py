"""Device memory of document masks, which no plan counts."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shardwright_formats.types import Prediction
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.microbatches import mask_bytes
from shardwright_train.training.out_of_memory import prediction_of

_MIB = 2**20


def say_mask_memory(file: Path, context: RankContext) -> None:
    """Warn of the memory that document masks take in addition to the prediction; `file` is the plan's."""
    print(f"warning: {mask_memory(context, prediction_of(file, context.plan))}", file=sys.stderr, flush=True)


def mask_memory(context: RankContext, prediction: Prediction | None) -> str:
    """Return a warning of how much memory masks take beyond the prediction, for the rank with the least left."""
    left, rank, masks, predicted, device = min(_ranks(context, prediction))
    said = f"--reset-attention-mask: masks take {masks / _MIB:.1f} MiB of rank {rank}, which its plan does not count"
    if prediction is None:
        return said
    said += f": {(predicted + masks) / _MIB:.1f} MiB with the {predicted / _MIB:.1f} predicted"
    fits = "of" if left >= 0 else f"{-left / _MIB:.1f} more than the"
    return f"{said}, {fits} {device / _MIB:.1f} of its device"


def _ranks(context: RankContext, prediction: Prediction | None) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield what is left of each rank's device, the rank, bytes of masks, bytes predicted, and those of the device."""
    for rank in range(context.plan.world_size):
        there = replace(context, rank=rank)
        masks, device = mask_bytes(there), there.plan.cluster.of_rank(rank).memory_bytes
        predicted = 0 if prediction is None else prediction.estimate.stages[there.stage_index].memory_bytes
        yield device - predicted - masks, rank, masks, predicted, device
