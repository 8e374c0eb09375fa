"""Blocks compiled by torch.compile: what a strategy recomputes or gathers again is part of the graph.

Only a block's computation is compiled; FSDP2's hooks around it are not. Within the graph, PyTorch restores the random
state of recomputation, so that parts need no seeds of their own.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardwright_formats.types import Recompute
from shardwright_train.parallel.checkpointing import part_of
from shardwright_train.parallel.selective import is_attention, is_product
from shardwright_train.parallel.sharding_rules import Parts
from shardwright_train.parallel.tensor import TensorParallel
from shardwright_train.torch_private import collective_operators, compiled

_GATHER = (
    collective_operators.all_gather_into_tensor.default,
    collective_operators.wait_tensor.default,
    torch.ops.aten.cat.default,
    torch.ops.aten.copy_.default,
    torch.ops.aten.new_empty.default,
)
_SUMS = (collective_operators.all_reduce.default, collective_operators.reduce_scatter_tensor.default)


def compile_block(block: nn.Module, parts: Parts, recompute: Recompute, tensor_parallel: TensorParallel) -> None:
    """Compile what a block computes, after tensor parallelism and before its parameters are sharded."""
    for name in dict.fromkeys((*parts.attention, *parts.mlp)):
        if part_of(name, parts) is recompute:
            _recompute(block, name, None)
    if tensor_parallel.splits_sequence and tensor_parallel.size > 1:
        for name in parts.enter:
            if recompute not in (Recompute.FULL, Recompute.SELECTIVE, part_of(name, parts)):
                _recompute(block, name, _all_but_gathers)
    if recompute is Recompute.SELECTIVE:
        block.forward = _recomputed(block.forward, _selective)
    block.forward = compiled(block.forward)


_Policy = Callable[..., CheckpointPolicy]


def _recompute(block: nn.Module, name: str, policy: _Policy | None) -> None:
    owner_name, _, last = name.rpartition(".")
    owner = block.get_submodule(owner_name)
    part = getattr(owner, last)
    holder, attribute = (part, "forward") if isinstance(part, nn.Module) else (owner, last)
    setattr(holder, attribute, _recomputed(getattr(holder, attribute), policy))


def _recomputed(function: Callable[..., Any], policy: _Policy | None) -> Callable[..., Any]:
    """Return the recomputing function, not a partial object, which would give each layer a graph of its own."""
    kept: dict[str, Any] = (
        {} if policy is None else {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
    )

    @wraps(function)  # some stock blocks read a part's signature
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, **kept, **kwargs)

    return recomputed


def _all_but_gathers(_: SelectiveCheckpointContext, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    # A view of what is gathered would be kept in its place.
    gathers = operator in _GATHER or getattr(operator, "is_view", False)
    return CheckpointPolicy.MUST_RECOMPUTE if gathers else CheckpointPolicy.PREFER_SAVE


def _selective(_: SelectiveCheckpointContext, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Return whether to keep an operator's result: products, attention and sums, but no product whose sum is kept."""
    keeps = operator in _SUMS or is_product(operator) or is_attention(operator)
    return CheckpointPolicy.PREFER_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
