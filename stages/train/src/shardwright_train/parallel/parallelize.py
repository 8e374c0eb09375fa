"""The steps, in order, that make a clean stock module compute one rank's share of a layer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright_formats.types import DataParallel, Precision, Recompute, SequenceParallel, Strategy
from shardwright_train.parallel.checkpointing import apply_activation_checkpointing, part_of
from shardwright_train.parallel.compiling import compile_block
from shardwright_train.parallel.data import (
    apply_fsdp,
    apply_fsdp_to_stage,
    data_axes,
    sharded_parameters,
)
from shardwright_train.parallel.gathers import Gathers
from shardwright_train.parallel.gradient_sums import GradientAllReduce
from shardwright_train.parallel.sequence import apply_ulysses
from shardwright_train.parallel.sharding_rules import Parts, Rule
from shardwright_train.parallel.tensor import Sharding, TensorParallel, apply_tensor_parallel, enter_before


@dataclass(frozen=True, kw_only=True)
class ModuleStyle:
    """The facts about a stock module that parallelizing it needs."""

    rules: Mapping[str, Rule]
    """Sharding rules of tensor parallelism, by the ends of modules' names; the rest is replicated."""
    parts: Parts | None
    """Parts of a block; None for embedding and head."""
    after_split: Callable[[nn.Module, TensorParallel], None]
    """Function that corrects the attributes in which a stock block stores its full size."""
    attention: str
    """Name of the attention kernel."""
    compile: bool
    """Whether torch.compile compiles a block."""


@dataclass(frozen=True, kw_only=True)
class ParallelModule:
    """A parallelized module, with the reduction that its gradients still need."""

    module: nn.Module
    strategy: Strategy
    mesh: DeviceMesh
    tensor_parallel: TensorParallel
    sharding: Sharding
    gradient_all_reduce: GradientAllReduce | None
    """All-reduce of a replicated layer's gradients; None where FSDP2 or nothing reduces them."""

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's shards as DTensors, by their names in the module; they take the gradients."""
        return sharded_parameters(self.module, self.sharding.tp_dims, self.mesh)


def parallelize(
    module: nn.Module,
    strategy: Strategy,
    style: ModuleStyle,
    tensor_parallel: TensorParallel,
    mesh: DeviceMesh,
    precision: Precision,
) -> ParallelModule:
    """Apply a layer's strategy to its stock module, in place; it is on the meta device: only shards are allocated.

    `mesh` has the axes (dp, tp): tp shards the parameters, dp replicates them or, under ZeRO, shards them again; or
    (replicate, shard, tp), where it does both.
    """
    # Tensor parallelism: parameters are sharded, the products joined by collectives; with Megatron's sequence
    # parallelism these scatter and gather the sequence.
    sharding = apply_tensor_parallel(module, style.rules, tensor_parallel)
    module.tensor_parallel = tensor_parallel  # type: ignore[assignment]
    recompute = getattr(strategy, "recompute", Recompute.NONE)
    if (parts := style.parts) is not None:
        for name in parts.enter:
            replayed = recompute in (Recompute.FULL, Recompute.SELECTIVE, part_of(name, parts))
            enter_before(module.get_submodule(name), tensor_parallel, keeps=replayed or style.compile)
        style.after_split(module, tensor_parallel)
        # Ulysses: the sequence is sharded everywhere; attention exchanges positions for heads.
        if strategy.sequence_parallel is SequenceParallel.ULYSSES and strategy.tp_size > 1:
            apply_ulysses(module, tensor_parallel.sequence_group, style.attention)
        # Activation recomputation of attention or MLP; that of a full block is around its call.
        if style.compile:
            compile_block(module, parts, recompute, tensor_parallel)
        else:
            apply_activation_checkpointing(module, parts, recompute, tensor_parallel.randomness)
    # Data parallelism: FSDP2 shards, or replicas sum their gradients in place.
    data = data_axes(mesh)
    apply_fsdp(module, strategy.data_parallel, data, precision)
    replicated = strategy.data_parallel is DataParallel.DDP and data.size() > 1
    return ParallelModule(
        module=module,
        strategy=strategy,
        mesh=mesh,
        tensor_parallel=tensor_parallel,
        sharding=sharding,
        gradient_all_reduce=GradientAllReduce(module, data.get_group()) if replicated else None,
    )


def parallelize_stage(stage: nn.Module, layers: Sequence[ParallelModule]) -> Gathers:
    """Join the layers of a pipeline stage's range of layers, the children of `stage`, under one FSDP2 root."""
    if layers:
        apply_fsdp_to_stage(stage, [layer.module for layer in layers], data_axes(layers[0].mesh))
    return Gathers([(layer.module, layer.strategy.data_parallel) for layer in layers])
