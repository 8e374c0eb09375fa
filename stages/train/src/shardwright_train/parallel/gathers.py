"""The times of ZeRO-3's gathers: a unit ahead, from one pass to the next too."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwright_formats.semantics.schedules.passes import Pass
from shardwright_formats.types import DataParallel

Sharded = tuple[nn.Module, DataParallel]
"""A unit of a layer: the module that FSDP2 may have wrapped, and its kind of data parallelism."""


class Gathers:
    """The gathers of a model chunk: FSDP2 gathers the next ZeRO-3 unit overlapped with the work on each unit.

    By default, FSDP2 follows in the backward pass the order of all forward passes since the last step, and over several
    microbatches gathers units that are not needed. In the forward pass it gathers a unit when it gets there. `layers`
    has the units of each layer in the order of the forward pass, the outermost first: a backward pass, too, begins
    with that.
    """

    def __init__(self, layers: Sequence[Sequence[Sharded]]) -> None:
        backward = [[units[0], *units[:0:-1]] for units in reversed(layers)]
        orders = {Pass.FORWARD: layers, Pass.BACKWARD: backward}
        self._first = {during: _zero3(order[0][:1]) if order else [] for during, order in orders.items()}
        self._last = {during: _zero3(order[-1]) if order else [] for during, order in orders.items()}
        self._started = False  # FSDP2 gathers nothing ahead for a chunk that was never called
        for (module, _), following in pairwise(_wrapped(layers)):
            module.set_modules_to_forward_prefetch(_zero3([following]))
        wrapped = _wrapped(backward)
        # A unit that prefetches itself, which is there already, prefetches nothing; an empty list FSDP2 fills itself.
        for i, (module, _) in enumerate(wrapped):
            module.set_modules_to_backward_prefetch(_zero3(wrapped[i + 1 : i + 2]) or [module])

    def start(self, during: Pass) -> None:
        """Gather the first unit of a pass overlapped with the wait for its input, unless the pass before has."""
        for module in self._first[during]:
            module.unshard(async_op=True)

    def prepare(self, during: Pass, then: "tuple[Gathers, Pass] | None") -> None:
        """Prepare a pass: its last layer stays gathered if `then` begins with it, else gathers the first of `then`."""
        self._started = True
        stays = then is not None and then[0] is self and then[1] is not during
        following = [] if then is None or stays else then[0].ahead(then[1])
        last = self._last[during]
        for module in last:
            if during is Pass.FORWARD:
                module.set_reshard_after_forward(not stays, recurse=False)
            else:
                module.set_reshard_after_backward(not stays, recurse=False)
        for module in last[-1:]:
            if during is Pass.FORWARD:
                module.set_modules_to_forward_prefetch(following)
            else:
                module.set_modules_to_backward_prefetch(following or [module])

    def ahead(self, during: Pass) -> list[FSDPModule]:
        """Return the unit that a pass begins with, where ZeRO-3 gathers it and the pass before can."""
        return self._first[during] if self._started else []


def _wrapped(layers: Iterable[Sequence[Sharded]]) -> list[tuple[Any, DataParallel]]:
    return [(module, kind) for units in layers for module, kind in units if isinstance(module, FSDPModule)]


def _zero3(units: Sequence[Sharded]) -> list[FSDPModule]:
    return [module for module, kind in _wrapped([units]) if kind is DataParallel.ZERO3]
