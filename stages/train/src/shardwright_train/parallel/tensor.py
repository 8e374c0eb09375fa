"""Tensor parallelism: modules that compute with shards of their matrices, and the sums that join them.

A block is Y = f(X A) B with A sharded by columns and B by rows (Shoeybi et al. 2019): rank r computes f(X A_r) B_r
without communication, and Y = sum_r f(X A_r) B_r is one all-reduce; its transpose sums the gradient of X. With
Megatron's sequence parallelism (Korthikanti et al. 2022) the all-reduce becomes a reduce-scatter, and X is gathered
before A.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.pytorch_utils import Conv1D

from shardwright.plan.axes import Axes, Axis
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.parallel.collectives import (
    copy_to_group,
    gather_sequence,
    gathered_again,
    scatter_sequence,
    sum_over_group,
)
from shardwright_train.parallel.context import StandIn
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
    another. For experts, `axis` has the ranks that share each expert's features.
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
        """The group of ranks that share the layer's matrices."""
        return self.axis.get_group()

    @property
    def size(self) -> int:
        """The number of ranks that share the layer's matrices."""
        return self.axis.size()

    @property
    def rank(self) -> int:
        """This rank's index among the ranks that share the layer's matrices."""
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
        """Yield the inputs of column-parallel products with all positions, on every rank.

        In the backward pass the products gather their inputs again, unless `keeps`: they are recomputed anyway.
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
        """The sum of a row-parallel product over the ranks, scattered if the sequence is split."""
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
        """The places, of `length` in all, that this rank has between the matrix products."""
        return share_of(self.axes.layout.sequence, self.place, length)

    def positions_inside(self, length: int) -> slice:
        """The places that this rank works on in the matrix products: all that attend, except under Ulysses."""
        return self.positions(length) if self.splits_everything else self.attending(length)

    def attending(self, length: int) -> slice:
        """The places, of `length` in all, that attend on this rank: all, except under context parallelism."""
        return share_of(self.axes.context, self.place, length)

    def heads(self, count: int) -> slice:
        """The heads, of `count` in all, that this rank attends with."""
        group = self.sequence_group if self.splits_everything else self.group
        share = count // group.size()
        return slice(group.rank() * share, (group.rank() + 1) * share)

    @property
    def sums_outside(self) -> bool:
        """Whether the gradient of a replicated parameter used outside the products is a sum over the ranks."""
        return self.splits_sequence and self.size > 1


def share_of(axis: Axis, place: int, length: int) -> slice:
    """The share of a length that the rank with number `place` inside its pipeline stage has along an axis."""
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
    """Make a module compute with its shards of a rule's parameters, if `lengths` are all first dims in full."""
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
    """Make a matrix product compute its part of what `leave` sums over the group; only the first rank adds its bias."""
    keep = float(tensor_parallel.rank == 0)
    if tensor_parallel.size > 1:
        change_parameters(module, lambda name, local: local * keep if name == "bias" else local)
    compute = partial(tensor_parallel.recomputation.product, module.forward)
    module.forward = lambda *args, **kwargs: leave(compute(*args, **kwargs))


def _without_padding(local: Tensor, length: int, tensor_parallel: TensorParallel) -> Tensor:
    return local[: max(0, min(local.shape[0], length - tensor_parallel.rank * local.shape[0]))]


def change_parameters(module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> None:
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
