"""JSON values and errors that the ranks of a group exchange: nothing that comes from a peer is unpickled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright_formats.io import ShardwrightError, system_fault

T = TypeVar("T")


class _Raised(msgspec.Struct, frozen=True, kw_only=True):
    """A ShardwrightError by its class, arguments and fields."""

    kind: str
    arguments: tuple[str, ...]
    fields: dict[str, Any]


class _Reply(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """The value that a call returned, or the error that it raised."""

    value: T | None = None
    error: _Raised | None = None


class Channel:
    """A channel over which the ranks of the world exchange values and errors in order."""

    device: torch.device
    """Device of the tensors that carry the values."""
    group: dist.ProcessGroup | None = None
    """Process group of the exchange; None: the world's own."""

    def first_says(self, ask: Callable[[], T], kind: type[T], place: object = None) -> T:
        """Return rank 0's value of type `kind` on all ranks; raise rank 0's orderly error on all ranks.

        `place` is named where the system refuses something, else the file that it names itself.
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
        """Do something on rank 0 while the others wait; raise on all ranks what it raises in order."""
        self.first_says(do, type(None), place)

    def all_say(self, value: T, kind: type[T]) -> list[T]:
        """Return the value of each rank, of the type `kind`, in the order of the ranks."""
        decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        return [decoder.decode(content) for content in self._gather(msgspec.json.encode(value))]

    def agree(self, problem: ShardwrightError | None) -> None:
        """Raise on all ranks the problem of the lowest rank that has one."""
        for raised in self.all_say(_reported(problem), tuple[_Raised, ...]):
            if raised:
                raise _rebuilt(raised[0])

    def together(self, do: Callable[[], T], place: object = None) -> T:
        """Return each rank's own value of `do`; raise on all ranks the orderly error of the lowest rank that fails."""
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
    """A channel of the world's ranks over another group than the world's own."""

    device: torch.device
    group: dist.ProcessGroup | None


def tried(do: Callable[[], T], place: object = None) -> tuple[T | None, ShardwrightError | None]:
    """Return what a call returns, or the error that it raises in order; what the system refuses is one, of `place`."""
    try:
        return do(), None
    except ShardwrightError as error:
        return None, error
    except OSError as error:
        return None, system_fault(error, place)


def _reported(problem: ShardwrightError | None) -> tuple[_Raised, ...]:
    described = _described(problem)
    return () if described is None else (described,)


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
