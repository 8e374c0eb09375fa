"""Data parallelism of a unit of a layer: sharded by FSDP2, or replicated with gradients reduced where they lie."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwright_formats.types import DataParallel, Precision
from shardwright_train.torch_private import StridedShard, gather_asynchronously, replicate, with_spec_of

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name in a plan's precision."""
    return _DTYPES[name]


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes of a layer's mesh that data parallelism works on: all but the last, tp."""
    assert mesh.mesh_dim_names is not None
    return mesh[mesh.mesh_dim_names[:-1]]


def apply_fsdp(
    module: nn.Module, kind: DataParallel, axes: DeviceMesh, precision: Precision, inner: set[nn.Parameter]
) -> None:
    """Make the ranks of `axes` share the states of a module, except those of `inner` units; gradients are plain sums.

    With two axes (HSDP), the first replicates the shards of the second.
    FSDP2 wraps every unit but those that are replicated and computed with in the format they are kept in.
    """
    replicated = kind is DataParallel.DDP or axes.size() == 1
    if replicated and precision.parameters == precision.compute == precision.reduce:
        return
    policy = MixedPrecisionPolicy(
        param_dtype=torch_dtype(precision.compute), reduce_dtype=torch_dtype(precision.reduce)
    )
    if kind is DataParallel.DDP and axes.size() > 1:
        replicate(module, mesh=axes, mp_policy=policy, ignored_params=inner)
    else:
        reshards = kind is DataParallel.ZERO3
        fully_shard(module, mesh=axes, mp_policy=policy, reshard_after_forward=reshards, ignored_params=inner)
    _sum_gradients(module)


def apply_fsdp_to_stage(module: nn.Module, plain: set[nn.Parameter], axes: DeviceMesh) -> None:
    """Wrap a pipeline stage, so that FSDP2's units share streams; `plain` parameters are in units without FSDP2."""
    fully_shard(module, mesh=axes, reshard_after_forward=False, ignored_params=plain)
    _sum_gradients(module)
    assert isinstance(module, FSDPModule)
    gather_asynchronously(module)


def _sum_gradients(module: nn.Module) -> None:
    # The loss is already divided by the global number of tokens, so the ranks' gradients are summed, not averaged.
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def local_tensor(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, sharing its memory."""
    if not isinstance(parameter, DTensor):
        return parameter
    local: Tensor = parameter.to_local()
    return local


def placed_as(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a DTensor like a parameter with another local tensor, such as a gradient, as its shard."""
    if not isinstance(parameter, DTensor):
        return local
    # `from_local` checks and computes anew what the parameter knows: some 0.1 ms for every gradient of every step.
    return with_spec_of(parameter, local)


def as_dtensor(parameter: nn.Parameter, tp_dim: int | None, mesh: DeviceMesh) -> nn.Parameter:
    """Return a parameter of a parallelized module as a DTensor over all axes of a mesh; tp shards its dim `tp_dim`.

    It shares its memory with what is computed with. Autograd does not know it: computing with DTensors costs some 4 %
    of a small layer's time.
    """
    # FSDP2 shards the first dim of what the tp axis has left.
    *outer, dp = parameter.placements if isinstance(parameter, DTensor) else (Replicate(),)
    tp: Placement = Replicate() if tp_dim is None else Shard(tp_dim)
    tp_size = mesh.size(-1)
    if dp.is_shard() and tp_dim == 0 and tp_size > 1:
        dp = StridedShard(0, split_factor=tp_size)
    shape = list(parameter.shape)
    if tp_dim is not None:
        shape[tp_dim] *= tp_size
    local, stride = local_tensor(parameter.detach()), torch.empty(shape, device="meta").stride()
    placed = DTensor.from_local(local, mesh, (*outer, dp, tp), run_check=False, shape=torch.Size(shape), stride=stride)
    return nn.Parameter(placed)
