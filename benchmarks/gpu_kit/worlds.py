"""The worlds in which steps run: this process by itself, as one of ranks that do not exist, or two on one device."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from gpu_kit.setting import Setting
from torch import Tensor

from shardwright.launch.heartbeat import Heartbeat
from shardwright.launch.store import rank_store
from shardwright_train.parallel.world import World
from shardwright_train.torch_private import FakeStore, default_timeout

_TIMEOUT = timedelta(seconds=120)
_UNWATCHED: Any = SimpleNamespace(begin=lambda where: None)
"""A heartbeat that no launcher reads."""
_CHANNELS = "shardwright_train.parallel.process_groups.edge_options"
"""Function that returns NCCL's options of a pipeline edge, which other backends do not accept."""


def lone_world(setting: Setting, stack: ExitStack) -> Callable[[], World]:
    """Return a function that returns this process's own world, made at its first call and closed with the stack."""
    return cache(lambda: stack.enter_context(_alone(setting)))


@contextmanager
def _alone(setting: Setting) -> Iterator[World]:
    device = device_of(setting)
    backend, bound = ("nccl", device) if setting.on_cuda else ("gloo", None)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT, device_id=bound)
    try:
        yield World(0, 1, device, backend, _UNWATCHED)
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_world(setting: Setting, rank: int, size: int) -> Iterator[World]:
    """Yield a world whose other ranks do not exist: collectives move nothing, but an all-to-all returns what was sent.

    Otherwise the numbers of rows of experts would be arbitrary contents of memory.
    """

    def echo(output: Tensor, given: Tensor, *_sizes: object, **_more: object) -> None:
        output.view(-1).copy_(given.reshape(-1))

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with patch.object(dist, "all_to_all_single", echo), patch(_CHANNELS, lambda _device, _channels: None):
            yield World(rank, size, device_of(setting), "fake", _UNWATCHED)
    finally:
        dist.destroy_process_group()


def device_of(setting: Setting) -> torch.device:
    """Return the first GPU, which becomes the current one, or the processor."""
    if not setting.on_cuda:
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@contextmanager
def joined_on_one_device(device_type: str, timeout_s: float) -> Iterator[World]:
    """Join the launcher's ranks over gloo, all on the first device: NCCL refuses two ranks on one device.

    Gloo's sends and receives take a device pointer for a host pointer, so their messages go through host memory.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    timeout, heartbeat = timedelta(seconds=timeout_s), Heartbeat.of_environment()
    with ExitStack() as stack:
        stack.push(heartbeat.note)
        stack.enter_context(default_timeout(timeout))
        stack.enter_context(patch(_CHANNELS, lambda _device, _channels: None))
        stack.enter_context(_sends_over_the_host())
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = rank_store(dist.FileStore, dist.Store, size, timeout)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        stack.callback(dist.destroy_process_group)
        heartbeat.begin("before the first step")
        yield World(rank, size, device, "gloo", heartbeat)


class _Copied:
    """The work handle of a send or a receive through host memory; after a receive, `wait` copies to the device."""

    def __init__(self, work: dist.Work, host: Tensor, place: Tensor | None) -> None:
        self._work, self._host, self._place = work, host, place

    def wait(self) -> bool:
        """Wait for the message and copy it to its place, if it is received."""
        self._work.wait()
        if self._place is not None:
            self._place.copy_(self._host)
        return True


@contextmanager
def _sends_over_the_host() -> Iterator[None]:
    send, receive = dist.isend, dist.irecv

    def sent(tensor: Tensor, dst: int, group: dist.ProcessGroup | None = None) -> _Copied:
        host = tensor.cpu()
        return _Copied(send(host, dst, group=group), host, None)

    def received(tensor: Tensor, src: int, group: dist.ProcessGroup | None = None) -> _Copied:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return _Copied(receive(host, src, group=group), host, tensor)

    def batch(ways: Sequence[tuple[Any, ...]]) -> list[_Copied]:
        return [op(tensor, peer, group=group) for op, tensor, peer, group in ways]

    with ExitStack() as undone:
        for name, stand_in in {
            **{"isend": sent, "irecv": received, "batch_isend_irecv": batch},
            "P2POp": lambda *way: way,  # torch's own accepts no other functions
        }.items():
            undone.enter_context(patch.object(dist, name, stand_in))
        yield
