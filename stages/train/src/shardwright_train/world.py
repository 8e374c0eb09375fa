"""This process as a rank among others."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwright_formats.errors import ShardwrightError

__all__ = ["World", "joined_world"]

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class World:
    """A rank, the number of ranks, and the device this rank computes on."""

    rank: int
    size: int
    device: torch.device
    backend: str

    @property
    def device_name(self) -> str:
        """The device's name as its driver gives it, or `cpu`."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def agree(self, problem: ShardwrightError | None) -> None:
        """Raise on all ranks what any of them has found wrong: the lowest such rank's error."""
        every: list[ShardwrightError | None] = [None] * self.size
        dist.all_gather_object(every, problem)
        for found in every:
            if found is not None:
                raise found


@contextmanager
def joined_world(device_type: str) -> Iterator[World]:
    """Join the process group that the launcher's environment names: NCCL on `cuda`, gloo on `cpu`."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        yield World(rank, size, device, backend)
    finally:
        dist.destroy_process_group()
