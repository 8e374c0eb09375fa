"""Updates that wait for their layer's next forward pass, so that copies from and to the host overlap with computation.

A step decides them: gradients, their scale, and whether anything changes stay on the device. Before a layer is called,
it is updated, and the updates of the next layer that waits are started. FSDP2 gathers ZeRO-3 parameters while the layer
before computes: then they are waited for before that one.
"""

from collections.abc import Iterable, Sequence, Set
from itertools import pairwise
from typing import Protocol


class Updates(Protocol):
    """The updates of layers that a step has decided."""

    def start_updates(self, layer: str) -> None:
        """Start the updates of a layer's parameters."""

    def finish_updates(self, layer: str) -> None:
        """Let the device wait for the updates of a layer, and free their gradients."""

    def end_updates(self) -> None:
        """Free what all updates have needed."""


class LateUpdates:
    """The updates that wait on a rank; `order`: its layers in the order of their first forward passes in a step.

    `gathered_ahead`: layers whose parameters are read while the layer before computes.
    """

    def __init__(self, order: Sequence[str] = (), gathered_ahead: Set[str] = frozenset()) -> None:
        self._order = order
        self._read_in = {layer: (layer,) for layer in order} | {
            layer: (layer, following) for layer, following in pairwise(order) if following in gathered_ahead
        }
        self._updates: Updates | None = None
        self._waiting: list[str] = []
        self._started = set[str]()

    def wait_for_use(self, updates: Updates, layers: Iterable[str]) -> None:
        """Leave the updates of these layers for later, except that the first one's are started."""
        assert self._updates is None
        chosen = set(layers)
        self._updates, self._waiting = updates, [layer for layer in self._order if layer in chosen]
        self._start_next()

    def before(self, layer: str) -> None:
        """Prepare a layer's forward pass: it is updated, and the next one's updates are started."""
        if self._updates is None:
            return
        if not self._waiting:
            self._end()
            return
        for read in self._read_in[layer]:
            if read in self._waiting:
                self._finish(read)
        self._start_next()

    def after_forward(self) -> None:
        """Free what updates have needed if none waits after a forward pass."""
        if self._updates is not None and not self._waiting:
            self._end()

    def flush(self) -> None:
        """Finish all updates."""
        while self._waiting:
            self._finish(self._waiting[0])
            self._start_next()
        self.after_forward()

    def _start_next(self) -> None:
        for layer in self._waiting[:1]:
            self._start(layer)

    def _start(self, layer: str) -> None:
        assert self._updates is not None
        if layer not in self._started:
            self._started.add(layer)
            self._updates.start_updates(layer)

    def _finish(self, layer: str) -> None:
        assert self._updates is not None
        self._start(layer)
        self._updates.finish_updates(layer)
        self._waiting.remove(layer)
        self._started.remove(layer)

    def _end(self) -> None:
        assert self._updates is not None
        self._updates.end_updates()
        self._updates = None
