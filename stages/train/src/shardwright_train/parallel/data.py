"""Data parallelism of one layer: what its ranks share, on PyTorch's FSDP2."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwright_formats.types.plan import Plan
from shardwright_formats.types.strategy import DataParallel

__all__ = ["apply_fsdp", "apply_fsdp_to_stage", "prefetch_in_backward", "torch_dtype"]


_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in a plan's precision."""
    return _DTYPES[name]


def apply_fsdp(module: nn.Module, kind: DataParallel, axis: DeviceMesh, plan: Plan) -> None:
    """Make the ranks of `axis` share a layer's states; gradients are plain sums over them.

    FSDP2 wraps every layer but those that are held whole and computed with as they are stored.
    """
    precision, whole = plan.precision, kind is DataParallel.DDP or axis.size() == 1
    if whole and precision.parameters == precision.compute == precision.reduce:
        return
    policy = MixedPrecisionPolicy(
        param_dtype=torch_dtype(precision.compute), reduce_dtype=torch_dtype(precision.reduce)
    )
    if kind is DataParallel.DDP and axis.size() > 1:
        replicate(module, mesh=axis, mp_policy=policy)
    else:
        fully_shard(module, mesh=axis, mp_policy=policy, reshard_after_forward=kind is DataParallel.ZERO3)
    _sum_gradients(module)


def apply_fsdp_to_stage(module: nn.Module, layers: Sequence[nn.Module], axis: DeviceMesh) -> None:
    """Wrap a whole pipeline stage, which has no parameters outside its layers, so that FSDP2's layers share streams."""
    plain = {p for layer in layers if not isinstance(layer, FSDPModule) for p in layer.parameters()}
    fully_shard(module, mesh=axis, reshard_after_forward=False, ignored_params=plain)
    _sum_gradients(module)


def prefetch_in_backward(modules: Sequence[tuple[nn.Module, DataParallel]]) -> None:
    """Let the backward pass of each layer gather the parameters of the ZeRO-3 layer before it ahead of time.

    By itself FSDP2 follows the order of all forward passes since the last step, and over several microbatches gathers
    layers that are not needed.
    """
    wrapped = [(module, kind) for module, kind in modules if isinstance(module, FSDPModule)]
    for (module, _), (before, kind) in zip(wrapped, [*wrapped[:1], *wrapped], strict=False):
        # A layer that prefetches itself, which is there already, prefetches nothing.
        target = before if kind is DataParallel.ZERO3 else module
        module.set_modules_to_backward_prefetch([target])


def _sum_gradients(module: nn.Module) -> None:
    # The loss is already divided by the global number of tokens, so the ranks' gradients are summed, not averaged.
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
