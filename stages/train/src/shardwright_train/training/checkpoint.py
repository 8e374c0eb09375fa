"""Saving and loading a run's state with torch.distributed.checkpoint, under the plan's identity."""

import json
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.json import write_bytes
from shardwright_train.training.checkpoint_names import PROGRESS

_STEP = "step-{:08d}"


@dataclass(frozen=True)
class Progress:
    """How far a run has come, and what it must be continued with."""

    step: int
    plan_sha256: str
    data_sha256: str
    seed: int
    first_loss: float
    last_loss: float
    wall_s: float
    updates: int
    """Steps in which the optimizer changed the weights: all but those in which float16 overflowed."""
    loss_scale: float
    steps_without_overflow: int


def read_progress(checkpoint: Path) -> Progress:
    """What a checkpoint says of itself; BadInput when it is none."""
    file = checkpoint / PROGRESS
    try:
        found = json.loads(file.read_bytes())
        if isinstance(found, dict) and found.keys() < {field.name for field in fields(Progress)}:
            what = "was saved by an earlier version, which took the samples in another order"
            raise BadInput(file, what, "go on with that version, or start anew in another --checkpoints folder")
        return Progress(**found)
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(file, f"no readable checkpoint ({error})", "name the folder of a step, step-…") from None


def save(folder: Path, tensors: dict[str, Tensor], progress: Progress, keep: int) -> Path:
    """Save from all ranks, complete or not at all, and remove all but the latest `keep` checkpoints."""
    target = folder / _STEP.format(progress.step)
    unfinished = target.with_suffix(".unfinished")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    state_dict_saver.save(tensors, checkpoint_id=unfinished)
    if first:
        # Last, because its presence says that the rest is there.
        write_bytes(unfinished / PROGRESS, json.dumps(asdict(progress)).encode())
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
        for old in sorted(folder.glob("step-????????"))[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return target


def load(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    """Fill the tensors of every rank, in place, from a checkpoint of this project's own writing."""
    state_dict_loader.load(tensors, checkpoint_id=checkpoint)
