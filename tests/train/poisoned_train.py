"""`shardwright-train` in which a weight becomes NaN: run by a test it is the command, run by the launcher a rank."""

import os
import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch

from shardwright_launch.ranks import launch
from shardwright_train import cli, commands, worker

POISONED_RANK, POISONED_STEP, POISONED_LAYER = 1, 3, 2


def _launch_this(command: Sequence[str], *more: Any, **named: Any) -> None:
    launch([sys.executable, __file__, *command[3:]], *more, **named)


def as_command() -> None:
    """The command, whose ranks run this file instead of the worker."""
    with patch.object(commands, "launch", _launch_this):
        cli.main()


def as_rank() -> None:
    """The worker, in which one rank's share of a layer is no number from its third step on."""
    from shardwright_train.engine.engine import Engine
    from shardwright_train.parallel.data import local_tensor

    stock, steps = Engine.forward_backward, 0

    def poisoned(engine: Engine, *arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == POISONED_STEP:
            layer = next(e for e in engine.stage.layers if e.name == f"layers[{POISONED_LAYER}]")
            with torch.no_grad():
                local_tensor(next(layer.module.parameters())).fill_(torch.nan)
        return stock(engine, *arguments, **named)

    if int(os.environ["RANK"]) == POISONED_RANK:
        Engine.forward_backward = poisoned
    worker.main(*sys.argv[1:])


if __name__ == "__main__":
    as_rank() if "RANK" in os.environ else as_command()
