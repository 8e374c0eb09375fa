"""Activation recomputation in the backward pass (Chen et al. 2016), for plain and compiled blocks.

Selective recomputation keeps the results of matrix products, of attention, and of sums over ranks; of ring attention it
keeps the merged result. The result of a matrix product that is summed over ranks is not kept: a replay reuses the
kept sum, and omits the product. PyTorch's own contexts refuse a replay that omits something. Parts of a layer, such as
a norm, can be recomputed one by one: then their results are freed.

Only a compiled block's computation is compiled; FSDP2's hooks around it are not. What a strategy recomputes or gathers
again is part of the graph, in which PyTorch restores the random state: parts need no seeds of their own.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardwright.types import Recompute, RecomputedPart
from shardwright_train.parallel.attention_blocks import Attended
from shardwright_train.parallel.collectives import with_transpose
from shardwright_train.parallel.rng import Randomness
from shardwright_train.parallel.sharding_rules import Parts
from shardwright_train.torch_private import (
    TorchDispatchMode,
    collective_operators,
    compiled,
    grouped_product,
    version_of,
)

# Results that are freed once they have been read, and computed again in the backward pass just before it reads them.
#
# Of a part of a layer the forward pass keeps only the inputs. Operations that read the part's results save a recipe in
# place of them. In the backward pass the first operation that needs a result computes the part again; the part's own
# backward pass, which comes last, uses these results and forgets them. Megatron-LM's output-discarding checkpoints do
# the same.


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
    """What autograd saves in place of a result, or of a view of it."""

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
    """The freed results of one pass through a layer, while it runs; saved tensors are recognized by their storages."""

    def __init__(self) -> None:
        self._of_storage = weakref.WeakKeyDictionary[Any, _Result]()

    def part(self, function: Function, results: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return `results`; the backward pass computes them again, as `function` of the inputs."""
        recipe = _Recipe(function)
        given: tuple[Tensor, ...] = _Part.apply(recipe, results, *inputs)  # type: ignore[no-untyped-call]
        for number, x in enumerate(given):
            self._of_storage[x.untyped_storage()] = _Result(recipe, number, version_of(x))
        return given

    @contextmanager
    def freeing(self) -> Iterator[None]:
        """Make autograd save recipes instead of these results inside the `with` block."""
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


# What a layer recomputes: all of it, what selective recomputation does not keep, or parts.


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, grouped_product)
_ATTENTION = ("aten::_scaled_dot_product_", "flash_attn::_flash_attn_")
_GATHER = (
    collective_operators.all_gather_into_tensor.default,
    collective_operators.wait_tensor.default,
    torch.ops.aten.cat.default,
    torch.ops.aten.copy_.default,
    torch.ops.aten.new_empty.default,
)
_SUMS = (collective_operators.all_reduce.default, collective_operators.reduce_scatter_tensor.default)
_Policy = Callable[..., CheckpointPolicy]


class KeptResults(TorchDispatchMode):
    """Saved results of one pass through a layer, in order, for its recomputation."""

    def __init__(self, keeps_last: bool, splits: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeps_last = keeps_last
        self._may_lack_last = splits and not keeps_last
        self._results: list[Any] = []
        self._replays = self._is_summed = self._repeats = self._is_whole = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record results during the forward pass; used once more, the mode replays."""
        with self:
            yield
        if not self._keeps_last:
            self._results.pop()
        self._replays = True

    def product(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return a matrix product whose result is only needed for a sum over ranks: it is not kept."""
        self._is_summed = True
        result = function(*args, **kwargs)
        self._is_summed = False
        return result

    def again(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Return a function's result without keeping its matrix products."""
        self._repeats = True
        result = function(*args)
        self._repeats = False
        return result

    def whole(self, function: Callable[[], Attended]) -> Attended:
        """Return the attention that a function computes; its result is saved instead of its parts."""
        if self._replays:
            kept: Attended = self._results.pop(0)
            return kept
        self._is_whole = True
        attended = function()
        self._is_whole = False
        self._results.append(Attended(*map(_detached, attended)))
        return attended

    def sum(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return the sum over ranks, by `function`, of a matrix product's parts; a replay returns the kept sum."""
        if self._replays:
            kept = self._results.pop(0)
            return with_transpose(x, lambda _: kept, lambda gradient: gradient)
        x = function(x)
        self._results.append(x.detach())
        return x

    def _unread(self, args: Sequence[Tensor]) -> Tensor:
        """Return an empty result, once, in place of the last matrix product, whose result is not kept.

        With split backward passes it is replayed only for its input. A joint pass never replays it: if it does, then
        a result that something reads was lost.
        """
        if not self._may_lack_last:
            raise RuntimeError("a replay has more products than the pass that it repeats")
        self._may_lack_last = False
        return args[-2].new_empty(args[-2].shape[0], args[-1].shape[-1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_whole:
            return func(*args, **(kwargs or {}))
        product = func in _PRODUCTS and not self._repeats
        if self._replays and product and self._is_summed:
            rows, columns = args[:2] if func is grouped_product else args[-2:]
            return rows.new_empty(rows.shape[0], columns.shape[-1])  # nothing reads it
        keeps = not self._is_summed if product else _is_attention(func)
        if keeps and self._replays:
            return self._results.pop(0) if self._results else self._unread(args)
        result = func(*args, **(kwargs or {}))
        if keeps:
            self._results.append(tuple(map(_detached, result)) if isinstance(result, tuple) else _detached(result))
        return result


class _KeptNumbers:
    """Numbers that the host read in one pass through a layer, in order: recomputation does not wait for them again."""

    def __init__(self) -> None:
        self._numbers: list[list[int]] = []
        self.replays = False

    def read(self, x: Tensor) -> list[int]:
        if self.replays:
            return self._numbers.pop(0)
        self._numbers.append(x.tolist())
        return self._numbers[-1]


class Recomputation:
    """What a layer recomputes in its backward pass.

    `keeps_last`: whether something is kept after the layer's last sum over ranks, so that a selective replay needs it.
    `splits`: whether its backward passes leave matrix products to weight passes. `parts`: parts recomputed one by one.
    """

    def __init__(self, keeps_last: bool, splits: bool = False, parts: frozenset[RecomputedPart] = frozenset()) -> None:
        self._keeps_last = keeps_last
        self._splits = splits
        self._parts = parts
        self._kept: KeptResults | None = None
        self._freed: FreedResults | None = None
        self._numbers: _KeptNumbers | None = None

    def full(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return a function's result, saving only its inputs; the function seeds its own random numbers.

        Inputs that are freed results of parts stay freed; inside the function no part's results are freed separately.
        """
        # PyTorch saves the tensors among positional arguments, so that hooks see them; it must not get them otherwise.
        count = len(args)
        names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
        others = {name: value for name, value in kwargs.items() if name not in names}

        def run(*given: Any) -> Any:
            return function(*given[:count], **others, **dict(zip(names, given[count:], strict=True)))

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            numbers = _KeptNumbers()
            return self._with(numbers, None, nullcontext()), self._with(numbers, None, nullcontext())

        given = *args, *(kwargs[name] for name in names)
        return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    def selective(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return a function's result, keeping its inputs, matrix products, attention and sums for the backward pass."""

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            kept, numbers = KeptResults(self._keeps_last, self._splits), _KeptNumbers()
            return self._with(numbers, kept, kept.forward()), self._with(numbers, kept, kept)

        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    def by_part(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return a function's result, keeping no results of the parts inside that are recomputed."""
        self._freed = FreedResults()
        try:
            with self._freed.freeing():
                return function(*args)
        finally:
            self._freed = None

    @property
    def frees(self) -> bool:
        """Whether the results of parts are freed in the current pass."""
        return self._freed is not None

    def part(self, function: Function, results: Sequence[Tensor], *inputs: Tensor) -> Sequence[Tensor]:
        """Return `results`; if results of parts are freed, the backward pass computes them again with `function`."""
        return results if self._freed is None else self._freed.part(function, results, *inputs)

    def freed(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return a function's result; if results of parts are freed, the backward pass computes it again."""
        if self._freed is None or not any(x.requires_grad for x in inputs):
            return function(*inputs)
        with torch.no_grad():
            result = function(*inputs)
        return self.part(lambda *inputs: (function(*inputs),), (result,), *inputs)[0]

    def of_experts(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return the result of the experts' activation function; it is freed if the strategy recomputes this part."""
        asked = RecomputedPart.EXPERT_ACTIVATIONS in self._parts
        return self.freed(function, *inputs) if asked else function(*inputs)

    def product(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return a matrix product whose result is only needed for a sum over ranks."""
        return function(*args, **kwargs) if self._kept is None else self._kept.product(function, *args, **kwargs)

    def again(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Return a function's result; its matrix products are not kept: low-rank products are cheap to recompute."""
        return function(*args) if self._kept is None else self._kept.again(function, *args)

    def whole(self, function: Callable[[], Attended]) -> Attended:
        """Return the attention that a function computes in parts, without gradients, as over a ring."""
        return function() if self._kept is None else self._kept.whole(function)

    def sum(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return the sum over ranks, by `function`, of a matrix product's partial results."""
        return function(x) if self._kept is None else self._kept.sum(function, x)

    def read(self, x: Tensor) -> list[int]:
        """Copy integers from the device to the host, which waits for them, except in recomputation."""
        numbers: list[int] = x.tolist() if self._numbers is None else self._numbers.read(x)
        return numbers

    @contextmanager
    def _with(
        self, numbers: _KeptNumbers, kept: KeptResults | None, keeping: AbstractContextManager[Any]
    ) -> Iterator[None]:
        freed, self._freed = self._freed, None
        self._kept, self._numbers = kept, numbers
        try:
            with keeping:
                yield
        finally:
            self._freed = freed
            self._kept = self._numbers = None
            numbers.replays = True


def part_of(name: str, parts: Parts) -> Recompute:
    """Return the kind of recomputation that covers a module of a block: attention, or the rest."""
    inside = any(f"{name}.".startswith(f"{part}.") for part in parts.attention)
    return Recompute.ATTENTION if inside else Recompute.MLP


def apply_activation_checkpointing(
    block: nn.Module, parts: Parts, recompute: Recompute, randomness: Randomness, recomputation: Recomputation
) -> None:
    """Recompute a block's attention or MLP if its strategy requires it; whole blocks are recomputed by the caller.

    Each part has its own seed, so that it draws the same random numbers whether it is recomputed or not.
    """
    for name in (*parts.attention, *parts.mlp):
        repeats = recomputation if part_of(name, parts) is recompute.half else None
        replace_callable(block, name, partial(_seeded, name, randomness, repeats))


def compile_block(block: nn.Module, parts: Parts, recompute: Recompute, gathers: bool) -> None:
    """Compile a block's computation, after tensor parallelism and before its parameters are sharded.

    `gathers`: whether its parts begin with a gather of the sequence, which is repeated in the backward pass.
    """
    for name in dict.fromkeys((*parts.attention, *parts.mlp)):
        if part_of(name, parts) is recompute.half:
            replace_callable(block, name, partial(_recomputed, None))
    for name in parts.enter if gathers else ():
        if not recompute.replays(part_of(name, parts)):
            replace_callable(block, name, partial(_recomputed, _all_but_gathers))
    if recompute is Recompute.SELECTIVE:
        block.forward = _recomputed(_selective, block.forward)
    block.forward = compiled(block.forward)


def replace_callable(block: nn.Module, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a callable inside a block, a module or a method, by the result of `change`."""
    holder_name, _, last = name.rpartition(".")
    holder = block.get_submodule(holder_name)
    if isinstance(part := getattr(holder, last), nn.Module):
        holder, last = part, "forward"
    setattr(holder, last, change(getattr(holder, last)))


def _seeded(
    name: str, randomness: Randomness, recomputation: Recomputation | None, stock: Callable[..., Any]
) -> Callable[..., Any]:
    @wraps(stock)  # some stock blocks read a part's signature
    def call(*args: Any, **kwargs: Any) -> Any:
        # The key of the forward pass: the backward pass, which computes again, has none.
        rng_key = randomness.current

        def run(*args: Any, **kwargs: Any) -> Any:
            if rng_key is None:
                return stock(*args, **kwargs)
            with randomness.seeded(*rng_key, name):
                return stock(*args, **kwargs)

        return run(*args, **kwargs) if recomputation is None else recomputation.full(run, *args, **kwargs)

    return call


def _recomputed(policy: _Policy | None, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return `stock` with recomputation, as a function: a partial object would give each layer a separate graph."""
    kept: dict[str, Any] = {}
    if policy is not None:
        kept = {"context_fn": partial(create_selective_checkpoint_contexts, policy)}

    @wraps(stock)  # some stock blocks read a part's signature
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(stock, *args, use_reentrant=False, **kept, **kwargs)

    return recomputed


def _all_but_gathers(_: SelectiveCheckpointContext, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    # A view of what is gathered would be kept in its place.
    gathers = operator in _GATHER or getattr(operator, "is_view", False)
    return CheckpointPolicy.MUST_RECOMPUTE if gathers else CheckpointPolicy.PREFER_SAVE


def _selective(_: SelectiveCheckpointContext, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Return whether to save an operator's result, as matrix products, attention and sums over ranks are."""
    keeps = operator in (*_SUMS, *_PRODUCTS) or _is_attention(operator)
    return CheckpointPolicy.PREFER_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _is_attention(operator: Any) -> bool:
    """Return whether an operator computes attention as a whole."""
    name: str = operator.name()
    return name.startswith(_ATTENTION)


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x
