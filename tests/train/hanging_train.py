"""One rank does not come out of its third step."""

import time
from typing import Any

from faulty_train import command_or_rank

HANGING_RANK, HANGING_STEP = 1, 3


def make_faulty() -> None:
    """Sleep in place of the step."""
    from shardwright_train.pipeline import runner as pipeline

    stock, steps = pipeline.run_step, 0

    def sleep_for_ever(*arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == HANGING_STEP:
            time.sleep(10_000)
        return stock(*arguments, **named)

    pipeline.run_step = sleep_for_ever


if __name__ == "__main__":
    command_or_rank(__file__, HANGING_RANK, make_faulty)
