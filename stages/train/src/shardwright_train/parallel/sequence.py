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

ULYSSES_ATTENTION = "shardwright_ulysses"
"""Name under which transformers' modules find the attention below."""

_HEADS, _POSITIONS = 1, 2
"""Dims of queries, keys and values [b, heads, s, d]; attention's output is [b, s, heads, d]."""


class _Ulysses(NamedTuple):
    group: dist.ProcessGroup
    repeat: int
    """Number of copies of each key and value head, so that the degree divides their number."""
    kernel: Callable[..., Any]
    seen: nn.Module
    """Module that the kernel reads, as without Ulysses, its key and value heads repeated."""


def apply_ulysses(block: nn.Module, group: dist.ProcessGroup, kernel: str) -> None:
    """Make the attention of a block built for `ULYSSES_ATTENTION` exchange positions for heads over a group."""
    for module in block.modules():
        # The eager one is no registered function but each model's own.
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is not None and hasattr(module, "config"):
            kernel_of_module = ALL_ATTENTION_FUNCTIONS.get_interface(kernel, eager)
            repeat, seen = _seen(module, kernel, group.size())
            module._ulysses = _Ulysses(group, repeat, kernel_of_module, seen)  # type: ignore[assignment]


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    group, repeat, kernel, seen = module._ulysses  # type: ignore[misc]
    key, value = (x.repeat_interleave(repeat, _HEADS) for x in (key, value))
    query, key, value = (exchange_dims(x, _HEADS, _POSITIONS, group) for x in (query, key, value))
    output, weights = kernel(seen, query, key, value, *args, **kwargs)
    return exchange_dims(output, _POSITIONS - 1, _HEADS + 1, group), weights


def _seen(module: nn.Module, kernel: str, degree: int) -> tuple[int, nn.Module]:
    seen: Any = copy(module)
    seen.config = copy(module.config)
    seen.config._attn_implementation = kernel
    groups = getattr(module, "num_key_value_groups", 1)
    kv_heads = seen.config.num_attention_heads // groups
    repeat = lcm(kv_heads, degree) // kv_heads
    seen.num_key_value_groups = groups // repeat
    return repeat, seen


ALL_ATTENTION_FUNCTIONS.register(ULYSSES_ATTENTION, _attention)
