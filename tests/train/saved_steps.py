"""Checkpoints of a few steps, for tests of what becomes of them."""

from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from random_plans import random_plan
from tiny_models import tiny
from torch import Tensor

from shardwright_train.checkpoints.folders import Identity, Progress
from shardwright_train.checkpoints.tensors import Saver
from shardwright_train.options import RunOptions

JOB = RunOptions(plan=Path(), data=Path(), out=Path(), checkpoints=Path(), steps=1, learning_rate=1e-3)
PLAN = random_plan(tiny("llama"), 1, 2)
IDENTITY = msgspec.structs.replace(Identity.of_run(JOB, PLAN, data_sha256="3" * 64), global_batch_size=8, seed=7)


def tensors_of(step: int) -> dict[str, Tensor]:
    return {name: torch.full((5, 3), step + i / 8) for i, name in enumerate(("weight", "optim.weight.exp_avg"))}


def saver_of(folder: Path, **changes: object) -> Saver:
    fields = {
        "folder": folder,
        "identity": IDENTITY,
        "parent": None,
        "keep_last": 3,
        "keep_every": 0,
        "asynchronous": False,
        "group": dist.group.WORLD,
        "bytes_in_all": 120,
    }
    return Saver(**fields | changes)  # type: ignore[arg-type]


def progress_of(step: int) -> object:
    return msgspec.structs.replace(Progress.begin(1.0), step=step, samples=8 * step)


def saved_steps(folder: Path, **changes: object) -> Path:
    """A run's folder with checkpoints of steps 2, 4 and 6."""
    folder.mkdir()
    for step in (2, 4, 6):
        saver_of(folder, **changes).save(tensors_of(step), progress_of(step))  # type: ignore[arg-type]
    return folder


def shard_of(checkpoint: Path) -> Path:
    (shard,) = checkpoint.glob("*.safetensors")
    return shard
