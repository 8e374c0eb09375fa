"""Data parallelism of a layer's modules: FSDP2 shards their states, or replicas sum their gradients.

With n ranks, ZeRO-2 shards gradients and optimizer states (1/n each), ZeRO-3 parameters too (Rajbhandari et al. 2020):
these are gathered one unit ahead of the pass that computes with them. DDP replicates everything and all-reduces
gradients.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwright.plan.communication import gradient_buckets
from shardwright.plan.schedules.passes import Pass
from shardwright.types import DataParallel, Precision
from shardwright_train.torch_private import (
    StridedShard,
    fsdp_parameters,
    gather_asynchronously,
    gathered_parameter,
    replicate,
    with_spec_of,
)

Sharded = tuple[nn.Module, DataParallel]
"""A unit: a module that FSDP2 may have wrapped, and its kind of data parallelism."""
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_CUTTING = ("ep", "tp")
"""Axes of a mesh that cut parameters before data parallelism does: first experts, then features."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype with a name from a plan's precision."""
    return _DTYPES[name]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make a dtype the default of tensors created inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes of a layer's mesh for data parallelism: all except the axes of expert and tensor parallelism."""
    return mesh[tuple(name for name in _axis_names(mesh) if name not in _CUTTING)]


def _axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names


def apply_fsdp(
    module: nn.Module,
    kind: DataParallel,
    axes: DeviceMesh,
    precision: Precision,
    inner: set[nn.Parameter],
    dim_of: Mapping[nn.Parameter, int],
) -> None:
    """Shard or replicate the states of a module over `axes`, except parameters of `inner` units; gradients are summed.

    `dim_of` gives the dim along which each parameter is sharded. With two axes (HSDP), the first replicates the shards
    of the second. FSDP2 wraps every unit, except a replicated one that is kept, computed and reduced in a single
    format.
    """
    replicated = kind is DataParallel.DDP or axes.size() == 1
    if replicated and precision.parameters == precision.compute == precision.reduce:
        return
    # Inputs are not cast: the stock model has some in float32 too, and a recomputed forward pass would get them without
    # FSDP2's cast (up to torch 2.11).
    policy = MixedPrecisionPolicy(
        param_dtype=torch_dtype(precision.compute),
        reduce_dtype=torch_dtype(precision.reduce),
        cast_forward_inputs=False,
    )
    if kind is DataParallel.DDP and axes.size() > 1:
        replicate(module, mesh=axes, mp_policy=policy, ignored_params=inner)
    else:
        reshards = kind is DataParallel.ZERO3
        fully_shard(
            module,
            mesh=axes,
            mp_policy=policy,
            reshard_after_forward=reshards,
            shard_placement_fn=lambda parameter: Shard(dim_of[parameter]),
            ignored_params=inner,
        )
    _sum_gradients(module)


def apply_fsdp_to_stage(module: nn.Module, plain: set[nn.Parameter], axes: DeviceMesh) -> None:
    """Make a pipeline stage the FSDP2 root, so that its units share streams; `plain` parameters are not wrapped."""
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
    with torch.no_grad():  # nobody computes gradients through it, so it needs no node of autograd
        local: Tensor = parameter.to_local()
    return local


def placed_as(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a DTensor with a parameter's placements, around another local tensor such as its gradient."""
    if not isinstance(parameter, DTensor):
        return local
    # `from_local` recomputes and checks what the parameter already holds: about 0.1 ms for each gradient of each step.
    return with_spec_of(parameter, local)


def as_dtensor(parameter: nn.Parameter, dims: Mapping[str, int], mesh: DeviceMesh) -> nn.Parameter:
    """Return a module's parameter as a DTensor over all axes of a mesh; `dims`: the dims that ep and tp cut, by axis.

    It shares its memory with the module's parameter and takes no part in autograd, because computing with DTensors
    costs some 4 % of a small layer's time.
    """
    replicated = (Replicate(),) * sum(name not in _CUTTING for name in _axis_names(mesh))
    *outer, dp = parameter.placements if isinstance(parameter, DTensor) else replicated
    shape, cutting = list(parameter.shape), list[Placement]()
    for axis, name in enumerate(_axis_names(mesh)):
        dim, parts = dims.get(name), mesh.size(axis)
        if name in _CUTTING:
            cutting.append(Replicate() if dim is None else Shard(dim))
        if dim is not None and parts > 1:
            shape[dim] *= parts
            # FSDP2 shards what these axes have left of the dim.
            dp = StridedShard(dim, split_factor=parts) if dp.is_shard(dim) else dp
    local, stride = local_tensor(parameter.detach()), torch.empty(shape, device="meta").stride()
    placed = DTensor.from_local(
        local, mesh, (*outer, dp, *cutting), run_check=False, shape=torch.Size(shape), stride=stride
    )
    return nn.Parameter(placed, parameter.requires_grad)


_RESHARD_AFTER = {
    Pass.FORWARD: FSDPModule.set_reshard_after_forward,
    Pass.BACKWARD: FSDPModule.set_reshard_after_backward,
}
_PREFETCH = {
    Pass.FORWARD: FSDPModule.set_modules_to_forward_prefetch,
    Pass.BACKWARD: FSDPModule.set_modules_to_backward_prefetch,
}


class Gathers:
    """The gathers of a model chunk: FSDP2 gathers the next ZeRO-3 unit while the current one computes.

    By default, FSDP2 follows in the backward pass the order of all forward passes since the last step, and over several
    microbatches gathers units that are not needed. In the forward pass it gathers a unit when it gets there. `layers`
    has the units of each layer in the order of the forward pass. A layer's outermost unit is the first, also of its
    backward pass. No backward pass goes through the first `forward_only` layers.
    """

    def __init__(self, layers: Sequence[Sequence[Sharded]], forward_only: int = 0) -> None:
        backward = [[units[0], *units[:0:-1]] for units in reversed(layers[forward_only:])]
        self._meets = {Pass.FORWARD: len(backward) > 0, Pass.BACKWARD: forward_only == 0}
        """Whether the other pass begins with the layer that a pass ends with."""
        orders = {Pass.FORWARD: layers, Pass.BACKWARD: backward}
        self._first = {during: _zero3(order[0][:1]) if order else [] for during, order in orders.items()}
        self._last = {during: _zero3(order[-1]) if order else [] for during, order in orders.items()}
        self._outermost = {during: _zero3(order[-1][:1]) if order else [] for during, order in orders.items()}
        """The outermost unit of the layer that a pass ends with."""
        self._started = False  # FSDP2 gathers nothing ahead for a chunk that was never called
        # Inner units gather nothing ahead: a replay in the backward pass calls them as a forward pass does.
        for (outermost, *inner), following in pairwise([*layers, []]):
            for module, _ in _wrapped([[outermost]]):
                module.set_modules_to_forward_prefetch(_zero3([*inner, *following[:1]]))
        wrapped = _wrapped(backward)
        # A unit that prefetches itself prefetches nothing, as it is gathered already; FSDP2 itself fills an empty list.
        for i, (module, _) in enumerate(wrapped):
            module.set_modules_to_backward_prefetch(_zero3(wrapped[i + 1 : i + 2]) or [module])

    def start(self, during: Pass) -> None:
        """Start to gather a pass's first unit while the pass waits for its input, unless that was done before."""
        for module in self._first[during]:
            module.unshard(async_op=True)

    def prepare(self, during: Pass, then: "tuple[Gathers, Pass] | None") -> None:
        """Prepare a pass: its last layer stays gathered if `then` begins with it, else prefetch `then`'s first unit."""
        self._started = True
        stays = then is not None and then[0] is self and then[1] is not during and self._meets[during]
        following = [] if then is None or stays else then[0].ahead(then[1])
        for module in self._last[during]:
            _RESHARD_AFTER[during](module, not stays, recurse=False)
        for module in self._outermost[during]:
            # An empty list would make FSDP2 choose the units that it prefetches in a backward pass.
            _PREFETCH[during](module, following or [module] * during.makes_gradients)

    def ahead(self, during: Pass) -> list[FSDPModule]:
        """Return the unit that a pass begins with, if ZeRO-3 gathers it and the previous pass can prefetch it."""
        return self._first[during] if self._started else []


def _wrapped(layers: Iterable[Sequence[Sharded]]) -> list[tuple[Any, DataParallel]]:
    return [(module, kind) for units in layers for module, kind in units if isinstance(module, FSDPModule)]


def _zero3(units: Sequence[Sharded]) -> list[FSDPModule]:
    return [module for module, kind in _wrapped([units]) if kind is DataParallel.ZERO3]


class _Bucket(NamedTuple):
    """Gradients that are being reduced in one buffer, of which they are views."""

    parameters: tuple[nn.Parameter, ...]
    gradients: tuple[Tensor, ...]
    work: dist.Work


class GradientAllReduce:
    """The gradients of one replicated (DDP) unit of a layer, reduced once a step or every microbatch.

    FSDP2's own reduction copies them three times and, on CPU, waits for each layer's message before the next layer's
    backward pass. Here they are summed in buckets (see `gradient_buckets`) whose messages start when the layer's
    backward pass is over, and are waited for before the next backward pass, or at the end of the step. `modules` hold
    the unit's parameters, the outermost module first.
    """

    def __init__(self, modules: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
        self.armed = False
        """Whether the next backward pass through the layer reduces."""
        self._modules, self._group = modules, group
        self._buckets: list[_Bucket] | None = None
        self._sums: dict[nn.Parameter, Tensor] = {}

    def start(self) -> None:
        """Start the all-reduce over the replicas, once the layer's backward pass is over."""
        if self.armed and self._buckets is None:
            taken = list(_take_gradients(self._modules))
            buckets = [taken[part.start : part.stop] for part in gradient_buckets([x.nbytes for _, x in taken])]
            del taken
            self._buckets = []
            while buckets:
                self._buckets.append(_sent(buckets.pop(0), self._group))

    def collect(self) -> None:
        """Wait for the last backward pass's reduction, and add its result to earlier passes' results.

        Raises RuntimeError if a gradient came after its layer's backward pass was taken to be over.
        """
        if self._buckets is None:
            return
        if any(True for _ in _take_gradients(self._modules)):
            raise RuntimeError("a gradient came too late to be summed over the replicas")
        for bucket in self._buckets:
            bucket.work.wait()
            for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
                before = self._sums.get(parameter)
                self._sums[parameter] = gradient.to(parameter.dtype) if before is None else before.add_(gradient)
        self.armed, self._buckets = False, None

    def finish(self) -> None:
        """Store the sums as the parameters' gradients."""
        self.collect()
        for parameter, gradient in self._sums.items():
            parameter.grad = placed_as(parameter, gradient)
        self._sums = {}


def _sent(bucket: list[tuple[nn.Parameter, Tensor]], group: dist.ProcessGroup) -> _Bucket:
    """Start to sum gradients: a single one in place, several as copies in one buffer."""
    parameters, gradients = zip(*bucket, strict=True)
    together = gradients[0]
    if len(gradients) > 1:
        together = torch.cat([x.reshape(-1) for x in gradients])
        parts = together.split([x.numel() for x in gradients])
        gradients = tuple(part.view(x.shape) for part, x in zip(parts, gradients, strict=True))
    work = dist.all_reduce(together, group=group, async_op=True)
    assert work is not None
    return _Bucket(parameters, gradients, work)


def _take_gradients(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter with a local gradient that is not reduced yet, and that gradient; remove it from there."""
    if not isinstance(modules[0], FSDPModule):
        for parameter in (parameter for module in modules for parameter in module.parameters(recurse=False)):
            if parameter.grad is not None:
                yield parameter, parameter.grad
                parameter.grad = None
        return
    for record in fsdp_parameters(modules[0]):
        gathered, sharded = gathered_parameter(record), record.sharded_param
        if record.unsharded_accumulated_grad is not None:
            yield sharded, record.unsharded_accumulated_grad_data
            record.unsharded_accumulated_grad = None
        elif gathered is not None and gathered.grad is not None:
            yield sharded, record.unsharded_grad_data
            gathered.grad = None
