"""`shardwright-train` with a rank that hangs: run by a test it is the command, run by the launcher one of its ranks."""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from shardwright_launch.ranks import launch
from shardwright_train import cli, commands, worker

HANGING_RANK, HANGING_STEP = 1, 3


def _launch_this(command: Sequence[str], *more: Any, **named: Any) -> None:
    launch([sys.executable, __file__, *command[3:]], *more, **named)


def as_command() -> None:
    """The command, whose ranks run this file instead of the worker."""
    with patch.object(commands, "launch", _launch_this):
        cli.main()


def as_rank() -> None:
    """The worker, in which one rank does not come out of its third step."""
    from shardwright_train.pipeline import runner as pipeline

    stock, steps = pipeline.run_step, 0

    def sleep_for_ever(*arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == HANGING_STEP:
            time.sleep(10_000)
        return stock(*arguments, **named)

    if int(os.environ["RANK"]) == HANGING_RANK:
        pipeline.run_step = sleep_for_ever
    worker.main(*sys.argv[1:])


if __name__ == "__main__":
    as_rank() if "RANK" in os.environ else as_command()
