"""This process as a rank among others."""

import os
import re
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwright_formats.io import BadInput, OutOfMemory
from shardwright_formats.types import Plan
from shardwright_launch.accelerator import CPU
from shardwright_launch.heartbeat import START_UP_S, Heartbeat
from shardwright_launch.store import rank_store
from shardwright_train.parallel.channel import Channel
from shardwright_train.torch_private import default_timeout


@dataclass(frozen=True)
class World(Channel):
    """A rank, the number of ranks, the device this rank computes on, and its connection to the launcher."""

    rank: int
    size: int
    device: torch.device
    backend: str
    heartbeat: Heartbeat


@contextmanager
def joined_world(device_type: str, timeout_s: float = START_UP_S) -> Iterator[World]:
    """Join the process group that the launcher's environment names: NCCL on `cuda`, gloo on `cpu`.

    `timeout_s` bounds the joining and every collective, those of groups that are made later as well. An error that the
    world is left with is noted for the launcher.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "nccl" if device_type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    heartbeat = Heartbeat.of_environment()
    with ExitStack() as stack:
        stack.push(heartbeat.note)
        device = _device(device_type, int(os.environ["LOCAL_RANK"]))
        # Groups that are made without a timeout have the defaults, which are 10 minutes with NCCL.
        stack.enter_context(default_timeout(timeout))
        store = rank_store(dist.FileStore, dist.Store, size, timeout)  # type: ignore[attr-defined]
        # NCCL then connects at once: what it makes later could wait for a device that waits for another rank.
        bound = None if device.type == CPU else device
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=bound)
        stack.callback(dist.destroy_process_group)
        stack.push(heartbeat.note)  # before the group is destroyed, from which the peers see that this rank is gone
        heartbeat.begin("before the first step")
        yield World(rank, size, device, backend, heartbeat)


def check_device(plan: Plan, world: World, file: object) -> None:
    """Raise BadInput where this rank's device is not the one that its plan is for."""
    wanted, on_cpu = plan.cluster.of_rank(world.rank), world.device.type == CPU
    here = CPU if on_cpu else torch.cuda.get_device_name(world.device)
    if not (wanted.on_cpu if on_cpu else wanted.device == here):
        what = f"rank {world.rank} is planned for {wanted.device} and runs on {here}"
        raise BadInput(file, what, "start it on the plan's cluster")


_ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_BYTES = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@contextmanager
def out_of_memory_said(subject: str = "") -> Iterator[None]:
    """Raise PyTorch's out-of-memory errors as OutOfMemory, naming `subject`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = _ASKED.search(str(error))
        asked_bytes = None if asked is None else int(float(asked[1]) * _BYTES[asked[2]])
        raise OutOfMemory(str(error), subject=subject, asked_bytes=asked_bytes) from None


def _device(device_type: str, local_rank: int) -> torch.device:
    if device_type == CPU:
        return torch.device(CPU)
    if (found := torch.cuda.device_count()) <= local_rank:
        raise BadInput(
            "plan", f"it has a device {local_rank} on this node, PyTorch sees {found}", "plan for what is here"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def peak_resident_bytes() -> int:
    """Return the peak resident host memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes of tensors on a GPU, or of this process on the host, without synchronizing the device."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()
