"""Attention over a sequence that is split over ranks.

Ulysses (Jacobs et al. 2023) exchanges positions for heads with two all-to-alls, so each rank attends with fewer heads
to all positions. Context parallelism then attends to the positions of other ranks.
"""

import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shardwright.types import FUSED_SDPA, Attention, ContextParallel
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.parallel.collectives import exchange_dims
from shardwright_train.parallel.context import ContextShares, GatherAttention, RingAttention, StandInAttention
from shardwright_train.parallel.tensor import TensorParallel

SHARED_ATTENTION = "shardwright_sequence"
"""Name under which transformers' modules find the attention below."""
_HEADS, _POSITIONS = 1, 2
"""Dims of queries, keys and values [b, heads, s, d]; attention's output is [b, s, heads, d]."""
_SINKS = "s_aux"
"""Argument of transformers' attention functions: a further score [heads] in the softmax, which weighs nothing."""
_MASKLESS = tuple(kernel.value for kernel in (*FUSED_SDPA, Attention.SDPA_MATH))
"""Kernels in whose place blocks of queries and keys are attended without a mask."""


@dataclass(frozen=True)
class AcrossRanks:
    """The attention of a layer's positions to other ranks' positions, in the order in which ranks hold them."""

    group: dist.ProcessGroup
    order: Tensor | None
    """Positions of a sample in that order; None if the order is unchanged."""
    kernel: str
    reduce: torch.dtype
    """Format in which gradients of keys and values are summed over the ranks."""
    recomputation: Recomputation
    """Selective recomputation of the layer."""
    keeps: bool
    """Whether gathered keys and values are kept for the backward pass, as if a replay has gathered them again."""
    context: ContextParallel
    is_stand_in: bool = False
    """Whether this rank's keys and values stand for the group's in a measurement."""
    _of_length: dict[tuple[int, bool], GatherAttention | RingAttention] = field(default_factory=dict)

    def attend(
        self,
        compute: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the attention [b, s/n, heads, d] of this rank's positions to all positions.

        `compute` is the stock kernel, which `module` belongs to. The mask is one to add to the scores of this rank's
        positions [b or 1, heads or 1, s/n or 1, s], or the numbers [b, s] of all positions' documents, or None: then
        the module tells whether attention is causal.
        """
        asked = kwargs.pop("is_causal", None)
        causal = getattr(module, "is_causal", True) if asked is None else asked
        attention = self._attention(key, causal)
        added = mask if mask is not None and mask.is_floating_point() else None
        documents = mask if added is None else None
        is_plain = added is None and all(kwargs.get(name) is None for name in ("position_bias", _SINKS))
        # Beside any kernel, such as one that `auto` falls back to, a ring attends in blocks: nothing else can.
        in_blocks = self.kernel in _MASKLESS or self.context is ContextParallel.RING
        if in_blocks and is_plain and query.shape[_POSITIONS] == key.shape[_POSITIONS]:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            return attention(query, key, value, scale, documents).transpose(1, 2).contiguous()
        assert isinstance(attention, GatherAttention), "plans whose masks a ring does not support are refused"
        if added is None and (causal or documents is not None):
            seen = attention.seen(documents)
            hidden = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
            added = hidden.masked_fill_(~seen, torch.finfo(query.dtype).min)
        repeat = query.shape[_HEADS] // key.shape[_HEADS]
        with attention.gathered(key, value, repeat=repeat) as (keys, values):
            output: Tensor = compute(module, query, keys, values, added, scaling=scaling, **kwargs)[0]
        return output

    def _attention(self, key: Tensor, causal: bool) -> GatherAttention | RingAttention:
        """The attention to all keys, of which this rank has a part."""
        length = key.shape[_POSITIONS] * self.group.size()
        if (made := self._of_length.get((length, causal))) is None:
            order = self._positions if self.order is not None else range(length)
            shares = ContextShares(order, self.group.size())
            given = shares, self.group, causal, self.reduce, key.device, self.recomputation.whole
            if self.context is ContextParallel.RING:
                made = RingAttention(*given)
            else:
                made = (StandInAttention if self.is_stand_in else GatherAttention)(*given, self.keeps)
            self._of_length[length, causal] = made
        return made

    @cached_property
    def _positions(self) -> list[int]:
        positions: list[int] = [] if self.order is None else self.order.tolist()
        return positions


class _Shared(NamedTuple):
    heads: dist.ProcessGroup | None
    """Group whose ranks exchange positions for heads; None if they do not."""
    repeat: int
    """Number of copies of each key and value head, so that the degree divides their number."""
    kernel: Callable[..., Any]
    seen: nn.Module
    """Module that the kernel reads, as without other ranks, its key and value heads repeated."""
    across: AcrossRanks | None


def share_attention(
    block: nn.Module,
    tensor_parallel: TensorParallel,
    kernel: str,
    reduce: torch.dtype,
    keeps: bool,
    context: ContextParallel = ContextParallel.GATHER,
) -> None:
    """Make the attention of a block built for `SHARED_ATTENTION` use the positions of other ranks.

    `reduce`: format in which gradients of keys and values are summed; `keeps`: whether a replay gathers these.
    """
    heads = tensor_parallel.sequence_group if tensor_parallel.splits_everything else None
    degree = 1 if heads is None else heads.size()
    stand_in = tensor_parallel.stand_in
    group, order = tensor_parallel.context_group, tensor_parallel.order
    if stand_in is not None:
        group, order = stand_in.group, stand_in.order
    for module in block.modules():
        # The eager one is no registered function but each model's own.
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is not None and hasattr(module, "config"):
            given = group, order, kernel, reduce, tensor_parallel.recomputation, keeps, context, stand_in is not None
            across = AcrossRanks(*given) if tensor_parallel.attends_across else None
            kernel_of_module = ALL_ATTENTION_FUNCTIONS.get_interface(kernel, eager)
            repeat, seen = _seen(module, kernel, degree, repeats=across is not None)
            module.shared_attention = _Shared(heads, repeat, kernel_of_module, seen, across)  # type: ignore[assignment]


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
) -> Any:
    shared: _Shared = module.shared_attention  # type: ignore[assignment]
    weights = None
    if shared.heads is not None:
        key, value = (x.repeat_interleave(shared.repeat, _HEADS) for x in (key, value))
        query, key, value = (exchange_dims(x, _HEADS, _POSITIONS, shared.heads) for x in (query, key, value))
        if (sinks := kwargs.get(_SINKS)) is not None:
            # One score of each head, which the eager kernel reads off the module.
            kwargs[_SINKS] = vars(shared.seen)["sinks"] = sinks.chunk(shared.heads.size())[shared.heads.rank()]
    if shared.across is None:
        output, weights = shared.kernel(shared.seen, query, key, value, mask, *args, **kwargs)
    else:
        output = shared.across.attend(shared.kernel, shared.seen, query, key, value, mask, *args, **kwargs)
    if shared.heads is not None:
        output = exchange_dims(output, _POSITIONS - 1, _HEADS + 1, shared.heads)
    return output, weights


def _seen(module: nn.Module, kernel: str, degree: int, repeats: bool) -> tuple[int, nn.Module]:
    """The number of repetitions of key and value heads for a number of ranks, and the module that a kernel reads.

    `repeats`: whether heads are repeated before the kernel for each query head.
    """
    seen: Any = copy(module)
    seen.config = copy(module.config)
    seen.config._attn_implementation = kernel
    groups = getattr(module, "num_key_value_groups", 1)
    kv_heads = seen.config.num_attention_heads // groups
    repeat = lcm(kv_heads, degree) // kv_heads
    seen.num_key_value_groups = 1 if repeats else groups // repeat
    return repeat, seen


ALL_ATTENTION_FUNCTIONS.register(SHARED_ATTENTION, _attention)
