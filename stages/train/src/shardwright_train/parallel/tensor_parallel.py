"""Parameters stored as DTensors over a tensor-parallel axis, computed with as plain local shards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardwright_formats.strategy import SequenceParallel
from shardwright_train.parallel.collectives import copy_to_group, gather_sequence, scatter_sequence, sum_over_group

__all__ = ["TensorParallel", "compute_locally", "local_tensor", "make_row_parallel", "shard_parameters"]


@dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel group of a layer and what its ranks share besides: `axis` is the mesh's tp axis."""

    axis: DeviceMesh
    sequence_parallel: SequenceParallel

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the layer's matrices."""
        return self.axis.get_group()

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.axis.get_local_rank()

    @property
    def splits_sequence(self) -> bool:
        """Whether each rank holds its own part of the sequence between the matrix products."""
        return self.sequence_parallel is SequenceParallel.MEGATRON

    def enter(self, x: Tensor) -> Tensor:
        """Before a column-parallel product: all positions, on every rank."""
        return gather_sequence(x, self.group) if self.splits_sequence else copy_to_group(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """After a row-parallel product: the sum over the ranks, split again where the sequence is."""
        return scatter_sequence(x, self.group) if self.splits_sequence else sum_over_group(x, self.group)

    @property
    def outside_gradient(self) -> Placement:
        """How the gradient of a whole parameter lies over the ranks when it is used outside the products."""
        return Partial() if self.splits_sequence else Replicate()


def shard_parameters(module: nn.Module, tp_dims: Mapping[str, int | None], axis: DeviceMesh) -> None:
    """Replace the parameters of a module (by their names inside it) by DTensors that hold this rank's share.

    Raises KeyError when the module has a parameter that `tp_dims` does not name.
    """
    for name, parameter in list(module.named_parameters()):
        owner = module.get_submodule(name.rpartition(".")[0])
        tp_dim = tp_dims[name]
        placement = Replicate() if tp_dim is None else Shard(tp_dim)
        local = parameter.detach()
        if tp_dim is not None:
            local = local.chunk(axis.size(), tp_dim)[axis.get_local_rank()].clone()
        stored = DTensor.from_local(local, axis, [placement], run_check=False)
        owner.register_parameter(name.rpartition(".")[2], nn.Parameter(stored))


def compute_locally(module: nn.Module, gradients: Mapping[str, Placement] | None = None) -> None:
    """Make a module compute with the local shards of its own (not its children's) DTensor parameters.

    `gradients` says for a parameter how its gradient lies over the axis when that is not how the parameter lies.
    """
    _replace_forward(module, dict(gradients or {}), only_first={})


def make_row_parallel(linear: nn.Linear, tensor_parallel: TensorParallel) -> None:
    """Make a linear compute its share of a sum over the group; its bias is added by the first rank alone."""
    keep = {"bias": float(tensor_parallel.rank == 0)}
    _replace_forward(linear, {"bias": Partial()}, only_first=keep)
    linear.register_forward_hook(lambda _module, _inputs, output: tensor_parallel.leave(output))


def _replace_forward(module: nn.Module, gradients: dict[str, Placement], only_first: dict[str, float]) -> None:
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        stored = dict(module._parameters)
        try:
            for name, parameter in stored.items():
                if isinstance(parameter, DTensor):
                    wanted = [gradients[name]] if name in gradients else None
                    local: Tensor = parameter.to_local(grad_placements=wanted)
                    local = local * only_first[name] if name in only_first else local
                    module._parameters[name] = local
            return stock(*args, **kwargs)
        finally:
            module._parameters.update(stored)

    module.forward = forward


def local_tensor(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter, sharing its memory."""
    if not isinstance(parameter, DTensor):
        return parameter
    local: Tensor = parameter.to_local()
    return local
