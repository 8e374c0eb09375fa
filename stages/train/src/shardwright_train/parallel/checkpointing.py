"""Activation recomputation: what the backward pass computes again in place of keeping it (Chen et al. 2016)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright_formats.types.strategy import Recompute
from shardwright_train.parallel.rng import Randomness
from shardwright_train.parallel.selective import KeptResults
from shardwright_train.parallel.sharding_rules import Parts


class Recomputation:
    """What recomputes a layer selectively.

    `keeps_last`: whether something is kept behind the layer's last sum over ranks, so that a replay needs that.
    """

    def __init__(self, keeps_last: bool) -> None:
        self._keeps_last = keeps_last
        self._kept: KeptResults | None = None

    def selective(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function returns, of which inputs, products, attention and sums over ranks are kept."""

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            kept = KeptResults(self._keeps_last)
            return self._with(kept, kept.forward()), self._with(kept, kept.replay())

        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    def product(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """A matrix product whose result is summed over ranks, which nothing but the sum needs."""
        return function(*args, **kwargs) if self._kept is None else self._kept.product(function, *args, **kwargs)

    def sum(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The sum over ranks of such a product."""
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
    """What a function returns, of which only the inputs are kept; it seeds its own random numbers."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def part_of(name: str, parts: Parts) -> Recompute:
    """The kind of recomputation that repeats a module of a block: that of attention or that of the rest."""
    inside = (name == own or name.startswith(f"{own}.") for own in parts.attention)
    return Recompute.ATTENTION if any(inside) else Recompute.MLP


def apply_activation_checkpointing(
    block: nn.Module, parts: Parts, recompute: Recompute, randomness: Randomness
) -> None:
    """Recompute a block's attention or MLP where its strategy says so; what is of the whole is up to who calls it.

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
