"""Results that are freed once they have been read, and computed again in the backward pass just before it reads them.

Of a part of a layer, such as a norm, the forward pass keeps the inputs. What reads its results saves, in place of
these, a recipe: the first that asks for one computes the part again, and the part's own backward pass, which comes
last, uses what that computed and forgets it. Megatron-LM's output-discarding checkpoints do the same.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwright_train.torch_private import version_of

Function = Callable[..., Sequence[Tensor]]


class _Recipe:
    """How a part's results are computed again, from the inputs that its node in autograd's graph has saved."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._computed: tuple[list[Tensor], Sequence[Tensor]] | None = None
        self.node: Callable[[], Any]

    def computed(self) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Return the inputs, as leaves of a graph, and the results."""
        if self._computed is None:
            node = self.node()
            saved = zip(node.saved_tensors, node.needed, strict=True)
            inputs = [x.detach().requires_grad_(needed) for x, needed in saved]
            with torch.enable_grad():
                self._computed = inputs, self._function(*inputs)
        return self._computed

    def forget(self) -> None:
        self._computed = None


class _Part(torch.autograd.Function):
    """The results of a part, unchanged, whose backward pass goes through the part computed again."""

    @staticmethod
    def forward(ctx: Any, recipe: _Recipe, results: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        ctx.recipe, ctx.needed, recipe.node = recipe, ctx.needs_input_grad[2:], weakref.ref(ctx)
        return tuple(x.detach() for x in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, results = ctx.recipe.computed()
        ctx.recipe.forget()
        # Gradients of parameters are added where they lie.
        torch.autograd.backward(results, gradients)
        return None, None, *(x.grad for x in inputs)


class _Freed(NamedTuple):
    """What autograd holds of a result, or of a view of it."""

    recipe: _Recipe
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class _Result(NamedTuple):
    recipe: _Recipe
    number: int
    version: int


class FreedResults:
    """The results of one pass through a layer that are freed, while it goes on; saved tensors are told by storage."""

    def __init__(self) -> None:
        self._of_storage = weakref.WeakKeyDictionary[Any, _Result]()

    def part(self, function: Function, results: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the results, which `function` has of the inputs, as those of a part that is computed again."""
        recipe = _Recipe(function)
        given: tuple[Tensor, ...] = _Part.apply(recipe, results, *inputs)  # type: ignore[no-untyped-call]
        for number, x in enumerate(given):
            self._of_storage[x.untyped_storage()] = _Result(recipe, number, version_of(x))
        return given

    @contextmanager
    def freeing(self) -> Iterator[None]:
        """Save recipes instead of results inside."""
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, x: Tensor) -> Tensor | _Freed:
        result = self._of_storage.get(x.untyped_storage())
        if result is None:
            return x
        if version_of(x) != result.version:
            raise RuntimeError("a result that is to be computed again was changed in place")
        return _Freed(result.recipe, result.number, x.size(), x.stride(), x.storage_offset())


def _unpack(kept: Tensor | _Freed) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    _, results = kept.recipe.computed()
    return results[kept.number].detach().as_strided(kept.size, kept.stride, kept.offset)
