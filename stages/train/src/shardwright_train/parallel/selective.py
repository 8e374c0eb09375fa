"""Selective recomputation keeps results of matrix products, of attention, and of sums over ranks.

The result of a product that is summed over ranks is not kept: a replay reuses the kept sum, and omits the product.
PyTorch's own contexts for it refuse a replay that omits something.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright_train.parallel.collectives import with_transpose
from shardwright_train.torch_private import TorchDispatchMode

_ATTENTION = ("aten::_scaled_dot_product_", "flash_attn::_flash_attn_")


def is_product(operator: Any) -> bool:
    """Return whether an operator is a product with weights."""
    return operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def is_attention(operator: Any) -> bool:
    """Return whether an operator computes attention as a whole."""
    name: str = operator.name()
    return name.startswith(_ATTENTION)


class KeptResults(TorchDispatchMode):
    """Kept results of one pass through a layer, in order, for its replay, which needs the last sum if `keeps_last`."""

    def __init__(self, keeps_last: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeps_last = keeps_last
        self._results: list[Any] = []
        self._replays = self._is_summed = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record results during the forward pass."""
        with self:
            yield
        if not self._keeps_last:
            self._results.pop()
        self._replays = True

    def replay(self) -> AbstractContextManager[Any]:
        """Return the context of the replay in the backward pass."""
        return self

    def product(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return a matrix product whose result is summed over ranks."""
        self._is_summed = True
        result = function(*args, **kwargs)
        self._is_summed = False
        return result

    def sum(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return the sum over ranks of a matrix product's partial results."""
        if self._replays:
            kept = self._results.pop(0)
            return with_transpose(x, lambda _: kept, lambda gradient: gradient)
        x = function(x)
        self._results.append(x.detach())
        return x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = is_product(func)
        if self._replays and product and self._is_summed:
            rows, columns = args[-2:]
            return rows.new_empty(rows.shape[0], columns.shape[1])  # nothing reads it
        if not (is_attention(func) or (product and not self._is_summed)):
            return func(*args, **(kwargs or {}))
        if self._replays:
            return self._results.pop(0)
        result = func(*args, **(kwargs or {}))
        self._results.append(tuple(map(_detached, result)) if isinstance(result, tuple) else _detached(result))
        return result


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x
