"""`shardwright-train` whose rank 1 lacks memory for a plan: run by a test it is the command, by the launcher a rank."""

import os
import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch

from shardwright_launch.ranks import launch
from shardwright_train import cli, commands, worker

LACKING_PLAN, LACKING_RANK = "lacking", 1
WORDS = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.25 GiB"


def _launch_this(command: Sequence[str], *more: Any, **named: Any) -> None:
    launch([sys.executable, __file__, *command[3:]], *more, **named)


def as_command() -> None:
    """The command, whose ranks run this file instead of the worker."""
    with patch.object(commands, "launch", _launch_this):
        cli.main()


def as_rank() -> None:
    """The worker, in which a rank lacks memory in the backward pass of the second microbatch of the second step."""
    from shardwright_train.pipeline.stage import Chunk

    stock, passes = Chunk.prepare_backward, 0

    def prepare(chunk: Chunk, *arguments: Any, **named: Any) -> None:
        nonlocal passes
        if chunk.layers[0].name and os.environ.get("LACKING") == "yes":
            passes += 1
            if passes == 4:
                raise torch.OutOfMemoryError(WORDS)
        stock(chunk, *arguments, **named)

    from shardwright_train.measurement import measure

    build = measure._Runner.build

    def noted(plan: Any, *arguments: Any) -> Any:
        os.environ["LACKING"] = "yes" if plan.name == LACKING_PLAN else "no"
        return build(plan, *arguments)

    if int(os.environ["RANK"]) == LACKING_RANK:
        Chunk.prepare_backward = prepare  # type: ignore[method-assign]
        measure._Runner.build = noted  # type: ignore[method-assign, assignment]
    worker.main(*sys.argv[1:])


if __name__ == "__main__":
    as_rank() if "RANK" in os.environ else as_command()
