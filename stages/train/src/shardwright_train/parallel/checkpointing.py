"""Activation recomputation: what the backward pass computes again in place of keeping it (Chen et al. 2016)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright_formats.types.strategy import Recompute
from shardwright_train.parallel.rng import Randomness
from shardwright_train.parallel.selective import KeptResults
from shardwright_train.parallel.sharding_rules import Parts

__all__ = ["Recomputation", "apply_activation_checkpointing"]

_Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


class Recomputation:
    """What runs those parts of a layer that are recomputed.

    `keeps_last`: whether something is kept behind the layer's last sum over ranks, so that a replay needs that.
    """

    def __init__(self, keeps_last: bool) -> None:
        self.active = False
        """Whether what is computed now is not kept: the backward pass will compute it again, or is doing so."""
        self._keeps_last = keeps_last
        self._kept: KeptResults | None = None

    def full(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function returns, of which only the inputs are kept; it seeds its own random numbers."""
        return _checkpoint(function, lambda: (self._inside(), self._inside()), *args, **kwargs)

    def selective(self, function: Callable[..., Any], *args: Any) -> Any:
        """The same, of which results of matrix products, attention and sums over ranks are kept, too."""

        def contexts() -> _Contexts:
            kept = KeptResults(self._keeps_last)
            return self._inside(kept, kept.forward()), self._inside(kept, kept.replay())

        return _checkpoint(function, contexts, *args)

    def product(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """A matrix product whose result is summed over ranks, which nothing but the sum needs."""
        return function(*args, **kwargs) if self._kept is None else self._kept.product(function, *args, **kwargs)

    def sum(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The sum over ranks of such a product."""
        return function(x) if self._kept is None else self._kept.sum(function, x)

    @contextmanager
    def _inside(
        self, kept: KeptResults | None = None, keeping: AbstractContextManager[Any] | None = None
    ) -> Iterator[None]:
        before = self.active, self._kept
        self.active, self._kept = True, kept
        try:
            with keeping or nullcontext():
                yield
        finally:
            self.active, self._kept = before


def apply_activation_checkpointing(
    block: nn.Module, parts: Parts, recompute: Recompute, randomness: Randomness, recomputation: Recomputation
) -> None:
    """Recompute a block's attention or MLP where its strategy says so; what is of the whole is up to who calls it.

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


def _checkpoint(function: Callable[..., Any], contexts: Callable[[], _Contexts], *args: Any, **kwargs: Any) -> Any:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    return checkpoint(function, *args, **options, **kwargs)


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

        return run(*args, **kwargs) if again is None else again.full(run, *args, **kwargs)

    return call
