"""A rank's process: joining the world, and exchanging JSON values and errors with the other ranks.

Nothing is pickled: another process of the same network cannot make a rank run code.
"""

import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.io import BadInput, OutOfMemory, ShardwrightError, system_fault
from shardwright.launch.accelerator import COLLECTIVES, CPU
from shardwright.launch.backend import device_name, on_accelerator, take_device
from shardwright.launch.heartbeat import START_UP_S, Heartbeat
from shardwright.launch.store import rank_store
from shardwright.types import Plan
from shardwright_train.torch_private import default_timeout

T = TypeVar("T")
_ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_BYTES = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class _Raised(msgspec.Struct, frozen=True, kw_only=True):
    """A ShardwrightError by its class, arguments and fields."""

    kind: str
    arguments: tuple[str, ...]
    fields: dict[str, Any]


class _Reply(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """The result of a call on one rank: its value, or the error that it raised."""

    value: T | None = None
    error: _Raised | None = None


class Channel:
    """A channel over which the ranks of the world exchange values and errors in order."""

    device: torch.device
    """Device of the tensors that carry the values."""
    group: dist.ProcessGroup | None = None
    """Process group of the exchange; None: all ranks."""

    def first_says(self, ask: Callable[[], T], kind: type[T], place: object = None) -> T:
        """Return rank 0's value of `ask()` on all ranks; a ShardwrightError or OSError of rank 0 is raised on all.

        `kind`: the type of the value. `place` is named if an error of the operating system names no file.
        """
        content = b""
        if dist.get_rank(self.group) == 0:
            value, problem = tried(ask, place)
            content = msgspec.json.encode(_Reply(value=value, error=_described(problem)))
        reply = msgspec.json.decode(self._broadcast(content), type=_Reply[kind])  # type: ignore[valid-type]
        if reply.error is not None:
            raise _rebuilt(reply.error)
        return reply.value  # type: ignore[return-value]

    def first_does(self, do: Callable[[], None], place: object = None) -> None:
        """Run `do` on rank 0 while the others wait; a ShardwrightError or OSError is raised on all ranks."""
        self.first_says(do, type(None), place)

    def all_say(self, value: T, kind: type[T]) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        return [decoder.decode(content) for content in self._gather(msgspec.json.encode(value))]

    def agree(self, problem: ShardwrightError | None) -> None:
        """Raise on all ranks the problem of the lowest rank that has one."""
        described = _described(problem)
        for raised in self.all_say(() if described is None else (described,), tuple[_Raised, ...]):
            if raised:
                raise _rebuilt(raised[0])

    def together(self, do: Callable[[], T], place: object = None) -> T:
        """Return each rank's value of `do()`; the ShardwrightError of the lowest failing rank is raised on all."""
        value, problem = tried(do, place)
        self.agree(problem)
        return value  # type: ignore[return-value]

    def _broadcast(self, content: bytes) -> bytes:
        size = torch.tensor(len(content), device=self.device)
        dist.broadcast(size, src=0, group=self.group)
        data = self._padded(content, int(size.item()))
        dist.broadcast(data, src=0, group=self.group)
        return data.cpu().numpy().tobytes()

    def _gather(self, content: bytes) -> list[bytes]:
        sizes = [int(size.item()) for size in self._gathered(torch.tensor(len(content), device=self.device))]
        parts = self._gathered(self._padded(content, max(sizes)))
        return [part.cpu().numpy().tobytes()[:size] for part, size in zip(parts, sizes, strict=True)]

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, mine, group=self.group)
        return parts

    def _padded(self, content: bytes, size: int) -> Tensor:
        return torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8).to(self.device)


@dataclass(frozen=True)
class GroupChannel(Channel):
    """A channel of the world's ranks over a separate process group."""

    device: torch.device
    group: dist.ProcessGroup | None


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
    """Join the process group that the launcher's environment describes, with the backend of the device type.

    `timeout_s` limits joining and every collective, also in groups that are made later. An exception that ends the
    `with` block is recorded for the launcher.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend, timeout = COLLECTIVES[device_type], timedelta(seconds=timeout_s)
    heartbeat = Heartbeat.of_environment()
    with ExitStack() as stack:
        stack.push(heartbeat.note)
        device = _device(device_type, int(os.environ["LOCAL_RANK"]))
        # Groups that are made later without a timeout would have NCCL's default of 10 minutes.
        stack.enter_context(default_timeout(timeout))
        store = rank_store(dist.FileStore, dist.Store, size, timeout)  # type: ignore[attr-defined]
        # With a device, NCCL connects at once; a lazy connection could wait for a device that waits for another rank.
        bound = None if device.type == CPU else device
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=bound)
        stack.callback(dist.destroy_process_group)
        # Pushed again, to run before the group is destroyed: its end shows the peers that this rank is gone.
        stack.push(heartbeat.note)
        heartbeat.begin("before the first step")
        yield World(rank, size, device, backend, heartbeat)


def check_device(plan: Plan, world: World, file: object) -> None:
    """Raise BadInput if this rank's device is not the one that its plan is for."""
    wanted, on_cpu = plan.cluster.of_rank(world.rank), world.device.type == CPU
    here = device_name(world.device)
    if not (wanted.on_cpu if on_cpu else wanted.device == here):
        problem = f"rank {world.rank} is planned for {wanted.device} but runs on {here}"
        raise BadInput(file, problem, "start it on the plan's cluster")


@contextmanager
def out_of_memory_said(subject: str = "") -> Iterator[None]:
    """Convert PyTorch's out-of-memory errors to OutOfMemory, naming `subject`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = _ASKED.search(str(error))
        asked_bytes = None if asked is None else int(float(asked[1]) * _BYTES[asked[2]])
        raise OutOfMemory(str(error), subject=subject, asked_bytes=asked_bytes) from None


def _device(device_type: str, local_rank: int) -> torch.device:
    if device_type == CPU:
        return torch.device(CPU)
    if (count := torch.accelerator.device_count()) <= local_rank:
        problem = f"uses device {local_rank} of this node, but PyTorch sees only {count}"
        raise BadInput("plan", problem, "plan for the devices of this node")
    return take_device(local_rank)


def peak_resident_bytes() -> int:
    """Return the peak resident host memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes of tensors on a GPU, or of this process on the host, without synchronizing the device."""
    return torch.accelerator.max_memory_allocated(device) if on_accelerator(device) else peak_resident_bytes()


def tried(do: Callable[[], T], place: object = None) -> tuple[T | None, ShardwrightError | None]:
    """Return the result of a call, or its ShardwrightError; an OSError is converted to one."""
    try:
        return do(), None
    except ShardwrightError as error:
        return None, error
    except OSError as error:
        return None, system_fault(error, place)


def _described(problem: ShardwrightError | None) -> _Raised | None:
    if problem is None:
        return None
    # A file's name need not be text.
    arguments = tuple(str(each).encode(errors="replace").decode() for each in problem.args)
    fields = {name: value for name, value in vars(problem).items() if not name.startswith("_")}
    return _Raised(kind=type(problem).__name__, arguments=arguments, fields=fields)


def _rebuilt(raised: _Raised) -> ShardwrightError:
    kinds = {kind.__name__: kind for kind in _kinds(ShardwrightError)}
    return kinds[raised.kind](*raised.arguments, **raised.fields)


def _kinds(kind: type[ShardwrightError]) -> list[type[ShardwrightError]]:
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in _kinds(child))]
