"""Tensor parallelism: modules that compute with shards of matrices, sums that join their results, split sequences.

A block is Y = f(X A) B with A sharded by columns and B by rows (Shoeybi et al. 2019): rank r computes f(X A_r) B_r
without communication, and Y = sum_r f(X A_r) B_r is one all-reduce; its transpose sums the gradient of X. With
Megatron's sequence parallelism (Korthikanti et al. 2022) the all-reduce becomes a reduce-scatter, and X is gathered
before A.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import lcm
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from shardwright.plan.axes import Axes, Axis
from shardwright.types import FUSED_SDPA, Attention, ContextParallel
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.parallel.collectives import (
    copy_to_group,
    exchange_dims,
    gather_sequence,
    gathered_again,
    scatter_sequence,
    sum_over_group,
)
from shardwright_train.parallel.context import ContextShares, GatherAttention, RingAttention, StandIn, StandInAttention
from shardwright_train.parallel.experts import ExpertOrder
from shardwright_train.parallel.low_rank import LowRankConv1D, LowRankLinear
from shardwright_train.parallel.rng import Randomness
from shardwright_train.parallel.sharding_rules import Cut, Rule
from shardwright_train.torch_private import direct_parameters

_ENTERING = ("hidden_states", "key_value_states")


@dataclass(frozen=True)
class TensorParallel:
    """The groups of ranks over which a layer, and each sample in it, is sharded.

    `axis` is the mesh axis that shards parameters (of size 1 under Ulysses). `sequence_group` has all ranks that share
    a sample, or one part of it under context parallelism; `context_group` has the ranks whose parts attend to one
    another. For experts, `axis` has the ranks over which each expert's features are split.
    """

    axis: DeviceMesh
    sequence_group: dist.ProcessGroup
    context_group: dist.ProcessGroup
    axes: Axes
    place: int
    """Number of this rank inside its pipeline stage."""
    randomness: Randomness
    recomputation: Recomputation
    """Selective recomputation of the layer."""
    fused_loss: bool = False
    """Whether a fused kernel computes the head's cross entropy."""
    loss_chunks: int = 1
    """Chunks of positions whose logits exist one at a time, recomputed in the backward pass."""
    expert_group: dist.ProcessGroup | None = None
    """Group of ranks over which whole experts are distributed; None if each rank has all of them."""
    expert_order: ExpertOrder | None = None
    """Order of the experts over these ranks; None: by number."""
    order: Tensor | None = None
    """Positions of a sample [s] in the order in which ranks hold them; None if the order is unchanged."""
    stand_in: StandIn | None = None
    """In a measurement, the group for which this rank's keys stand; None outside of measurements."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of ranks over which the layer's matrices are sharded."""
        return self.axis.get_group()

    @property
    def size(self) -> int:
        """The number of ranks over which the layer's matrices are sharded."""
        return self.axis.size()

    @property
    def rank(self) -> int:
        """This rank's index among the ranks over which the layer's matrices are sharded."""
        return self.axis.get_local_rank()

    @property
    def splits_sequence(self) -> bool:
        """Whether each rank has a part of the sequence between the matrix products (Megatron)."""
        return self.axes.gathers_sequence

    @property
    def splits_everything(self) -> bool:
        """Whether each rank has a part of the sequence in the matrix products, too (Ulysses)."""
        return self.axes.exchanges_heads

    @contextmanager
    def entered(self, *inputs: Tensor, keeps: bool = False) -> Iterator[Sequence[Tensor]]:
        """Yield the inputs of column-parallel matrix products with all positions, on every rank.

        The backward pass gathers the inputs again, unless `keeps`: then the products are recomputed anyway.
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
        """Return the sum of a row-parallel matrix product over the ranks, scattered if the sequence is split."""
        total = partial(scatter_sequence if self.splits_sequence else sum_over_group, group=self.group)
        x = self.recomputation.sum(total, x)
        self.randomness.outside()
        return x

    @property
    def attends_apart(self) -> bool:
        """Whether attention differs from a stock kernel over all positions, in order, on this rank."""
        return self.splits_everything or self.attends_across

    @property
    def attends_across(self) -> bool:
        """Whether positions are reordered, or attend to other ranks' positions."""
        return self.axes.shares_context or self.order is not None or self.stand_in is not None

    def positions(self, length: int) -> slice:
        """Return the slice of `length` places that this rank has between the matrix products."""
        return share_of(self.axes.layout.sequence, self.place, length)

    def positions_inside(self, length: int) -> slice:
        """Return the slice of places that this rank has in matrix products: all that attend, except under Ulysses."""
        return self.positions(length) if self.splits_everything else self.attending(length)

    def attending(self, length: int) -> slice:
        """Return the slice of `length` places that attend on this rank: all, except under context parallelism."""
        return share_of(self.axes.context, self.place, length)

    def heads(self, count: int) -> slice:
        """Return the slice of `count` heads with which this rank attends."""
        group = self.sequence_group if self.splits_everything else self.group
        share = count // group.size()
        return slice(group.rank() * share, (group.rank() + 1) * share)

    @property
    def sums_outside(self) -> bool:
        """Whether the gradient of a replicated parameter used between matrix products must be summed over the ranks."""
        return self.splits_sequence and self.size > 1


def share_of(axis: Axis, place: int, length: int) -> slice:
    """Return the slice of a length that the rank with index `place` in its pipeline stage has along an axis."""
    share = length // axis.size
    first = axis.part_of(place) * share
    return slice(first, first + share)


def apply_tensor_parallel(
    modules: Mapping[str, nn.Module], cut_of: Mapping[str, Cut], tensor_parallel: TensorParallel
) -> frozenset[str]:
    """Replace parameters of a layer's modules by this rank's shards, and change the modules' computation accordingly.

    Returns the replicated parameters whose gradients must be summed over the axis after the backward pass.
    """
    partial, made = set[str](), dict[nn.Parameter, nn.Parameter]()
    for module_name, module in modules.items():
        own = dict(module.named_parameters(recurse=False))
        for name in [name for name, parameter in own.items() if parameter in made]:
            module.register_parameter(name, made[own.pop(name)])  # another name of one that is cut already
        lengths = {name: parameter.shape[0] for name, parameter in own.items()}
        rules = dict[Rule | None, None]()
        for name in lengths:
            cut = cut_of[f"{module_name}.{name}".lstrip(".")]
            full = module.get_parameter(name).detach()
            part = full.new_empty(cut.part_shape(tensor_parallel.axes.dense))
            module.register_parameter(name, made.setdefault(own[name], nn.Parameter(part, own[name].requires_grad)))
            rules[cut.rule] = None
            if tensor_parallel.size > 1 and cut.tp_dim is None and (cut.inside or tensor_parallel.sums_outside):
                partial.add(cut.name)
        if isinstance(module, LowRankLinear | LowRankConv1D):
            module.recomputation = tensor_parallel.recomputation
        for rule in rules:
            _compute_with_shards(module, rule, lengths, tensor_parallel)
    return frozenset(partial)


def enter_before(module: nn.Module, tensor_parallel: TensorParallel, keeps: bool) -> None:
    """Give a module all positions of its input on every rank; `keeps` as in `TensorParallel.entered`."""
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
    """Make a module compute with its shards of a rule's parameters; `lengths`: the unsharded first dims, by name."""
    match rule:
        case Rule("row"):
            make_row_parallel(module, tensor_parallel, tensor_parallel.leave)
        case Rule("vocabulary"):
            change_parameters(module, lambda name, local: _without_padding(local, lengths[name], tensor_parallel))
        case Rule("column", fused):
            if fused > 1:
                outputs_last = isinstance(module, Conv1D)
                change_parameters(module, lambda _, local: local.flatten(-2) if outputs_last else local.flatten(0, 1))
            if isinstance(module, Conv1D):
                module.nf = module.nf // tensor_parallel.size


def make_row_parallel(module: nn.Module, tensor_parallel: TensorParallel, leave: Callable[[Tensor], Tensor]) -> None:
    """Make a linear module compute its part of the sum that `leave` makes over the group; only rank 0 adds the bias."""
    keep = float(tensor_parallel.rank == 0)
    if tensor_parallel.size > 1:
        change_parameters(module, lambda name, local: local * keep if name == "bias" else local)
    compute = partial(tensor_parallel.recomputation.product, module.forward)
    module.forward = lambda *args, **kwargs: leave(compute(*args, **kwargs))


def _without_padding(local: Tensor, length: int, tensor_parallel: TensorParallel) -> Tensor:
    return local[: max(0, min(local.shape[0], length - tensor_parallel.rank * local.shape[0]))]


def change_parameters(module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> None:
    """Make a module compute with its own parameters (not its children's) changed by `change(name, parameter)`."""
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


# Attention over a sequence that is split over ranks.
#
# Ulysses (Jacobs et al. 2023) exchanges positions for heads with two all-to-alls, so each rank attends with fewer heads
# to all positions. Context parallelism then attends to the positions of other ranks.


SHARED_ATTENTION = "shardwright_sequence"
"""Name under which transformers' modules find the attention below."""
_HEADS, _POSITIONS = 1, 2
"""Dims of queries, keys and values [b, heads, s, d]; attention's output is [b, s, heads, d]."""
_SINKS = "s_aux"
"""Argument of transformers' attention functions: a further score [heads] in the softmax, without a value."""
_MASKLESS = tuple(kernel.value for kernel in (*FUSED_SDPA, Attention.SDPA_MATH))
"""Kernels that are replaced, without a mask, by attention in blocks of queries and keys."""


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
    """Whether gathered keys and values are kept for the backward pass, because a replay gathers them again."""
    context: ContextParallel
    is_stand_in: bool = False
    """Whether this rank's keys and values stand for the whole group's keys and values, in a measurement."""
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

        `compute`: the stock kernel, which is given `module`. `mask`: one to add to the scores of this rank's positions
        [b or 1, heads or 1, s/n or 1, s], or the document numbers of all positions [b, s], or None: then the module
        determines whether attention is causal.
        """
        asked = kwargs.pop("is_causal", None)
        causal = getattr(module, "is_causal", True) if asked is None else asked
        attention = self._attention(key, causal)
        added = mask if mask is not None and mask.is_floating_point() else None
        documents = mask if added is None else None
        is_plain = added is None and all(kwargs.get(name) is None for name in ("position_bias", _SINKS))
        # Whatever the kernel, such as one that `auto` falls back to, a ring attends in blocks: nothing else can.
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
        """Return the attention to all ranks' keys, for this rank's part of them."""
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
    """Group whose ranks exchange positions for heads; None if no exchange is needed."""
    repeat: int
    """Number of copies of each key and value head, so that the size of the group `heads` divides their number."""
    kernel: Callable[..., Any]
    seen: nn.Module
    """Copy of the module for the kernel, with the settings it would have on a single rank and repeated heads."""
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

    `reduce`: format in which gradients of keys and values are summed; `keeps`: whether a replay gathers both again.
    """
    heads = tensor_parallel.sequence_group if tensor_parallel.splits_everything else None
    degree = 1 if heads is None else heads.size()
    stand_in = tensor_parallel.stand_in
    group, order = tensor_parallel.context_group, tensor_parallel.order
    if stand_in is not None:
        group, order = stand_in.group, stand_in.order
    for module in block.modules():
        # The eager kernel is not a registered function: each model has its own.
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
            # One score for each head, which the eager kernel reads from the module.
            kwargs[_SINKS] = vars(shared.seen)["sinks"] = sinks.chunk(shared.heads.size())[shared.heads.rank()]
    if shared.across is None:
        output, weights = shared.kernel(shared.seen, query, key, value, mask, *args, **kwargs)
    else:
        output = shared.across.attend(shared.kernel, shared.seen, query, key, value, mask, *args, **kwargs)
    if shared.heads is not None:
        output = exchange_dims(output, _POSITIONS - 1, _HEADS + 1, shared.heads)
    return output, weights


def _seen(module: nn.Module, kernel: str, degree: int, repeats: bool) -> tuple[int, nn.Module]:
    """Return how often `degree` ranks repeat key and value heads, and a copy of the module for the kernel to read.

    `repeats`: whether heads are repeated to the number of query heads before the kernel.
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
