"""Activation recomputation: what the backward pass computes again in place of keeping it (Chen et al. 2016)."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright_formats.types.strategy import Recompute
from shardwright_train.parallel.rng import Randomness
from shardwright_train.parallel.sharding_rules import Parts

__all__ = ["apply_activation_checkpointing", "recomputed"]


def apply_activation_checkpointing(
    block: nn.Module, parts: Parts, recompute: Recompute, randomness: Randomness
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
        seeded = _seeded(getattr(holder, attribute), name, randomness, name in chosen.get(recompute, ()))
        setattr(holder, attribute, seeded)


def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function returns, of which only the inputs are kept; it seeds its own random numbers."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


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
