"""The parts of a stock block that are recomputed one by one: norms, activation functions, matrix products with latents.

What a feed-forward part computes between its first matrix products and its last one (activation function, gate,
dropout) differs between families. It is computed again by calling the stock part with the results of the first
products, up to the last product. In the same way queries, keys and values are computed again, between the matrix
products that make latents and the attention kernel.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from shardwright.types import Recompute, RecomputedPart
from shardwright_train.parallel.checkpointing import Recomputation, part_of, replace_callable
from shardwright_train.parallel.rng import Randomness
from shardwright_train.parallel.sharding_rules import Cut, Parts

FREED_ATTENTION = "shardwright_freed"
"""Name under which transformers' modules find the attention below."""
_LATENTS, _QUERY_LATENTS = "kv_a_proj_with_mqa", "q_a_proj"
_STATES = "hidden_states"


class _Reached(Exception):
    """Raised at the end of what is computed again, to leave the stock module."""

    def __init__(self, results: tuple[Tensor, ...]) -> None:
        self.results = results


class Between:
    """What a callable of a block computes between its first matrix products and the callable that reads the results.

    `reads`: whether it computes something else from its input states than these matrix products.
    """

    def __init__(
        self, block: nn.Module, entry: str, recomputation: Recomputation, randomness: Randomness, reads: bool = False
    ) -> None:
        self._recomputation, self._randomness, self._reads = recomputation, randomness, reads
        self._products: list[Tensor] = []
        self._given: list[Tensor] | None = None
        self._call: Callable[[Tensor], Any]
        self._repeating: Callable[[], Any] = nullcontext
        replace_callable(block, entry, self._entered)

    def first(self, stock: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return one of the first matrix products, changed to keep its result."""

        def product(x: Tensor) -> Tensor:
            if self._given is not None:
                return self._given.pop(0)
            if not self._products and not self._begins:
                return stock(x)
            with torch.enable_grad():
                y = stock(x)
            self._keep(y)
            return y.detach()

        return product

    def last(self, stock: Callable[..., Any], read: int = 1) -> Callable[..., Any]:
        """Return the callable that reads the results, as its first `read` arguments, changed to free them."""

        def reader(*args: Any, **kwargs: Any) -> Any:
            if self._given is not None:
                raise _Reached(args[:read])
            if not self._products:
                return stock(*args, **kwargs)
            torch.set_grad_enabled(True)
            products, self._products = self._products, []
            again = partial(self._again, self._call, self._repeating)
            return stock(*self._recomputation.part(again, args[:read], *products), *args[read:], **kwargs)

        return reader

    @property
    def _begins(self) -> bool:
        return self._recomputation.frees and torch.is_grad_enabled()

    def _keep(self, x: Tensor) -> None:
        """Keep an input of the part. The part runs without gradients; its graph is made when it is computed again."""
        if not self._products:
            self._repeating = self._randomness.repeating()
            torch.set_grad_enabled(False)
        self._products.append(x)

    def _entered(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            if self._given is None:
                named = {name: value for name, value in kwargs.items() if name != _STATES}
                self._call = partial(_with_states, stock, args[1:], named, _STATES in kwargs)
                if self._reads and self._begins:
                    self._keep(kwargs[_STATES] if _STATES in kwargs else args[0])
            return stock(*args, **kwargs)

        return entered

    def _again(
        self, call: Callable[[Tensor], Any], repeating: Callable[[], Any], *products: Tensor
    ) -> Sequence[Tensor]:
        self._given = list(products)
        # If only the first products read the states, then only the shape of the states matters.
        states = self._given.pop(0) if self._reads else products[0]
        try:
            with repeating():
                return (call(states),)
        except _Reached as reached:
            return reached.results
        finally:
            self._given = None


def _with_states(
    stock: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any], by_name: bool, states: Tensor
) -> Any:
    return stock(*args, **named, **{_STATES: states}) if by_name else stock(states, *args, **named)


class RecomputedParts:
    """The parts of a block that its strategy recomputes one by one: found first, changed after tensor parallelism.

    Blocks without such parts, and layer types without attention and MLP parts, are left as they are.
    """

    def __init__(
        self,
        block: nn.Module,
        parts: Parts,
        cut_of: Mapping[str, Cut],
        recompute: Recompute,
        recomputation: Recomputation,
        randomness: Randomness,
    ) -> None:
        self._block, self._recomputation = block, recomputation
        self._asked = recompute.parts if parts.attention or parts.mlp else frozenset()
        self._fed: tuple[Between, Sequence[str]] | None = None
        self._attends: list[tuple[Between, str]] = []
        if RecomputedPart.ACTIVATIONS in self._asked and (names := _feed_forward(block, parts, cut_of)):
            entry = _common(names) or _common(names[:-1]) or parts.mlp[0]
            self._fed = Between(block, entry, recomputation, randomness), names
        if RecomputedPart.LATENTS in self._asked:
            for name, module in block.named_modules():
                if hasattr(module, _LATENTS):
                    reads = getattr(module, _QUERY_LATENTS, None) is None
                    self._attends.append((Between(block, name, recomputation, randomness, reads), name))

    def apply(self) -> None:
        """Change the block, after tensor parallelism has changed it."""
        if self._fed is not None:
            between, (*first, last) = self._fed
            for name in first:
                replace_callable(self._block, name, between.first)
            replace_callable(self._block, last, between.last)
        for between, name in self._attends:
            for product in (_LATENTS, _QUERY_LATENTS):
                if getattr(self._block.get_submodule(name), product, None) is not None:
                    replace_callable(self._block, f"{name}.{product}", between.first)
            _attend_by(self._block.get_submodule(name), between)
        if RecomputedPart.NORMS in self._asked:
            for name, module in self._block.named_modules():
                if name and "norm" in type(module).__name__.lower():
                    replace_callable(self._block, name, lambda stock: partial(self._recomputation.freed, stock))


def _feed_forward(block: nn.Module, parts: Parts, cut_of: Mapping[str, Cut]) -> list[str]:
    """Return the names of the matrix products of a block's feed-forward part in order, without experts; maybe none."""
    names: list[str] = []
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and not any(name.startswith(f"{other}.") for other in names):
            names.append(name)
    rules = {name: cut_of[f"{name}.weight"].rule for name in names if f"{name}.weight" in cut_of}
    split = [name for name, rule in rules.items() if rule is not None and rule.kind in ("column", "row", "cut")]
    return [name for name in split if part_of(name, parts) is Recompute.MLP]


def _common(names: Sequence[str]) -> str:
    """Return the path of the innermost module that contains all of these modules; empty if it is the block."""
    paths = [name.split(".")[:-1] for name in names]
    shared = zip(*paths, strict=False)
    length = next((i for i, words in enumerate(shared) if len(set(words)) > 1), min(map(len, paths)))
    return ".".join(paths[0][:length])


def _attend_by(module: Any, between: Between) -> None:
    """Make an attention module call its kernel so that queries, keys and values are freed."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    kernel = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
    # `seen` is what the kernel reads: the stock module, as it was.
    seen, module.config = copy(module), copy(module.config)
    module.config._attn_implementation = FREED_ATTENTION
    module.freed_attention = between.last(partial(kernel, seen), read=3)


def _attention(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module.freed_attention(*args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(FREED_ATTENTION, _attention)
