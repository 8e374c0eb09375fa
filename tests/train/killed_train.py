"""A rank that is killed in a send, when it is started anew in a collective, and then no more."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faulty_train import command_or_rank

KILLED_RANK, KILLED_STEP = 1, 3


def make_faulty() -> None:
    """Kill this process in the call that this start is for; the folder in KILLS holds a file for each start before."""
    import torch.distributed as dist

    from shardwright_train.engine.engine import Engine

    start = len(list(Path(os.environ["KILLS"]).iterdir()))
    Path(os.environ["KILLS"], str(start)).touch()
    name = ("isend", "all_reduce", None)[start]
    stock_step, steps = Engine.train_step, 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        return stock_step(*arguments, **named)

    def killing(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if steps == KILLED_STEP:
                os.kill(os.getpid(), signal.SIGKILL)
            return stock(*arguments, **named)

        return call

    Engine.train_step = counted  # type: ignore[method-assign]
    if name is not None:
        setattr(dist, name, killing(getattr(dist, name)))


if __name__ == "__main__":
    command_or_rank(__file__, KILLED_RANK, make_faulty)
