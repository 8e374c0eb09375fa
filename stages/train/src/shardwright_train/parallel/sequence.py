"""Ulysses sequence parallelism: heads instead of positions inside attention (Jacobs et al. 2023)."""

import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["ULYSSES_ATTENTION", "exchange_around_attention"]

ULYSSES_ATTENTION = "shardwright_ulysses"
"""The name under which transformers' modules find the attention below."""

_HEADS, _POSITIONS = 1, 2


@dataclass(frozen=True)
class _Exchange:
    group: dist.ProcessGroup
    kernel: str
    repeat: int
    """How often each key and value head is repeated, so that the degree divides their number."""


def exchange_around_attention(block: nn.Module, group: dist.ProcessGroup, kernel: str, kv_heads: int) -> None:
    """Make the attention of a block built for `ULYSSES_ATTENTION` exchange positions for heads over a group."""
    repeat = lcm(kv_heads, group.size()) // kv_heads
    for module in block.modules():
        groups = getattr(module, "num_key_value_groups", None)
        if isinstance(groups, int):
            module.num_key_value_groups = groups // repeat  # type: ignore[assignment]
        module._ulysses = _Exchange(group, kernel, repeat)  # type: ignore[assignment]


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    exchange: _Exchange = module._ulysses  # type: ignore[assignment]
    key, value = (x.repeat_interleave(exchange.repeat, _HEADS) for x in (key, value))
    query, key, value = (_exchanged(x, _HEADS, _POSITIONS, exchange.group) for x in (query, key, value))
    seen = _configured_for(module, exchange.kernel)
    output, weights = _kernel(module, exchange.kernel)(seen, query, key, value, *args, **kwargs)
    # Attention gives [b, s, heads, d].
    return _exchanged(output, 1, 2, exchange.group), weights


def _kernel(module: nn.Module, name: str) -> Callable[..., Any]:
    # The eager one is no registered function but each model's own.
    eager: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    kernel: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return kernel


def _configured_for(module: nn.Module, kernel: str) -> nn.Module:
    """The module as it would be without the exchange: flash attention reads there which package it is to use."""
    seen = copy(module)
    seen.config = copy(module.config)
    seen.config._attn_implementation = kernel  # type: ignore[union-attr]
    return seen


def _exchanged(x: Tensor, split: int, gather: int, group: dist.ProcessGroup) -> Tensor:
    exchanged: Tensor = _ExchangeDims.apply(x, split, gather, group)  # type: ignore[no-untyped-call]
    return exchanged


class _ExchangeDims(torch.autograd.Function):
    """Give up a share of one dim for all of another, over a group; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, gather: int, group: dist.ProcessGroup) -> Tensor:
        ctx.way = (gather, split, group)
        return _all_to_all(x, split, gather, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, *ctx.way), None, None, None


def _all_to_all(x: Tensor, split: int, gather: int, group: dist.ProcessGroup) -> Tensor:
    outgoing = torch.stack(x.chunk(group.size(), split))
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), group=group)
    return torch.cat(incoming.unbind(0), gather)


ALL_ATTENTION_FUNCTIONS.register(ULYSSES_ATTENTION, _attention)
