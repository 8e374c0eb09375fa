"""Run by the launcher, one process per rank: training jobs one after the other, from a given loss scale."""

import math
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch

from shardwright.io import ShardwrightError
from shardwright_train.engine.optimizer import ShardedOptimizer
from shardwright_train.options import RunOptions, decode_job
from shardwright_train.parallel.world import joined_world
from shardwright_train.training import stopping
from shardwright_train.training.loop import train


def main(start: str, *job_files: str) -> None:
    """Train; a job that fails leaves its error's words beside it, and the next one begins.

    The gradients of a job called `endless` overflow at every scale.
    """
    with joined_world("cpu") as world, patch.object(stopping, "_START", float(start)):
        for file in map(Path, job_files):
            infinite = patch.object(
                ShardedOptimizer, "_squared_norm", lambda _: torch.tensor(math.inf, dtype=torch.float64)
            )
            try:
                with infinite if file.stem == "endless" else nullcontext():
                    job = decode_job(file.read_bytes())
                    assert isinstance(job, RunOptions)
                    train(job, world)
            except ShardwrightError as error:
                file.with_suffix(".error").write_text(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
