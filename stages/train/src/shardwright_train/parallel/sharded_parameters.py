"""How the parameters of a layer lie on the mesh: DTensors that share their memory with what is computed with."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["local_tensor", "placed_as", "shard_parameters"]


def shard_parameters(module: nn.Module, tp_dims: Mapping[str, int | None], mesh: DeviceMesh) -> dict[str, nn.Parameter]:
    """A cut and shared module's parameters as DTensors over the axes (dp, tp) of a mesh, by name.

    Autograd does not know them: computing with DTensors costs some 4 % of a small layer's time. `tp_dims` says which
    dim of each parameter the tp axis cuts.
    """
    return {name: _stored(own, tp_dims[name], mesh["dp", "tp"]) for name, own in module.named_parameters()}


def local_tensor(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter, sharing its memory."""
    if not isinstance(parameter, DTensor):
        return parameter
    local: Tensor = parameter.to_local()
    return local


def placed_as(parameter: Tensor, local: Tensor) -> Tensor:
    """A local tensor, such as a gradient, in the place of a parameter's local shard."""
    if not isinstance(parameter, DTensor):
        return local
    # `from_local` checks and computes anew what the parameter knows: some 0.1 ms for every gradient of every step.
    return DTensor(local, parameter._spec, requires_grad=False)


def _stored(own: nn.Parameter, tp_dim: int | None, mesh: DeviceMesh) -> nn.Parameter:
    # FSDP2 cuts the first dim of what the tp axis has left.
    dp: Placement = Shard(0) if isinstance(own, DTensor) and own.placements[-1].is_shard() else Replicate()
    tp: Placement = Replicate() if tp_dim is None else Shard(tp_dim)
    tp_size = mesh["tp"].size()
    if dp.is_shard() and tp_dim == 0 and tp_size > 1:
        dp = _StridedShard(0, split_factor=tp_size)
    shape = list(own.shape)
    if tp_dim is not None:
        shape[tp_dim] *= tp_size
    return nn.Parameter(_dtensor(local_tensor(own.detach()), mesh, (dp, tp), torch.Size(shape)))


def _dtensor(local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    placed: DTensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return placed
