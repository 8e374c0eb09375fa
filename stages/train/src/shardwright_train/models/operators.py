"""Operators and saved tensors of a pass, by layer: operations, outputs, and tensors saved for the backward pass."""

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from shardwright.types.model import Traced
from shardwright_train.torch_private import TorchDispatchMode, storage_key, traced_attention, tree_leaves

TRACED = "traced"
"""Name under which transformers finds the attention function of a trace."""
_MOST_OPERATORS = 5_000
"""A layer with more operators computes position by position, like scans without special kernels."""
_STARTS_NOTHING = frozenset(
    (
        *(
            "_local_scalar_dense",
            "_reshape_alias",
            "_unsafe_view",
            "alias",
            "as_strided",
            "chunk",
            "detach",
            "diagonal",
        ),
        *("empty", "empty_like", "empty_strided", "expand", "is_same_size", "lift_fresh", "new_empty"),
        *("permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold"),
        *("unsqueeze", "view", "view_as_complex", "view_as_real"),
    )
)
"""Operators that start no kernel: they make views, or memory that is not written to."""


class Seen:
    """Operators and tensors of one layer, recorded in one pass over one sample."""

    def __init__(self, module: nn.Module, divided: Sequence[Tensor] = ()) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        self.own = {storage_key(tensor) for tensor in tensors}
        self.parameters = {storage_key(p): p.numel() for p in module.parameters()}
        self.divided = {storage_key(p) for p in divided}
        """Parameters that tensor parallelism cuts."""
        self.multiplied = set[int]()
        self.kept = dict[int, Tensor]()
        self.product_flops = self.whole_flops = self.attention_flops = self.products = self.widest = self.kernels = 0
        self.wide = Counter[int]()
        """Number of elements of results of matrix products, by their last length."""
        self.heads: dict[str, Any] | None = None
        """Fields of `Heads` of its attention, if transformers calls one by name."""

    def counted(self, features: int = 0) -> Traced:
        """Return the record in numbers; tensors as wide as the hidden states' `features` are whole on each rank."""
        bytes_of = {key: (kept.untyped_storage().nbytes(), kept.dtype) for key, kept in self.kept.items()}
        elements = sum(size // 2 for size, dtype in bytes_of.values() if dtype is torch.bfloat16)
        wide = sum(
            bytes_of[key][0] // 2
            for key, kept in self.kept.items()
            if self.divided and kept.dtype is torch.bfloat16 and kept.dim() and kept.shape[-1] == features
        )
        return Traced(
            product_flops=self.product_flops,
            attention_flops=self.attention_flops,
            multiplied=sum(self.parameters[key] for key in self.multiplied),
            kept=elements,
            kept_bytes=sum(size for size, dtype in bytes_of.values() if dtype is not torch.bfloat16),
            products=self.products,
            widest=self.widest,
            kernels=self.kernels,
            whole_flops=self.whole_flops if self.divided else 0,
            whole=wide,
            whole_products=self.wide[features] if self.divided else 0,
        )


class Trace(TorchDispatchMode):
    """A mode that adds each operator to the current layer's record."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = dict[str, Seen]()
        self.name = ""
        self._attends = False
        self.keeps = True

    def begin(self, name: str, module: nn.Module, given: object = (), divided: Sequence[Tensor] = ()) -> None:
        """Begin a layer; arguments without a gradient, such as angles, are not counted, as all layers share them."""
        self.name, seen = name, Seen(module, divided)
        seen.own |= {storage_key(leaf) for leaf in _tensors(given) if not leaf.requires_grad}
        self.seen[name] = seen

    @contextmanager
    def of(self, name: str, module: nn.Module, given: object, divided: Sequence[Tensor]) -> Iterator[None]:
        """Record a layer inside another one, which goes on afterwards."""
        before = self.name
        self.begin(name, module, given, divided)
        try:
            yield
        finally:
            self.name = before

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record operators, and the tensors that they save."""
        with self, _MaskedDropout(), torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept):
            yield

    def keep_nothing_of(self, module: nn.Module) -> None:
        """Ignore the tensors that a module saves, but not its operations."""
        module.register_forward_pre_hook(lambda *_: setattr(self, "keeps", False))
        module.register_forward_hook(lambda *_: setattr(self, "keeps", True))

    def attention(
        self,
        _module: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        _mask: Tensor | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention for transformers with a flash kernel: queries [samples, heads, positions, features].

        The kernel needs values as wide as keys; operations are counted without that padding, and without pairs outside
        of a window.
        """
        (samples, heads, length, features), wide, seen = queries.shape, values.shape[-1], self.seen[self.name]
        window = sliding_window if sliding_window is not None and sliding_window < length else None
        pairs = length * keys.shape[2] - (0 if window is None else (length - window) ** 2)
        seen.attention_flops += 2 * samples * heads * pairs * (features + wide)
        seen.heads = {"heads": heads, "kv_heads": keys.shape[1], "head_features": features, "window": window}
        seen.heads |= {"value_features": wide} if wide != features else {}
        filled = nn.functional.pad(values, (0, features - wide)) if wide < features else values
        self._attends = True
        try:
            out, *_others = traced_attention(queries, keys, filled, 0.0, True, False, scale=scaling)
        finally:
            self._attends = False
        return out[..., :wide].transpose(1, 2).contiguous(), None

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operator, and add it to the record."""
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        space, _, name = operator.name().partition(".")[0].partition("::")
        if space == "prim" or name.rstrip("_") in _STARTS_NOTHING or name in _STARTS_NOTHING or not self.name:
            return result
        seen = self.seen[self.name]
        seen.kernels += 1
        if seen.kernels > _MOST_OPERATORS:
            raise ValueError(f"a layer has over {_MOST_OPERATORS} operators: it scans positions one by one")
        outs = list(_tensors(result))
        seen.widest = max((seen.widest, *(out.numel() for out in outs)))
        flops = self._flops(operator, name, args, kwargs, result)
        if flops is None:
            return result
        seen.products += outs[0].numel()
        seen.wide[outs[0].shape[-1]] += outs[0].numel()
        matrices = {storage_key(leaf) for leaf in _tensors((args, kwargs))} & seen.parameters.keys()
        seen.multiplied |= matrices
        if matrices:
            seen.product_flops += flops
            seen.whole_flops += 0 if matrices & seen.divided else flops
        else:
            seen.attention_flops += flops
        return result

    def _flops(self, operator: Any, name: str, args: Any, kwargs: Any, result: Any) -> int | None:
        """Return the number of operations of a matrix product; None for other operators."""
        if self._attends:
            return 0 if "scaled_dot_product" in name else None
        if name == "_grouped_mm":  # each row times one of several matrices; torch's counter does not know it
            return int(2 * args[0].numel() * args[1].shape[-1])
        if "scaled_dot_product" in name:
            queries, keys, values = (tuple[int, ...](tensor.shape) for tensor in args[:3])
            return 2 * prod(queries[:3]) * keys[2] * (queries[3] + values[3])
        if (count := flop_registry.get(operator.overloadpacket)) is None:
            return None
        return int(count(*args, **kwargs, out_val=result))

    def _keep(self, tensor: Tensor) -> Tensor:
        if self.name and self.keeps and storage_key(tensor) not in (seen := self.seen[self.name]).own:
            seen.kept[storage_key(tensor)] = tensor
        return tensor


class _MaskedDropout(TorchFunctionMode):
    """Dropout as on a GPU, which saves a mask of one byte per element; a CPU saves numbers."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not nn.functional.dropout:
            return function(*args, **kwargs)
        given = inspect.signature(function).bind(*args, **kwargs)
        given.apply_defaults()
        rate, training = given.arguments["p"], given.arguments["training"]
        states: Tensor = given.arguments["input"]
        return torch.native_dropout(states, rate, True)[0] if training and rate else states


def _tensors(nested: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor))
