"""Tensor parallelism: modules that compute with their shards, the sums that join them, and Ulysses inside attention."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from shardwright_formats.semantics.axes import Axes
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.parallel.collectives import (
    copy_to_group,
    exchange_dims,
    gather_sequence,
    gathered_again,
    scatter_sequence,
    sum_over_group,
)
from shardwright_train.parallel.low_rank import LowRankLinear
from shardwright_train.parallel.rng import Randomness
from shardwright_train.parallel.sharding_rules import Cut, Rule
from shardwright_train.torch_private import direct_parameters

ULYSSES_ATTENTION = "shardwright_ulysses"
"""Name under which transformers' modules find the attention below."""
_HEADS, _POSITIONS = 1, 2
"""Dims of queries, keys and values [b, heads, s, d]; attention's output is [b, s, heads, d]."""
_SINKS = "s_aux"
"""Argument of transformers' attention functions: a further score [heads] in the softmax, which weighs nothing."""
_ENTERING = ("hidden_states", "key_value_states")


@dataclass(frozen=True)
class TensorParallel:
    """The sharing of a layer by the ranks that one sample is sharded over.

    `axis` is the mesh axis that shards parameters (of one rank under Ulysses), `sequence_group` has all those ranks.
    Of experts it is that of the ranks that share each expert's features.
    """

    axis: DeviceMesh
    sequence_group: dist.ProcessGroup
    axes: Axes
    randomness: Randomness
    recomputation: Recomputation
    """Selective recomputation of the layer."""
    fused_loss: bool = False
    """Whether a fused kernel computes the head's cross entropy."""
    expert_group: dist.ProcessGroup | None = None
    """Group of ranks that share experts out, of which this layer part is; None where each has all."""

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the group of ranks that share the layer's matrices."""
        return self.axis.get_group()

    @property
    def size(self) -> int:
        """Return the number of ranks that share the layer's matrices."""
        return self.axis.size()

    @property
    def rank(self) -> int:
        """Return this rank's index among the ranks that share the layer's matrices."""
        return self.axis.get_local_rank()

    @property
    def splits_sequence(self) -> bool:
        """Return whether each rank has its own part of the sequence between the matrix products (Megatron)."""
        return self.axes.gathers_sequence

    @property
    def splits_everything(self) -> bool:
        """Return whether each rank has its own part of the sequence in the matrix products too (Ulysses)."""
        return self.axes.exchanges_heads

    @contextmanager
    def entered(self, *inputs: Tensor, keeps: bool = False) -> Iterator[Sequence[Tensor]]:
        """Yield the inputs of column-parallel products with all positions, on every rank.

        The products gather their inputs again for backward unless they `keeps` them, being recomputed themselves.
        """
        self.randomness.inside()
        if not self.splits_sequence:
            yield [copy_to_group(x, self.group) for x in inputs]
        elif keeps or self.size == 1:
            yield [gather_sequence(x, self.group) for x in inputs]
        else:
            with gathered_again(inputs, self.group) as gathered:
                yield gathered

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of a row-parallel product over the ranks, scattered where the sequence is split."""
        total = partial(scatter_sequence if self.splits_sequence else sum_over_group, group=self.group)
        x = self.recomputation.sum(total, x)
        self.randomness.outside()
        return x

    def positions(self, length: int) -> slice:
        """Return the positions, of `length` in all, that this rank has between the matrix products."""
        if not (self.splits_sequence or self.splits_everything):
            return slice(0, length)
        share = length // self.sequence_group.size()
        first = self.sequence_group.rank() * share
        return slice(first, first + share)

    def positions_inside(self, length: int) -> slice:
        """Return the positions that this rank works on in the matrix products: all of them, except under Ulysses."""
        return self.positions(length) if self.splits_everything else slice(0, length)

    def heads(self, count: int) -> slice:
        """Return the heads, of `count` in all, that this rank attends with."""
        group = self.sequence_group if self.splits_everything else self.group
        share = count // group.size()
        return slice(group.rank() * share, (group.rank() + 1) * share)

    @property
    def sums_outside(self) -> bool:
        """Return whether the gradient of a replicated parameter used outside the products is a sum over the ranks."""
        return self.splits_sequence and self.size > 1


def apply_tensor_parallel(
    modules: Mapping[str, nn.Module], cut_of: Mapping[str, Cut], tensor_parallel: TensorParallel
) -> frozenset[str]:
    """Leave modules of a layer, by their names in it, their shards of their parameters, and make them compute so.

    Returns the replicated parameters whose gradients must be summed over the axis after the backward pass.
    """
    partial = set[str]()
    for module_name, module in modules.items():
        lengths = {name: parameter.shape[0] for name, parameter in module.named_parameters(recurse=False)}
        rules = dict[Rule | None, None]()
        for name in lengths:
            cut = cut_of[f"{module_name}.{name}".lstrip(".")]
            full = module.get_parameter(name).detach()
            part = full.new_empty(cut.part_shape(tensor_parallel.axes.dense))
            module.register_parameter(name, nn.Parameter(part))
            rules[cut.rule] = None
            if tensor_parallel.size > 1 and cut.tp_dim is None and (cut.inside or tensor_parallel.sums_outside):
                partial.add(cut.name)
        if isinstance(module, LowRankLinear):
            module.recomputation = tensor_parallel.recomputation
        for rule in rules:
            _compute_with_shards(module, rule, lengths, tensor_parallel)
    return frozenset(partial)


def enter_before(module: nn.Module, tensor_parallel: TensorParallel, keeps: bool) -> None:
    """Give a module all positions of its input on every rank; `keeps` as `TensorParallel.entered` has it."""
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        named = {name: kwargs[name] for name in _ENTERING if kwargs.get(name) is not None}
        with tensor_parallel.entered(*args[:1], *named.values(), keeps=keeps) as entered:
            first, others = entered[: len(args[:1])], entered[len(args[:1]) :]
            return stock(*first, *args[1:], **kwargs | dict(zip(named, others, strict=True)))

    module.forward = forward


def _compute_with_shards(
    module: nn.Module, rule: Rule | None, lengths: Mapping[str, int], tensor_parallel: TensorParallel
) -> None:
    """Make a module compute with its shards of a rule's parameters, where `lengths` are all first dims in full."""
    match rule:
        case Rule("row"):
            _make_row_parallel(module, tensor_parallel)
        case Rule("vocabulary"):
            _change_parameters(module, lambda name, local: _without_padding(local, lengths[name], tensor_parallel))
        case Rule("column", fused):
            if fused > 1:
                outputs_last = isinstance(module, Conv1D)
                _change_parameters(module, lambda _, local: local.flatten(-2) if outputs_last else local.flatten(0, 1))
            if isinstance(module, Conv1D):
                module.nf = module.nf // tensor_parallel.size


def _make_row_parallel(module: nn.Module, tensor_parallel: TensorParallel) -> None:
    """Make a matrix product compute its share of a sum over the group; its bias is added by the first rank alone."""
    keep = float(tensor_parallel.rank == 0)
    if tensor_parallel.size > 1:
        _change_parameters(module, lambda name, local: local * keep if name == "bias" else local)
    compute = partial(tensor_parallel.recomputation.product, module.forward)
    module.forward = lambda *args, **kwargs: tensor_parallel.leave(compute(*args, **kwargs))


def _without_padding(local: Tensor, length: int, tensor_parallel: TensorParallel) -> Tensor:
    return local[: max(0, min(local.shape[0], length - tensor_parallel.rank * local.shape[0]))]


def _change_parameters(module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> None:
    """Make a module compute with its parameters (not its children's) as `change` makes them, given the name."""
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        direct = direct_parameters(module)
        kept = dict(direct)
        try:
            direct.update({name: change(name, x) for name, x in kept.items() if x is not None})  # type: ignore[misc]
            return stock(*args, **kwargs)
        finally:
            direct.update(kept)

    module.forward = forward


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
    if (sinks := kwargs.get(_SINKS)) is not None:
        # One score of each head, which the eager kernel reads off the module.
        kwargs[_SINKS] = vars(seen)["sinks"] = sinks.chunk(group.size())[group.rank()]
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
