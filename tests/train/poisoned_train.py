"""One rank's share of a layer is no number from its third step on."""

from typing import Any

import torch
from faulty_train import command_or_rank

POISONED_RANK, POISONED_STEP, POISONED_LAYER = 1, 3, 2


def make_faulty() -> None:
    """Fill the layer's first parameter."""
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

    Engine.forward_backward = poisoned


if __name__ == "__main__":
    command_or_rank(__file__, POISONED_RANK, make_faulty)
