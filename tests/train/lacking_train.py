"""A rank lacks memory for a plan, in the backward pass of the second microbatch of the second step."""

import os
from typing import Any

import torch
from faulty_train import command_or_rank

LACKING_PLAN, LACKING_RANK = "lacking", 1
WORDS = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.25 GiB"


def make_faulty() -> None:
    """Raise what PyTorch raises on a GPU."""
    from shardwright_train.measurement import measure
    from shardwright_train.pipeline.stage import Chunk

    stock, passes = Chunk.prepare_backward, 0

    def prepare(chunk: Chunk, *arguments: Any, **named: Any) -> None:
        nonlocal passes
        if chunk.layers[0].name and os.environ.get("LACKING") == "yes":
            passes += 1
            if passes == 4:
                raise torch.OutOfMemoryError(WORDS)
        stock(chunk, *arguments, **named)

    build = measure._Runner.build

    def noted(plan: Any, *arguments: Any) -> Any:
        os.environ["LACKING"] = "yes" if plan.name == LACKING_PLAN else "no"
        return build(plan, *arguments)

    Chunk.prepare_backward = prepare  # type: ignore[method-assign]
    measure._Runner.build = noted  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    command_or_rank(__file__, LACKING_RANK, make_faulty)
