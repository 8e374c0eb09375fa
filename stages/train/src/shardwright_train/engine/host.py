"""Host memory of a rank: optimizer states of offloaded layers stay there, and come to the device for the update.

They come a parameter at a time, in turns through two buffers: while one is updated, the next is on its way, which waits
until the one before is back. Copies change no bit, so that plans with and without offload compute the same.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwright.launch.backend import on_accelerator

_BUFFERS = 2
_ALIGNMENT = 256
"""Bytes between the starts of tensors in a buffer, as PyTorch's allocators have them, are a multiple of this."""
States = dict[str, Tensor]
"""States of a parameter by name."""


class Host(ABC):
    """A rank's host memory, and copies between it and the device."""

    @abstractmethod
    def kept(self, x: Tensor) -> Tensor:
        """A copy of a tensor in host memory."""

    def update_each(self, kept: Sequence[States], update: Callable[[int, States], None]) -> None:
        """Call `update` with the number of each parameter and copies of its states on the device, and copy them back.

        The copies must not be held longer than the call.
        """
        self._begin(kept)
        coming = self._fetched(0, kept[0])
        for number, states in enumerate(kept):
            here, coming = coming, {}
            if number + 1 < len(kept):
                coming = self._fetched(number + 1, kept[number + 1])
            self._arrived(number)
            update(number, here)
            self._give_back(number, here, states)
            del here
        self._end()

    @abstractmethod
    def _begin(self, kept: Sequence[States]) -> None:
        """Prepare for copies of these."""

    @abstractmethod
    def _fetched(self, number: int, states: States) -> States:
        """Start to copy states to the device, and return the copies."""

    @abstractmethod
    def _arrived(self, number: int) -> None:
        """Let the device wait until copies that were started are there."""

    @abstractmethod
    def _give_back(self, number: int, copies: States, states: States) -> None:
        """Start to copy updated states back."""

    @abstractmethod
    def _end(self) -> None:
        """Free what is needed for copies only."""


class CountedHost(Host):
    """The host memory of a rank on CPU: other tensors. It counts what comes and goes, and the most that is there."""

    def __init__(self) -> None:
        self.bytes_in = self.bytes_out = 0
        """Bytes that came to the device, and that went back."""
        self.most_bytes = 0
        """The most bytes of copies at any time."""
        self._bytes = 0

    def kept(self, x: Tensor) -> Tensor:
        """A copy of a tensor."""
        return x.clone()

    def _begin(self, kept: Sequence[States]) -> None:
        pass

    def _fetched(self, number: int, states: States) -> States:
        copies = {name: x.clone() for name, x in states.items()}
        for copy in copies.values():
            self.bytes_in += copy.nbytes
            self._bytes += copy.nbytes
            weakref.finalize(copy, self._forget, copy.nbytes)
        self.most_bytes = max(self.most_bytes, self._bytes)
        return copies

    def _arrived(self, number: int) -> None:
        pass

    def _give_back(self, number: int, copies: States, states: States) -> None:
        for name, x in states.items():
            x.copy_(copies[name])
            self.bytes_out += x.nbytes

    def _end(self) -> None:
        pass

    def _forget(self, size: int) -> None:
        self._bytes -= size


class PinnedHost(Host):
    """Pinned host memory, copied on a stream for each direction into two buffers that exist during the update."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._in, self._out = device, torch.Stream(device), torch.Stream(device)
        self._buffers: list[Tensor] = []
        self._coming: dict[int, torch.Event] = {}
        self._back: dict[int, torch.Event] = {}

    def kept(self, x: Tensor) -> Tensor:
        """A copy of a tensor in pinned memory."""
        return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x)

    def _begin(self, kept: Sequence[States]) -> None:
        largest = max(sum(_aligned(x) for x in states.values()) for states in kept)
        self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(_BUFFERS)]
        # The allocator may give memory that earlier work of this stream still uses.
        self._in.wait_event(self._computation.record_event())

    def _fetched(self, number: int, states: States) -> States:
        if number >= _BUFFERS:
            self._in.wait_event(self._back.pop(number - _BUFFERS))
        buffer, start, copies = self._buffers[number % _BUFFERS], 0, States()
        for name, x in states.items():
            copies[name] = buffer[start : start + x.nbytes].view(x.dtype).view(x.shape)
            start += _aligned(x)
        with self._in:
            for name, x in states.items():
                copies[name].copy_(x, non_blocking=True)
        self._coming[number] = self._in.record_event()
        return copies

    def _arrived(self, number: int) -> None:
        self._computation.wait_event(self._coming.pop(number))

    def _give_back(self, number: int, copies: States, states: States) -> None:
        self._out.wait_event(self._computation.record_event())
        with self._out:
            for name, x in states.items():
                x.copy_(copies[name], non_blocking=True)
        self._back[number] = self._out.record_event()

    def _end(self) -> None:
        # The buffers' memory is this stream's, so it may be given away once this stream has waited. A checkpoint reads
        # host memory after the step's only wait for the device, or waits itself.
        for event in self._back.values():
            self._computation.wait_event(event)
        self._buffers, self._back = [], {}

    @property
    def _computation(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)


def host_of(device: torch.device) -> Host:
    """The host memory of a rank on a device."""
    return PinnedHost(device) if on_accelerator(device) else CountedHost()


def _aligned(x: Tensor) -> int:
    return -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
