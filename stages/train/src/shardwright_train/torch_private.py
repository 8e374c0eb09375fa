"""The private names of PyTorch that the runtime uses, each with the public name that would replace it.

No other file may use such a name (`tests/architecture` checks this): all that a new version of PyTorch may break is
here. `make versions` runs it under each declared version.

| private name | used for | what would replace it |
| --- | --- | --- |
| `torch._foreach_mul_`, `torch._foreach_norm` | one kernel for many gradients | `torch.nn.utils.get_total_norm` and \
`clip_grads_with_norm_`, once they take gradients on several meshes, and weights for replicas |
| `found_inf`, `grad_scale` of optimizers (no underscore, not documented) | an update that the device alone decides \
on | \
`torch.amp.GradScaler`, once it accepts a norm that was summed over ranks |
| `torch.distributed._composable.replicate_with_fsdp.replicate` | DDP with FSDP2's mixed precision | `fully_shard` \
over a mesh (replicate, shard of size 1), at the cost of gathering from a group of one |
| `_get_fsdp_state`, `_fsdp_param_group`, `FSDPParam`, `_unsharded_param` | gradients summed in place | a \
public reduction hook of FSDP2; `set_all_reduce_hook` exists, but it only runs after FSDP2's own reduction |
| `FSDPParamGroup.post_backward`, `accumulate_unsharded_grad_if_needed`, `to_accumulated_grad_if_needed` | gradients \
that weight passes make outside of autograd | a public way to reduce a unit's gradients at another time |
| `_root_post_backward_final_callback` | ending a step of layers through which no backward pass goes | a public way to \
reset what forward passes have recorded, and to reshard |
| `_all_gather_result`, `all_gather_outputs`, `is_unsharded` | telling activations from gathered parameters in the dry \
run | counting the storages that the gathers' own operations make |
| `_set_unshard_async_op` | gathers during the computation on CPU too, not held longer than needed | its public name, \
once it has one; `FSDPModule.unshard` does the same for a single module |
| `_StridedShard` | ZeRO over the dim that tensor parallelism shards | `distribute_tensor` on a mesh in the other \
order, if checkpoints may then lie otherwise |
| `DTensor._spec`, `DTensor.__new__` with a spec | gradients as DTensors | `DTensor.from_local`, which takes 0.1 ms \
more each |
| `torch._subclasses.fake_tensor`: `FakeTensor`, `FakeTensorMode`; `FakeStore` | the dry run | none; the `fake` \
backend and the fake tensors of `torch.export` are the nearest |
| `TorchDispatchMode` | counting collectives and storages | none; `TorchFunctionMode` does not see collectives |
| `_EventType`, `_ExtraFields_Allocation`, `_ProfilerEvent` | allocations on CPU | `export_memory_timeline`, or an \
allocator of CPU memory with counters |
| `UntypedStorage._cdata` | telling storages of fake tensors apart | `data_ptr`, once fake tensors have one |
| `Tensor._version` | one copy of a storage that several operators save, but not of one written to between | none |
| `torch._C._autograd._top_saved_tensors_default_hooks` | hooks of saved tensors inside others, which PyTorch does not \
nest | none |
| `torch.utils._pytree.tree_leaves` | tensors of nested arguments | `optree`, another package |
| `nn.Module._parameters` | swapping parameters during a call | `torch.func.functional_call`, which swaps by full \
name |
| `default_pg_timeout`, `default_pg_nccl_timeout` (no underscore, not documented) | timeouts of a mesh's groups | \
`DeviceMesh.from_group` over groups that were made with a timeout |
| `torch._dynamo.config`: `skip_fwd_side_effects_in_bwd_under_checkpoint`, `recompile_limit`, \
`accumulated_recompile_limit`, `fail_on_recompile_limit_hit` | parameters swapped inside recomputed and compiled \
parts; no layer that runs uncompiled in silence | `torch.compiler.config`, which has other settings so far |
| `torch._C._distributed_c10d._dump_fr_trace_json`, `_dump_nccl_trace_json` | the collectives that a hanging rank has \
entered | `torch.distributed.flight_recorder`, which reads pickles, once it makes and reads JSON |
| `torch.ops._c10d_functional` | recognizing the collectives in a compiled graph | none |
| `torch.ops.aten._scaled_dot_product_flash_attention`, `_scaled_dot_product_flash_attention_backward`, \
`_scaled_dot_product_efficient_attention`, `_scaled_dot_product_efficient_attention_backward`, \
`_scaled_dot_product_flash_attention_for_cpu`, `_scaled_dot_product_flash_attention_for_cpu_backward` | log-sum-exps, \
with which ring attention merges blocks of attention | an option of `scaled_dot_product_attention` that returns them, \
with a backward pass that accepts merged ones |
| `torch._fused_sdp_choice` | naming the kernel that `scaled_dot_product_attention` uses | none; `torch.profiler` \
shows the kernels that ran |
| `torch.ops.aten._grouped_mm` | recognizing grouped matrix products, which selective recomputation keeps | none |
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType as EventType
from torch._C._profiler import _ExtraFields_Allocation as AllocationFields
from torch._C._profiler import _ProfilerEvent as ProfilerEvent
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.attention import SDPBackend
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "AllocationFields",
    "EventType",
    "FSDPParam",
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "ProfilerEvent",
    "StridedShard",
    "TorchDispatchMode",
    "replicate",
    "tree_leaves",
]

_MAX_GRAPHS = 4096
"""Largest number of compiled graphs per piece of code: layers with different strategies need separate graphs."""

_DUMPS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}

foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
collective_operators = torch.ops._c10d_functional
grouped_product = torch.ops.aten._grouped_mm.default
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention.default
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
efficient_attention_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default


def sdpa_choice(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> str:
    """Return the name of the kernel that `scaled_dot_product_attention` uses for its arguments, such as `cudnn`."""
    choice = SDPBackend(torch._fused_sdp_choice(query, key, value, **settings))
    return choice.name.removesuffix("_ATTENTION").lower()


traced_attention = torch.ops.aten._scaled_dot_product_flash_attention
"""FlashAttention's operator, which can be traced with fake tensors without a GPU."""


def storage_key(tensor: Tensor) -> int:
    """Return a key that identifies a tensor's storage, also for fake tensors."""
    key: int = tensor.untyped_storage()._cdata
    return key


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor's storage was written to in place."""
    version: int = tensor._version
    return version


def hooks_around() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return the current hooks for saved tensors, which hooks that replace them must call."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found or (_unchanged, _unchanged)


def _unchanged(x: Any) -> Any:
    return x


def fsdp_parameters(module: nn.Module) -> Iterator[FSDPParam]:
    """Yield FSDP2's record of each parameter of a module, without parameters of wrapped modules inside it."""
    if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group) is not None:
        yield from group.fsdp_params


def gathered_parameter(parameter: FSDPParam) -> nn.Parameter | None:
    """Return the gathered parameter with which the layer computes, or None if it was never gathered."""
    gathered: nn.Parameter | None = getattr(parameter, "_unsharded_param", None)
    return gathered


def gathered_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters that FSDP2 has gathered, or is gathering."""
    if not isinstance(module, FSDPModule) or (group := module._get_fsdp_state()._fsdp_param_group) is None:
        return 0
    if (gathering := group._all_gather_result) is not None:
        return gathering.all_gather_output.nbytes
    gathered = (x for p in group.fsdp_params for x in p.all_gather_outputs) if group.is_unsharded else ()
    return sum(x.nbytes for x in gathered)


def end_without_backward(module: nn.Module) -> None:
    """Reset FSDP2's record of forward passes in a root module without a backward pass, and reshard its parameters."""
    assert isinstance(module, FSDPModule)
    module._get_fsdp_state()._root_post_backward_final_callback()


def end_of_weight_pass(module: nn.Module, reduces: bool) -> None:
    """Make FSDP2 take the gradients that a weight pass has added to a unit outside of autograd; reduce them if asked.

    After a backward pass FSDP2 does so by itself, in the pass that follows.
    """
    if not isinstance(module, FSDPModule) or (group := module._get_fsdp_state()._fsdp_param_group) is None:
        return
    # All in the format of the reduction, as the gradients of the backward pass, which did not reduce, already are.
    for record in group.fsdp_params:
        if gathered_parameter(record) is not None:
            record.accumulate_unsharded_grad_if_needed()
            record.to_accumulated_grad_if_needed()
    if reduces:
        group.post_backward()


def gather_asynchronously(module: FSDPModule) -> None:
    """Make FSDP2 wait for a gather only when the layer is called, for all layers of a module."""
    module._set_unshard_async_op(True)


def with_spec_of(parameter: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor with the layout of `parameter` and the local shard `local`, without checks."""
    spec = parameter._spec
    if spec.tensor_meta is not None and spec.tensor_meta.dtype is not local.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)


def direct_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict in which a module looks up its own parameters (not its children's); changes act at once."""
    return module._parameters


def compiled(function: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """Return a function that is compiled at its first call and raises instead of running uncompiled."""
    import torch._dynamo  # 1 s of every start otherwise

    config: Any = torch._dynamo.config
    config.recompile_limit, config.accumulated_recompile_limit = _MAX_GRAPHS, _MAX_GRAPHS
    config.fail_on_recompile_limit_hit = True
    # A forward pass puts back all that it swaps: a replay has no side effects to repeat.
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    return torch.compile(function, backend=backend)


@contextmanager
def default_timeout(timeout: timedelta) -> Iterator[None]:
    """Set the timeout of process groups that are made inside without one, such as the groups of a DeviceMesh."""
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    before = {name: getattr(distributed_c10d, name) for name in names}
    vars(distributed_c10d).update(dict.fromkeys(names, timeout))
    try:
        yield
    finally:
        vars(distributed_c10d).update(before)


def flight_recorder_trace(backend: str) -> bytes:
    """Return the recorded collectives that this rank has entered over `nccl` or `gloo`, as JSON."""
    from torch._C import _distributed_c10d as c10d

    dump: Callable[[bool, bool], bytes] = getattr(c10d, _DUMPS[backend])
    return dump(True, False)


def step_unless(optimizer: torch.optim.Optimizer, forbidden: Tensor, divisor: Tensor | None) -> None:
    """Take a fused step that divides the gradients by `divisor` and changes nothing if `forbidden` is 1.

    Both are float32 numbers on the device.
    """
    optimizer.found_inf, optimizer.grad_scale = forbidden, divisor  # type: ignore[attr-defined]
    optimizer.step()
