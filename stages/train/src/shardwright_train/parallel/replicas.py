"""Summing the gradients of replicated parameters while the backward pass goes on, where they lie."""

import torch.distributed as dist
from torch import Tensor, nn

from shardwright_train.parallel.held import take_gradients
from shardwright_train.parallel.stored import placed_as

__all__ = ["ReplicaSum"]


class ReplicaSum:
    """The gradients of one replicated (DDP) layer, reduced once a step.

    FSDP2's own reduction copies them three times and, on CPU, waits for each layer's message before the next layer's
    backward pass. Here they are summed in place, and waited for at the end of the step.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.armed = False
        """Whether the next backward pass through the layer is the step's last."""
        self._module, self._group = module, group
        self._works: list[tuple[nn.Parameter, Tensor, dist.Work]] | None = None

    def start(self) -> None:
        """Begin to sum, once the layer's last backward pass is over."""
        if self.armed and self._works is None:
            self._works = []
            for parameter, gradient in take_gradients(self._module):
                work = dist.all_reduce(gradient, group=self._group, async_op=True)
                assert work is not None
                self._works.append((parameter, gradient, work))

    def finish(self) -> None:
        """Wait for the sums, and make them the parameters' gradients.

        Raises RuntimeError where a gradient came after its layer's backward pass was taken to be over.
        """
        self.start()
        if any(True for _ in take_gradients(self._module)):
            raise RuntimeError("a gradient came too late to be summed over the replicas")
        for parameter, gradient, work in self._works or ():
            work.wait()
            parameter.grad = placed_as(parameter, gradient.to(parameter.dtype))
        self.armed, self._works = False, None
