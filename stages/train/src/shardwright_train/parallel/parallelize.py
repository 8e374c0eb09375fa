"""The steps, in order, that make a clean stock module compute one rank's share of a layer.

Before them comes what a layer leaves to weight passes if a schedule splits backward passes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers.pytorch_utils import Conv1D

from shardwright.plan.axes import axes_of
from shardwright.types import ContextParallel, DataParallel, Precision, Recompute, Strategy
from shardwright_train.parallel.checkpointing import apply_activation_checkpointing, compile_block, part_of
from shardwright_train.parallel.data import (
    Gathers,
    GradientAllReduce,
    apply_fsdp,
    apply_fsdp_to_stage,
    as_dtensor,
    data_axes,
    torch_dtype,
)
from shardwright_train.parallel.recomputed_parts import RecomputedParts
from shardwright_train.parallel.sharding_rules import Cut, Parts, Rule, cuts
from shardwright_train.parallel.tensor import TensorParallel, apply_tensor_parallel, enter_before, share_attention
from shardwright_train.torch_private import direct_parameters

# Split backward passes: the matrix products that make the gradients of a layer's matrices are left to separate passes.
#
# For y = x W the backward pass makes the gradient of x, and keeps x and the gradient g of y; the weight pass makes the
# gradient of W, x^T g. Sums over microbatches equal the sums of joint passes to the bit: the products are the same, and
# are added in the same order.


class _Product(NamedTuple):
    """What the gradient of a matrix needs: where the gradient goes, and rows of inputs and of outputs' gradients."""

    owner: nn.Module
    weight: GradientEdge
    x: Tensor
    gradient: Tensor


class _Kept(torch.autograd.Function):
    """A matrix product's output, unchanged, whose backward pass keeps what the gradient of the matrix needs."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, weight: Tensor, keep: Callable[[Tensor, Tensor], None]) -> Tensor:
        # Saved so that hooks on saved tensors, such as recomputation's hooks, apply to x. The matrix is not saved:
        # recomputation would return an alias, whose gradient nobody reads.
        ctx.save_for_backward(x)
        ctx.keep = keep
        return y.detach()  # autograd would make a view of y itself

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.keep(x, gradient)
        return gradient, None, None, None


class WeightProducts:
    """The matrix products for gradients of one layer's matrices that backward passes have left, by pass in order."""

    def __init__(self) -> None:
        self._now: list[_Product] = []
        self._left: deque[list[_Product]] = deque()

    def take_from(self, block: nn.Module) -> None:
        """Make a block's backward passes leave the gradients of its matrices to weight passes.

        The gradients of other parameters, such as experts' stacked matrices or a matrix that several modules share,
        are still made in the backward pass.
        """
        modules = [module for module in block.modules() if type(module) in (nn.Linear, Conv1D)]
        owners = [module.weight for module in block.modules() if isinstance(getattr(module, "weight", None), Tensor)]
        for module in modules:
            if sum(weight is module.weight for weight in owners) == 1:
                module.forward = self._leaving(module, module.forward)

    def end_of_pass(self) -> None:
        """End a backward pass through the layer."""
        self._left.append(self._now)
        self._now = []

    def make(self) -> None:
        """Compute the gradients that the oldest backward pass has left."""
        products = self._left.popleft()
        while products:
            # Autograd first sums what several calls of a module add to one matrix.
            same = [product for product in products if product.owner is products[0].owner]
            products = [product for product in products if product.owner is not same[0].owner]
            with torch.no_grad():
                gradients = [_gradient(product) for product in same]
            edges: Any = [product.weight for product in same]
            del same
            torch.autograd.backward(edges, gradients)

    def _leaving(self, module: nn.Module, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(x: Tensor) -> Tensor:
            direct = direct_parameters(module)
            weight = direct["weight"]
            assert weight is not None
            if not (torch.is_grad_enabled() and weight.requires_grad):
                return stock(x)
            try:
                direct["weight"] = weight.detach()  # type: ignore[assignment]
                y = stock(x)
            finally:
                direct["weight"] = weight
            edge = get_gradient_edge(weight)

            def keep(x: Tensor, gradient: Tensor) -> None:
                self._now.append(_Product(module, edge, x, gradient))

            kept: Tensor = _Kept.apply(y, x, weight, keep)  # type: ignore[no-untyped-call]
            return kept

        return forward


def _gradient(product: _Product) -> Tensor:
    """Return the gradient of a matrix, computed as autograd does."""
    x, gradient = product.x.flatten(0, -2), product.gradient.flatten(0, -2)
    return x.t().mm(gradient) if isinstance(product.owner, Conv1D) else gradient.t().mm(x)


# A module, its units, and the steps.


@dataclass(frozen=True, kw_only=True)
class ModuleStyle:
    """The properties of a stock module that are needed to parallelize it."""

    rules: Mapping[str, Rule]
    """Sharding rules of tensor parallelism, by the ends of parameters' names; the rest is replicated."""
    parts: Parts | None
    """Parts of a block; None for embedding and head."""
    after_split: Callable[[nn.Module, TensorParallel], None]
    """Function that corrects the attributes in which a stock block stores its full size."""
    attention: str
    """Name of the attention kernel."""
    compile: bool
    """Whether torch.compile compiles a block."""
    frozen: frozenset[str] = frozenset()
    """Parameters that are not trained, by their names in the module."""
    has_backward: bool = True
    """Whether a backward pass goes through the layer."""
    products: WeightProducts | None = None
    """What the layer's backward passes leave to weight passes; None if backward passes make all gradients."""


@dataclass(frozen=True)
class Sharing:
    """How ranks shard or replicate a unit's parameters."""

    strategy: Strategy
    mesh: DeviceMesh
    """Mesh with the axes (dp, tp): tp shards the parameters, dp replicates them or, under ZeRO, shards them again.

    If dp does both, (replicate, shard, tp). If experts are sharded over ranks, ep comes before tp.
    """
    tensor_parallel: TensorParallel


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The parameters of a layer that are sharded, and whose gradients are reduced, in the same way."""

    modules: Mapping[str, nn.Module]
    """Modules whose direct parameters belong to the unit, by their names in the layer; the outermost is the first."""
    sharing: Sharing
    partial: frozenset[str]
    """Replicated parameters whose gradients must be summed over the tp axis after the backward pass."""
    gradient_all_reduce: GradientAllReduce | None
    """All-reduce of a replicated unit's gradients; None if FSDP2 or nothing reduces them."""

    @property
    def module(self) -> nn.Module:
        """The outermost module, which FSDP2 may have wrapped."""
        return next(iter(self.modules.values()))

    @property
    def strategy(self) -> Strategy:
        """Return the strategy by which the unit is sharded."""
        return self.sharing.strategy

    def states_dim(self, cut: Cut) -> int:
        """Return the dim along which ZeRO cuts a parameter of the unit."""
        dense = axes_of(self.strategy).dense
        return cut.parameter.of_experts(dense.experts.size).states_dim(dense.tensor.size, dense.shards)

    def buffers(self, cut_of: Mapping[str, Cut]) -> set[nn.Parameter]:
        """Return the unit's buffers, which are replicated on every rank."""
        return {parameter for name, parameter in self.named_parameters() if cut_of[name].is_buffer}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the unit's parameters with their names in the layer, each once."""
        seen = set[nn.Parameter]()
        for prefix, module in self.modules.items():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in seen:
                    yield f"{prefix}.{name}".lstrip("."), parameter
                seen.add(parameter)


@dataclass(frozen=True, kw_only=True)
class ParallelModule:
    """A parallelized module of a layer, with its units: its own parameters, and parts sharded differently."""

    module: nn.Module
    units: tuple[Unit, ...]
    cut_of: Mapping[str, Cut]
    """Sharding of each parameter by expert and tensor parallelism, by its name in the module."""
    style: ModuleStyle

    @cached_property
    def unit_of(self) -> dict[str, Unit]:
        """The unit of each parameter, by its name in the module."""
        return {name: unit for unit in self.units for name, _ in unit.named_parameters()}

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's shards as DTensors, by their names in the module; gradients are stored in them."""
        return {
            name: as_dtensor(parameter, self.cut_of[name].dims, self.unit_of[name].sharing.mesh)
            for name, parameter in self.module.named_parameters()
        }


def parallelize(
    module: nn.Module, style: ModuleStyle, sharings: Mapping[str, Sharing], precision: Precision
) -> ParallelModule:
    """Apply a layer's strategy to its stock module, in place, on the meta device: only shards are ever allocated.

    `sharings` has the layer's sharing under the empty name, and one for each module inside it that is a separate unit.
    """
    # Tensor parallelism: parameters are sharded, and matrix products joined by collectives, which scatter and gather
    # the sequence under Megatron's sequence parallelism.
    if style.products is not None:
        style.products.take_from(module)
    strategy, tensor_parallel = sharings[""].strategy, sharings[""].tensor_parallel
    recompute, cut_of = getattr(strategy, "recompute", Recompute.NONE), {c.name: c for c in cuts(module, style.rules)}
    freed = None
    if style.parts is not None:
        given = recompute, tensor_parallel.recomputation, tensor_parallel.randomness
        freed = RecomputedParts(module, style.parts, cut_of, *given)
    root_of = {name: _root_of(name, sharings) for name, _ in module.named_modules()}
    units = {root: _unit(module, root, root_of, cut_of, sharing) for root, sharing in sharings.items()}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in style.frozen)
    if (parts := style.parts) is not None:
        for name in parts.enter:
            replayed = recompute.replays(part_of(name, parts))
            enters = sharings[root_of[name]].tensor_parallel
            enter_before(module.get_submodule(name), enters, keeps=replayed or style.compile)
        style.after_split(module, tensor_parallel)
        # Ulysses: the sequence is sharded everywhere; attention exchanges positions for heads. Context parallelism:
        # positions attend to other ranks' positions.
        if tensor_parallel.attends_apart:
            keeps = recompute.replays("attention")
            context = getattr(strategy, "context", ContextParallel.GATHER)
            share_attention(module, tensor_parallel, style.attention, torch_dtype(precision.reduce), keeps, context)
        if freed is not None:
            freed.apply()
        # Activation recomputation of attention or MLP. Recomputing a full block is done around its call, in `Layer`.
        if style.compile:
            compile_block(module, parts, recompute, tensor_parallel.sums_outside)
        else:
            apply_activation_checkpointing(
                module, parts, recompute, tensor_parallel.randomness, tensor_parallel.recomputation
            )
    # Data parallelism, inner units first, because FSDP2 takes all parameters that no inner unit has taken.
    inner = {buffer for unit in units.values() for buffer in unit.buffers(cut_of)}
    for unit in reversed(units.values()):
        dim_of = {p: unit.states_dim(cut_of[name]) for name, p in unit.named_parameters()}
        apply_fsdp(unit.module, unit.strategy.data_parallel, data_axes(unit.sharing.mesh), precision, inner, dim_of)
        inner |= _unwrapped(unit, cut_of)
    return ParallelModule(module=module, units=tuple(units.values()), cut_of=cut_of, style=style)


def parallelize_stage(stage: nn.Module, layers: Sequence[ParallelModule]) -> Gathers:
    """Join a chunk's layers, the children of `stage`, under one FSDP2 root."""
    if layers:
        plain = set[nn.Parameter]().union(*(_unwrapped(unit, layer.cut_of) for layer in layers for unit in layer.units))
        apply_fsdp_to_stage(stage, plain, data_axes(layers[0].units[0].sharing.mesh))
    units = [[(unit.module, unit.strategy.data_parallel) for unit in layer.units] for layer in layers]
    return Gathers(units, sum(not layer.style.has_backward for layer in layers))


def _root_of(name: str, roots: Iterable[str]) -> str:
    """Return the innermost root that contains a module; the empty root contains all."""
    return max((root for root in roots if not root or f"{name}.".startswith(f"{root}.")), key=len)


def _unit(layer: nn.Module, root: str, root_of: Mapping[str, str], cut_of: Mapping[str, Cut], sharing: Sharing) -> Unit:
    """Apply tensor parallelism to the modules of a layer that have one root."""
    modules = {name: module for name, module in layer.named_modules() if root_of[name] == root}
    modules[root].tensor_parallel = sharing.tensor_parallel
    data = data_axes(sharing.mesh)
    replicated = sharing.strategy.data_parallel is DataParallel.DDP and data.size() > 1
    return Unit(
        modules=modules,
        sharing=sharing,
        partial=apply_tensor_parallel(modules, cut_of, sharing.tensor_parallel),
        gradient_all_reduce=GradientAllReduce(tuple(modules.values()), data.get_group()) if replicated else None,
    )


def _unwrapped(unit: Unit, cut_of: Mapping[str, Cut]) -> set[nn.Parameter]:
    """Return the parameters of a unit that FSDP2 does not wrap: only the buffers, or all of them."""
    wrapped = isinstance(unit.module, FSDPModule)
    return unit.buffers(cut_of) if wrapped else {parameter for _, parameter in unit.named_parameters()}
