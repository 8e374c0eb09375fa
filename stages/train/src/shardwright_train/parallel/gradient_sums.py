"""Gradients of replicated layers, all-reduced overlapped with the rest of the backward pass."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwright_formats.semantics.buckets import gradient_buckets
from shardwright_train.parallel.data import placed_as
from shardwright_train.torch_private import fsdp_parameters, gathered_parameter


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
    the unit's parameters, the outermost of them first.
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
        """Wait for the last backward pass's reduction, and add its result to those of earlier passes.

        Raises RuntimeError where a gradient came after its layer's backward pass was taken to be over.
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
        """Make the sums the parameters' gradients."""
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
    """Yield each parameter and its local gradient that waits for its reduction, and take the gradient away."""
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
