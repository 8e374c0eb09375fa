"""Summing the gradients of replicated parameters while the backward pass goes on, where they lie."""

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

from shardwright_train.parallel.fsdp_memory import take_gradients
from shardwright_train.parallel.sharded_parameters import placed_as

__all__ = ["GradientAllReduce"]


class GradientAllReduce:
    """The gradients of one replicated (DDP) layer, reduced once a step or every microbatch.

    FSDP2's own reduction copies them three times and, on CPU, waits for each layer's message before the next layer's
    backward pass. Here they are summed in place, and waited for before the next backward pass, or at the end of the
    step.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.armed = False
        """Whether the next backward pass through the layer reduces."""
        self._module, self._group = module, group
        self._works: list[tuple[nn.Parameter, Tensor, dist.Work]] | None = None
        self._sums: dict[nn.Parameter, Tensor] = {}

    def start(self) -> None:
        """Begin to sum over the replicas, once the layer's backward pass is over."""
        if self.armed and self._works is None:
            self._works = []
            for parameter, gradient in take_gradients(self._module):
                work = dist.all_reduce(gradient, group=self._group, async_op=True)
                assert work is not None
                self._works.append((parameter, gradient, work))

    def collect(self) -> None:
        """Wait for what the last backward pass reduced, and add it to what those before it did.

        Raises RuntimeError where a gradient came after its layer's backward pass was taken to be over.
        """
        if self._works is None:
            return
        if any(True for _ in take_gradients(self._module)):
            raise RuntimeError("a gradient came too late to be summed over the replicas")
        for parameter, gradient, work in self._works:
            work.wait()
            before = self._sums.get(parameter)
            self._sums[parameter] = gradient.to(parameter.dtype) if before is None else before.add_(gradient)
        self.armed, self._works = False, None

    def resident(self) -> Iterator[Tensor]:
        """Memory of the gradients that are being reduced, and of the sums of those that were."""
        yield from (gradient for _, gradient, _ in self._works or ())
        yield from self._sums.values()

    def finish(self) -> None:
        """Make the sums the parameters' gradients."""
        self.collect()
        for parameter, gradient in self._sums.items():
            parameter.grad = placed_as(parameter, gradient)
        self._sums = {}
