"""Activation recomputation: what the backward pass computes again in place of keeping it (Chen et al. 2016)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright_formats.types.strategy import Recompute
from shardwright_train.parallel.rng import Randomness
from shardwright_train.parallel.sharding_rules import Parts

__all__ = ["Recomputation", "apply_activation_checkpointing"]


class Recomputation:
    """What a layer recomputes, and whether it is computing that now."""

    def __init__(self) -> None:
        self.active = False
        """Whether nothing that is computed now is kept: the backward pass computes it again, or is doing so."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function returns, of which only the inputs are kept; it seeds its own random numbers."""
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": self._contexts}
        return checkpoint(function, *args, **options, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return self._inside(), self._inside()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before


def apply_activation_checkpointing(
    block: nn.Module, parts: Parts, recompute: Recompute, randomness: Randomness, recomputation: Recomputation
) -> None:
    """Recompute a block's attention or MLP where its strategy says so; `FULL` is up to who calls the block.

    Each part draws from a seed of its own, so that it draws the same whether it is recomputed or not.
    """
    chosen: dict[Recompute, Sequence[str]] = {Recompute.ATTENTION: parts.attention, Recompute.MLP: parts.mlp}
    for name in (*parts.attention, *parts.mlp):
        owner_name, _, last = name.rpartition(".")
        owner = block.get_submodule(owner_name)
        part = getattr(owner, last)
        holder, attribute = (part, "forward") if isinstance(part, nn.Module) else (owner, last)
        again = recomputation if name in chosen.get(recompute, ()) else None
        setattr(holder, attribute, _seeded(getattr(holder, attribute), name, randomness, again))


def _seeded(
    stock: Callable[..., Any], name: str, randomness: Randomness, again: Recomputation | None
) -> Callable[..., Any]:
    @wraps(stock)  # some stock blocks read a part's signature
    def call(*args: Any, **kwargs: Any) -> Any:
        # Of the forward pass: the backward pass, which computes again, has none.
        rng_key = randomness.current

        def run(*args: Any, **kwargs: Any) -> Any:
            if rng_key is None:
                return stock(*args, **kwargs)
            with randomness.seeded(*rng_key, name):
                return stock(*args, **kwargs)

        return run(*args, **kwargs) if again is None else again(run, *args, **kwargs)

    return call
