"""Activations in host memory: what a layer's backward pass reads goes there when it is saved, and comes back for it.

Autograd's hooks get each tensor that it saves, also the inputs that recomputation keeps. Parameters, and masks and
positions, which many layers read, stay on the device. Whole storages are moved, so that all views of one are a single
copy. A layer's activations are copied out during the next layer's forward pass, and back during the next layer's
backward pass. Copies change no bit.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from shardwright.launch.backend import on_accelerator
from shardwright_train.torch_private import FakeTensor, storage_key, version_of


class Copies(ABC):
    """Copies of flat tensors between a rank's device and its host's memory."""

    @abstractmethod
    def out(self, x: Tensor) -> Tensor:
        """Start to copy a tensor to host memory, and return the copy; the tensor must live until `wait`."""

    @abstractmethod
    def mark(self) -> torch.Event | None:
        """Return a mark after the copies to the host that have been started."""

    @abstractmethod
    def wait(self, mark: torch.Event | None) -> None:
        """Let the device wait until the copies before a mark are done, in either direction."""

    @abstractmethod
    def back(self, kept: Sequence[Tensor]) -> tuple[list[Tensor], torch.Event | None]:
        """Start to copy tensors to the device; return the copies and a mark after them. `kept` may be reused then."""


class CountedCopies(Copies):
    """Copies on a CPU, whose host memory is other tensors; bytes copied either way, and the peak, are counted."""

    def __init__(self) -> None:
        self.bytes_out = self.bytes_in = 0
        self.host_bytes = self.most_host_bytes = 0
        """Bytes in host memory: now, and the peak."""

    def out(self, x: Tensor) -> Tensor:
        """Return a copy; for a tensor without data, one on the meta device, which takes no memory."""
        kept = torch.empty_like(x, device="meta") if isinstance(x, FakeTensor) else x.clone()
        self.bytes_out += x.nbytes
        self.host_bytes += x.nbytes
        self.most_host_bytes = max(self.most_host_bytes, self.host_bytes)
        weakref.finalize(kept, self._forget, x.nbytes)
        return kept

    def mark(self) -> None:
        """Return None: the copies are done."""

    def wait(self, mark: torch.Event | None) -> None:
        """Do nothing."""

    def back(self, kept: Sequence[Tensor]) -> tuple[list[Tensor], None]:
        """Return copies."""
        self.bytes_in += sum(x.nbytes for x in kept)
        return [torch.empty_like(x, device="cpu") if x.device.type == "meta" else x.clone() for x in kept], None

    def _forget(self, size: int) -> None:
        self.host_bytes -= size


class PinnedCopies(Copies):
    """Copies to and from pinned memory on a stream for each direction; the memory is kept for later copies."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._in, self._out = device, torch.Stream(device), torch.Stream(device)
        self._free: dict[int, list[tuple[Tensor, torch.Event]]] = {}
        """Pinned memory by its bytes, each with the event after which it may be written to."""

    def out(self, x: Tensor) -> Tensor:
        """Start a copy after the computation so far."""
        self._out.wait_event(self._computation.record_event())
        if unused := self._free.get(x.nbytes):
            memory, read = unused.pop()
            self._out.wait_event(read)
        else:
            memory = torch.empty(x.nbytes, dtype=torch.uint8, pin_memory=True)
        kept = memory.view(x.dtype)
        with self._out:
            kept.copy_(x, non_blocking=True)
        return kept

    def mark(self) -> torch.Event:
        """Return the event of the last copy to the host."""
        return self._out.record_event()

    def wait(self, mark: torch.Event | None) -> None:
        """Let the computation wait for an event."""
        assert mark is not None
        self._computation.wait_event(mark)

    def back(self, kept: Sequence[Tensor]) -> tuple[list[Tensor], torch.Event]:
        """Start copies after the computation so far: it may still use their memory, and has waited for `kept`."""
        here = [torch.empty_like(x, device=self._device) for x in kept]
        self._in.wait_event(self._computation.record_event())
        with self._in:
            for x, there in zip(here, kept, strict=True):
                x.copy_(there, non_blocking=True)
        mark = self._in.record_event()
        for there in kept:
            self._free.setdefault(there.nbytes, []).append((there.view(torch.uint8), mark))
        return here, mark

    @property
    def _computation(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)


class _Storage:
    """A saved storage in host memory, and on the device while something is to read it."""

    def __init__(self, kept: Tensor) -> None:
        self.kept: Tensor | None = kept
        self.here: Tensor | None = None
        self.readers = 0


class _Saved(NamedTuple):
    """What autograd saves in place of a tensor that was moved."""

    of: "_Pass"
    storage: _Storage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Pass:
    """A micro-batch's pass through a layer: what it has saved, and its pass through the previous layer."""

    def __init__(self, before: "_Pass | None") -> None:
        self.before = before
        self.fetched: tuple[torch.Event | None] | None = None
        """The mark after the copies to the device, until the device has been told to wait for it."""
        self.storages: dict[tuple[int, torch.dtype, int], _Storage] = {}


class _Sent(NamedTuple):
    """Tensors whose copies to the host may not be done yet, and the mark after these copies."""

    tensors: list[Tensor]
    mark: torch.Event | None


class HostActivations:
    """The activations of a pipeline stage's layers that are in host memory."""

    def __init__(self, device: torch.device) -> None:
        self.copies: Copies = PinnedCopies(device) if on_accelerator(device) else CountedCopies()
        self._device = device
        self._sent: _Sent | None = None
        self._last: tuple[object, _Pass] | None = None

    def settle(self) -> None:
        """Free the device memory of the tensors that were copied to the host, after their copies."""
        if self._sent is not None:
            self.copies.wait(self._sent.mark)
            # Autograd holds `pack` as long as what it has saved, and `pack` holds this list.
            self._sent.tensors.clear()
            self._sent = None

    @contextmanager
    def moving(self, microbatch: object, stays: Callable[[], Collection[int]]) -> Iterator[None]:
        """Move what autograd saves inside, in a layer's forward pass for a micro-batch.

        `stays`: the keys of storages that stay on the device. At the end, the device memory of what the previous layer
        moved is freed.
        """
        going: list[Tensor] = []
        ahead = self._last[1] if self._last is not None and self._last[0] == microbatch else None
        saved = _Pass(ahead)
        self._last = microbatch, saved

        def pack(x: Tensor) -> Tensor | _Saved:
            if x.device != self._device or not x.numel() or isinstance(x, DTensor):
                return x
            key = storage_key(x), x.dtype, version_of(x)
            if key not in saved.storages:
                if key[0] in stays():
                    return x
                with torch.no_grad():
                    going.append(x.detach().as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0))
                    saved.storages[key] = _Storage(self.copies.out(going[-1]))
            storage = saved.storages[key]
            storage.readers += 1
            return _Saved(saved, storage, x.size(), x.stride(), x.storage_offset())

        with saved_tensors_hooks(pack, self._unpacked):
            yield
        self.settle()
        self._sent = _Sent(going, self.copies.mark())

    def _unpacked(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._fetch(saved.of)
        if saved.of.fetched is not None:
            # For all copies: memory that nothing reads must not be freed before its copy is done, either.
            self.copies.wait(*saved.of.fetched)
            saved.of.fetched = None
        here, storage = saved.storage.here, saved.storage
        assert here is not None
        if saved.of.before is not None:
            self._fetch(saved.of.before)
            saved.of.before = None
        storage.readers -= 1
        if not storage.readers:
            storage.here = None
        return here.as_strided(saved.size, saved.stride, saved.offset)

    def _fetch(self, saved: _Pass) -> None:
        """Start to copy back what a pass has saved, unless that was done before."""
        coming = [storage for storage in saved.storages.values() if storage.kept is not None]
        if not coming:
            return
        self.settle()
        with torch.no_grad():
            tensors, mark = self.copies.back([storage.kept for storage in coming if storage.kept is not None])
        saved.fetched = (mark,)
        for storage, here in zip(coming, tensors, strict=True):
            storage.here, storage.kept = here, None
