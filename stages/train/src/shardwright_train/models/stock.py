"""The stock models of transformers, without weights, and the modules taken out of them."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from shardwright_train.parallel.tensor import TensorParallel

_REFUSALS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)


class Pieces(nn.Module):
    """Modules of a stock model under their paths in it, and the computation with them."""

    tensor_parallel: TensorParallel
    """Tensor parallelism of the pieces; set where they are sharded."""

    def __init__(self, stock: Any, paths: tuple[str, ...], compute: Callable[..., Any]) -> None:
        super().__init__()
        self.config, self.compute = stock.config, compute
        for path in paths:
            owner: nn.Module = self
            *above, last = path.split(".")
            for name in above:
                if not hasattr(owner, name):
                    owner.add_module(name, nn.Module())
                owner = owner.get_submodule(name)
            owner.add_module(last, copy.deepcopy(stock.get_submodule(path)))

    def through(self, paths: tuple[str, ...], states: Tensor) -> Tensor:
        """Return the states after some of the pieces, one after the other."""
        for path in paths:
            states = self.get_submodule(path)(states)
        return states

    def forward(self, *inputs: Any) -> Any:
        """Call the family's function with the pieces and the inputs."""
        return self.compute(self, *inputs)


def skeleton(stock: Any, config: Any) -> Any:
    """Return a stock model with parameters on the meta device; raise ValueError where transformers cannot build it."""
    with refusals(), torch.device("meta"):
        return stock(config)


@contextmanager
def refusals() -> Iterator[None]:
    """Raise any error of transformers about a configuration as a ValueError of one line."""
    try:
        yield
    except _REFUSALS as error:
        words = " ".join(str(error).split())
        raise ValueError(f"transformers cannot build it ({type(error).__name__}: {words})") from None
