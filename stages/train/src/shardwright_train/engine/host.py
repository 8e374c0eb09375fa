"""Host memory of a rank: optimizer states of offloaded layers stay there, and come to the device for the update.

They are copied one parameter at a time, through three buffers used cyclically: while one parameter is updated, the next
one's states are copied in, and the previous one's back. Copies change no bit, so that plans with and without offload
compute the same. Updates wait for their layer's next use, so that copies overlap with computation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from shardwright.launch.backend import on_accelerator
from shardwright.plan.offload import BUFFERS

_ALIGNMENT = 256
"""Tensors start at multiples of this many bytes in a buffer, as in PyTorch's allocators."""
States = dict[str, Tensor]
"""States of a parameter by name."""


class Host(ABC):
    """A rank's host memory, and updates of parameters whose states are in it.

    `begin` makes the buffers; then `start` begins the updates of a layer, overlapped with the device's computation;
    `wait` makes the computation wait for them; `end` frees the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []
        self._number = 0
        """Number of parameters whose states have been copied to the device since `begin`."""

    @abstractmethod
    def kept(self, x: Tensor) -> Tensor:
        """Return a copy of a tensor in host memory."""

    def begin(self, kept: Sequence[States]) -> None:
        """Make buffers for the states of any of these parameters."""
        largest = max(sum(_aligned(x) for x in states.values()) for states in kept)
        self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]
        self._number = 0

    def start(self, layer: str, kept: Sequence[States], update: Callable[[int, States], None]) -> None:
        """Start to call `update` with the index of each parameter and device copies of its states.

        After the call the copies are copied back, so `update` must not keep them.
        """
        with self._overlapped(layer):
            coming: list[States] = []
            for number, states in enumerate(kept):
                for further in kept[number + len(coming) : number + BUFFERS - 1]:
                    coming.append(self._fetched(self._number + len(coming), further))
                self._arrived(self._number)
                here = coming.pop(0)
                update(number, here)
                self._give_back(self._number, here, states)
                self._number += 1

    @abstractmethod
    def wait(self, layer: str) -> None:
        """Make the device's further computation wait for the updates of a layer that were started."""

    def end(self) -> None:
        """Free the buffers; the device's further computation waits until all states are copied back."""
        self._buffers = []

    def settle(self) -> None:  # noqa: B027  # nothing to wait for, unless an implementation copies asynchronously
        """Wait until all states have been copied back to host memory."""

    def _views(self, number: int, states: States) -> States:
        """Return views for the states in the buffer of the parameter with this number."""
        buffer, start, views = self._buffers[number % BUFFERS], 0, States()
        for name, x in states.items():
            views[name] = buffer[start : start + x.nbytes].view(x.dtype).view(x.shape)
            start += _aligned(x)
        return views

    @contextmanager
    @abstractmethod
    def _overlapped(self, layer: str) -> Iterator[None]:
        """Issue the updates of a layer, so that they overlap with what the device computes."""

    @abstractmethod
    def _fetched(self, number: int, states: States) -> States:
        """Start to copy states to the device, and return the copies."""

    @abstractmethod
    def _arrived(self, number: int) -> None:
        """Make the updates wait for the copies to the device that `_fetched` started for this number."""

    @abstractmethod
    def _give_back(self, number: int, copies: States, states: States) -> None:
        """Start to copy updated states back."""


class CountedHost(Host):
    """The host memory of a rank on CPU: other tensors. Bytes copied either way are counted, and events are recorded.

    Copies are made when they are started.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.bytes_in = self.bytes_out = 0
        """Bytes copied to the device, and back."""
        self.most_bytes = 0
        """Largest number of bytes of buffers for copies at any time."""
        self.events: list[tuple[str, str]] = []
        """Events with their layer: `start`, `in` and `out` for each parameter, and `wait`."""
        self._layer = ""

    def kept(self, x: Tensor) -> Tensor:
        """Return a copy of a tensor."""
        return x.clone()

    def begin(self, kept: Sequence[States]) -> None:
        """Make buffers for the states of any of these parameters."""
        super().begin(kept)
        self.most_bytes = max(self.most_bytes, sum(buffer.nbytes for buffer in self._buffers))

    def wait(self, layer: str) -> None:
        """Note that a layer is used."""
        self.events.append(("wait", layer))

    @contextmanager
    def _overlapped(self, layer: str) -> Iterator[None]:
        self._layer = layer
        self.events.append(("start", layer))
        yield

    def _fetched(self, number: int, states: States) -> States:
        copies = self._views(number, states)
        for name, x in states.items():
            copies[name].copy_(x)
            self.bytes_in += x.nbytes
        self.events.append(("in", self._layer))
        return copies

    def _arrived(self, number: int) -> None:
        pass

    def _give_back(self, number: int, copies: States, states: States) -> None:
        for name, x in states.items():
            x.copy_(copies[name])
            self.bytes_out += x.nbytes
        self.events.append(("out", self._layer))


class PinnedHost(Host):
    """Pinned host memory; a stream for each direction of copies, and one for the updates between them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._in, self._out, self._updates = (torch.Stream(device) for _ in range(3))
        self._coming: dict[int, torch.Event] = {}
        self._back: dict[int, torch.Event] = {}
        self._updated: dict[str, torch.Event] = {}

    def kept(self, x: Tensor) -> Tensor:
        """Return a copy of a tensor in pinned memory."""
        return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x)

    def begin(self, kept: Sequence[States]) -> None:
        """Make buffers for the states of any of these parameters."""
        super().begin(kept)
        # The allocator may give memory that earlier work of this stream still uses.
        self._in.wait_event(self._current.record_event())

    def wait(self, layer: str) -> None:
        """Let the current stream wait for the updates of a layer."""
        self._current.wait_event(self._updated.pop(layer))

    def end(self) -> None:
        """Free the buffers; the current stream, which then reuses their memory, waits until they have been read."""
        for event in self._back.values():
            self._current.wait_event(event)
        self._back = {}
        super().end()

    def settle(self) -> None:
        """Wait until all states have been copied back to host memory."""
        self._out.synchronize()

    @contextmanager
    def _overlapped(self, layer: str) -> Iterator[None]:
        # Gradients, and what decides whether the step changes anything, are made by the current stream. Their memory is
        # freed once it has waited for the updates.
        self._updates.wait_event(self._current.record_event())
        with self._updates:
            yield
            self._updated[layer] = self._updates.record_event()

    def _fetched(self, number: int, states: States) -> States:
        if (before := self._back.pop(number - BUFFERS, None)) is not None:
            self._in.wait_event(before)
        copies = self._views(number, states)
        with self._in:
            for name, x in states.items():
                copies[name].copy_(x, non_blocking=True)
        self._coming[number] = self._in.record_event()
        return copies

    def _arrived(self, number: int) -> None:
        self._current.wait_event(self._coming.pop(number))

    def _give_back(self, number: int, copies: States, states: States) -> None:
        self._out.wait_event(self._current.record_event())
        with self._out:
            for name, x in states.items():
                x.copy_(copies[name], non_blocking=True)
        self._back[number] = self._out.record_event()

    @property
    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)


def host_of(device: torch.device) -> Host:
    """Return the host memory of a rank on a device."""
    return PinnedHost(device) if on_accelerator(device) else CountedHost(device)


def _aligned(x: Tensor) -> int:
    return -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT


# Updates that wait for their layer's next forward pass, so that copies from and to the host overlap with computation.
#
# A step decides them: gradients, their scale, and whether anything changes stay on the device. Before a layer is
# called, its updates are finished, and the updates of the next waiting layer are started. As FSDP2 gathers ZeRO-3
# parameters while the previous layer computes, their updates are finished before the previous layer.


class Updates(Protocol):
    """The updates of layers that a step has decided on."""

    def start_updates(self, layer: str) -> None:
        """Start the updates of a layer's parameters."""

    def finish_updates(self, layer: str) -> None:
        """Make the device wait for the updates of a layer, and free their gradients."""

    def end_updates(self) -> None:
        """Free the buffers that the updates needed."""


class LateUpdates:
    """The updates that wait on a rank; `order`: its layers in the order of their first forward passes in a step.

    `gathered_ahead`: layers whose parameters are read while the previous layer computes.
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
        """Leave the updates of these layers for later; start only the first layer's updates."""
        assert self._updates is None
        chosen = set(layers)
        self._updates, self._waiting = updates, [layer for layer in self._order if layer in chosen]
        self._start_next()

    def before(self, layer: str) -> None:
        """Prepare a layer's forward pass: finish its updates, and start the updates of the next waiting layer."""
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
        """Free the buffers of the updates after a forward pass if no update waits."""
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
