"""Activation recomputation in the backward pass, in place of keeping activations (Chen et al. 2016)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright_formats.types import Recompute
from shardwright_train.parallel.rng import Randomness
from shardwright_train.parallel.selective import KeptResults
from shardwright_train.parallel.sharding_rules import Parts


class Recomputation:
    """The selective recomputation of a layer.

    `keeps_last`: whether something is kept behind the layer's last sum over ranks, so that a replay needs that.
    """

    def __init__(self, keeps_last: bool) -> None:
        self._keeps_last = keeps_last
        self._kept: KeptResults | None = None

    def selective(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return a function's result, keeping its inputs, products, attention and sums over ranks for backward."""

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            kept = KeptResults(self._keeps_last)
            return self._with(kept, kept.forward()), self._with(kept, kept.replay())

        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    def product(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return a matrix product that is summed over ranks and needed by nothing but that sum."""
        return function(*args, **kwargs) if self._kept is None else self._kept.product(function, *args, **kwargs)

    def sum(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return the sum over ranks of a matrix product's partial results."""
        return function(x) if self._kept is None else self._kept.sum(function, x)

    @contextmanager
    def _with(self, kept: KeptResults, keeping: AbstractContextManager[Any]) -> Iterator[None]:
        self._kept = kept
        try:
            with keeping:
                yield
        finally:
            self._kept = None


def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return a function's result, keeping only its inputs; it seeds its own random numbers."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def part_of(name: str, parts: Parts) -> Recompute:
    """Return the kind of recomputation that repeats a module of a block: attention's or the rest's."""
    inside = (name == own or name.startswith(f"{own}.") for own in parts.attention)
    return Recompute.ATTENTION if any(inside) else Recompute.MLP


def apply_activation_checkpointing(
    block: nn.Module, parts: Parts, recompute: Recompute, randomness: Randomness
) -> None:
    """Recompute a block's attention or MLP where its strategy says so; the caller handles recomputing whole blocks.

    Each part draws from a seed of its own, so that it draws the same whether it is recomputed or not.
    """
    for name in (*parts.attention, *parts.mlp):
        owner_name, _, last = name.rpartition(".")
        owner = block.get_submodule(owner_name)
        part = getattr(owner, last)
        holder, attribute = (part, "forward") if isinstance(part, nn.Module) else (owner, last)
        seeded = _seeded(getattr(holder, attribute), name, randomness, part_of(name, parts) is recompute)
        setattr(holder, attribute, seeded)


def _seeded(stock: Callable[..., Any], name: str, randomness: Randomness, recompute: bool) -> Callable[..., Any]:
    @wraps(stock)  # some stock blocks read a part's signature
    def call(*args: Any, **kwargs: Any) -> Any:
        # Of the forward pass: the backward pass, which computes again, has none.
        rng_key = randomness.current

        def run(*args: Any, **kwargs: Any) -> Any:
            if rng_key is None:
                return stock(*args, **kwargs)
            with randomness.seeded(*rng_key, name):
                return stock(*args, **kwargs)

        return recomputed(run, *args, **kwargs) if recompute else run(*args, **kwargs)

    return call
