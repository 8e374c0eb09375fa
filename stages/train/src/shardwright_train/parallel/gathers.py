"""The times of ZeRO-3's gathers: a layer ahead, from one pass to the next too."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwright_formats.semantics.schedules.passes import Pass
from shardwright_formats.types import DataParallel


class Gathers:
    """The gathers of a model chunk: FSDP2 gathers the next ZeRO-3 layer overlapped with each layer's own work.

    By default, FSDP2 follows in the backward pass the order of all forward passes since the last step, and over several
    microbatches gathers layers that are not needed. In the forward pass it gathers a layer when it gets there.
    """

    def __init__(self, layers: Sequence[tuple[nn.Module, DataParallel]]) -> None:
        self._ends = [_zero3(*layers[i]) for i in (0, -1)] if layers else [None, None]
        self._started = False  # FSDP2 gathers nothing ahead for a chunk that was never called
        wrapped = [(module, _zero3(module, kind)) for module, kind in layers if isinstance(module, FSDPModule)]
        for (module, _), (_, behind) in pairwise(wrapped):
            module.set_modules_to_forward_prefetch([] if behind is None else [behind])
        # A layer that prefetches itself, which is there already, prefetches nothing; an empty list FSDP2 fills itself.
        for (module, _), (_, before) in zip(wrapped, [(None, None), *wrapped], strict=False):
            module.set_modules_to_backward_prefetch([before or module])

    def start(self, during: Pass) -> None:
        """Gather the first layer of a pass overlapped with the wait for its input, unless the pass before has."""
        if (first := self._ends[during is Pass.BACKWARD]) is not None:
            first.unshard(async_op=True)

    def prepare(self, during: Pass, then: "tuple[Gathers, Pass] | None") -> None:
        """Prepare a pass: its last layer stays gathered if `then` begins with it, else gathers the first of `then`."""
        self._started = True
        forward, last = during is Pass.FORWARD, self._ends[during is Pass.FORWARD]
        stays = then is not None and then[0] is self and then[1] is not during
        following = None if then is None or stays else then[0].ahead(then[1])
        if last is None:
            return
        if forward:
            last.set_modules_to_forward_prefetch([] if following is None else [following])
            last.set_reshard_after_forward(not stays, recurse=False)
        else:
            last.set_modules_to_backward_prefetch([following or last])
            last.set_reshard_after_backward(not stays, recurse=False)

    def ahead(self, during: Pass) -> FSDPModule | None:
        """Return the layer that a pass begins with, where ZeRO-3 gathers it and the pass before can."""
        return self._ends[during is Pass.BACKWARD] if self._started else None


def _zero3(module: nn.Module, kind: DataParallel) -> FSDPModule | None:
    return module if isinstance(module, FSDPModule) and kind is DataParallel.ZERO3 else None
