"""A rank lacks memory in the backward pass of its second step."""

from typing import Any

import torch
from faulty_train import command_or_rank
from lacking_train import WORDS


def make_faulty() -> None:
    """Raise what PyTorch raises on a GPU."""
    from shardwright_train.pipeline.stage import Chunk

    stock, passes = Chunk.prepare_backward, 0

    def prepare(chunk: Chunk, *arguments: Any, **named: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == 2:
            raise torch.OutOfMemoryError(WORDS)
        stock(chunk, *arguments, **named)

    Chunk.prepare_backward = prepare  # type: ignore[method-assign]


if __name__ == "__main__":
    command_or_rank(__file__, 1, make_faulty)
