"""Ulysses sequence parallelism: heads instead of positions inside attention (Jacobs et al. 2023)."""

import sys
from collections.abc import Callable
from copy import copy
from math import lcm
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shardwright_train.parallel.collectives import exchange_dims

__all__ = ["ULYSSES_ATTENTION", "apply_ulysses"]

ULYSSES_ATTENTION = "shardwright_ulysses"
"""The name under which transformers' modules find the attention below."""

_HEADS, _POSITIONS = 1, 2
"""Dims of queries, keys and values [b, heads, s, d]; attention's output is [b, s, heads, d]."""


class _Ulysses(NamedTuple):
    group: dist.ProcessGroup
    kernel: str


def apply_ulysses(block: nn.Module, group: dist.ProcessGroup, kernel: str) -> None:
    """Make the attention of a block built for `ULYSSES_ATTENTION` exchange positions for heads over a group."""
    for module in block.modules():
        module._ulysses = _Ulysses(group, kernel)  # type: ignore[assignment]


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    group, kernel = module._ulysses  # type: ignore[misc]
    # Key and value heads are repeated until the degree divides their number.
    repeat = lcm(key.shape[_HEADS], group.size()) // key.shape[_HEADS]
    key, value = (x.repeat_interleave(repeat, _HEADS) for x in (key, value))
    query, key, value = (exchange_dims(x, _HEADS, _POSITIONS, group) for x in (query, key, value))
    output, weights = _kernel(module, kernel)(_seen(module, kernel, repeat), query, key, value, *args, **kwargs)
    return exchange_dims(output, _POSITIONS - 1, _HEADS + 1, group), weights


def _kernel(module: nn.Module, name: str) -> Callable[..., Any]:
    # The eager one is no registered function but each model's own.
    eager: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    kernel: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return kernel


def _seen(module: nn.Module, kernel: str, repeat: int) -> nn.Module:
    """The module as a kernel would read it without Ulysses, its key and value heads repeated."""
    seen = copy(module)
    seen.config = copy(module.config)
    seen.config._attn_implementation = kernel  # type: ignore[union-attr]
    if hasattr(module, "num_key_value_groups"):
        seen.num_key_value_groups = module.num_key_value_groups // repeat  # type: ignore[assignment, operator]
    return seen


ALL_ATTENTION_FUNCTIONS.register(ULYSSES_ATTENTION, _attention)
