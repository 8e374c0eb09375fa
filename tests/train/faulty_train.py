"""`shardwright-train` with one rank made to fail: a test runs such a file as the command, the launcher as a rank."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

from shardwright_launch.ranks import launch
from shardwright_train import cli, commands, worker


def command_or_rank(file: str, rank: int, make_faulty: Callable[[], None]) -> None:
    """The command, whose ranks run `file` in place of the worker; or the worker, made faulty first on that rank."""

    def launch_this(command: Sequence[str], *more: Any, **named: Any) -> None:
        launch([sys.executable, file, *command[3:]], *more, **named)

    if "RANK" not in os.environ:
        with patch.object(commands, "launch", launch_this):
            cli.main()
        return
    if int(os.environ["RANK"]) == rank:
        make_faulty()
    worker.main(*sys.argv[1:])
