"""The key-value store through which the ranks of several nodes connect, served by node 0's launcher.

PyTorch's TCPStore listens on all addresses and answers everybody. This one answers only callers that have proved that
they know the run's secret. On a single node, the ranks use PyTorch's FileStore in the launcher's folder, and nothing
listens.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Literal, Protocol, TypeVar

import msgspec

from shardwright.launch.heartbeat import RankFiles
from shardwright.launch.meeting import ANSWER_S, Place, call, framed, read_frame, receive_frame


class RankCall(msgspec.Struct, frozen=True, tag="rank"):
    """The first message of a rank, which states the launch that it belongs to."""

    launch: str


class Request(msgspec.Struct, frozen=True):
    """A request of a rank; `kind` is the method of the store."""

    kind: Literal["set", "add", "compare_set", "read", "delete", "count"]
    keys: tuple[str, ...] = ()
    """One key, or several for `read`, which is answered once all are set, or with None after `wait_s`."""
    value: bytes = b""
    """The value to set; `compare_set` sets it only if the stored value (empty if there is none) equals `expected`."""
    expected: bytes = b""
    amount: int = 0
    """The amount to add to a number, which starts at 0."""
    wait_s: float = 0.0


class Answer(msgspec.Struct, frozen=True):
    """The answer to a request."""

    values: tuple[bytes, ...] | None = ()
    number: int = 0


_CALL_S = 60.0
"""Seconds that node 0's launcher has to answer a rank's call; when a large run starts, many ranks call at once."""
_REQUESTS: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_ANSWERS: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


class Values:
    """The key-value pairs of one launch, at node 0; used only in the event loop's thread."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a rank's requests, one after another, until its connection ends."""
        while True:
            answer = await self.answer(_REQUESTS.decode(await read_frame(reader)))
            writer.write(framed(answer))
            async with asyncio.timeout(ANSWER_S):
                await writer.drain()

    async def answer(self, request: Request) -> Answer:
        """Return the answer to one request."""
        key = request.keys[0] if request.keys else ""
        present, number, value = self._values.get(key), 0, request.value
        match request.kind:
            case "read":
                return Answer(await self._read(request.keys, request.wait_s))
            case "count":
                return Answer(number=len(self._values))
            case "delete":
                return Answer(number=int(self._values.pop(key, None) is not None))
            case "compare_set" if (present or b"") != request.expected:
                return Answer((present or request.expected,))
            case "add":
                number = int(present or b"0") + request.amount
                value = str(number).encode()
        self._values[key] = value
        self._changed.set()
        self._changed = asyncio.Event()
        return Answer((value,), number)

    async def _read(self, keys: tuple[str, ...], wait_s: float) -> tuple[bytes, ...] | None:
        try:
            async with asyncio.timeout(wait_s):
                while not all(key in self._values for key in keys):
                    await self._changed.wait()
        except TimeoutError:
            return None
        return tuple(self._values[key] for key in keys)


class MeetingNote(msgspec.Struct, frozen=True):
    """The address, secret and launch that a launcher of several nodes stores for its ranks in a private file."""

    place: Place
    launch: str


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used here."""

    def set_timeout(self, timeout: timedelta, /) -> None:
        """Set how long `get` waits."""


S = TypeVar("S", bound=Store)


class StoreCalls:
    """The methods of a `torch.distributed.Store` that PyTorch calls, answered by node 0's launcher."""

    timeout: timedelta

    def __init__(self, note: MeetingNote, timeout: timedelta) -> None:
        super().__init__()
        self._note, self._lock, self._clones = note, threading.Lock(), list[StoreCalls]()
        self.set_timeout(timeout)
        self._line: socket.socket = call(note.place, _CALL_S)
        self._line.sendall(framed(RankCall(note.launch)))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` waits."""
        super().set_timeout(timeout)  # type: ignore[misc]

    def _ask(self, request: Request) -> Answer:
        with self._lock:
            self._line.settimeout(request.wait_s + _CALL_S)
            self._line.sendall(framed(request))
            return _ANSWERS.decode(receive_frame(self._line))

    def _awaited(self, keys: list[str], wait: timedelta) -> tuple[bytes, ...]:
        wait_s = wait.total_seconds()
        values = self._ask(Request("read", tuple(keys), wait_s=wait_s)).values
        if values is None:
            raise TimeoutError(f"no rank has set {', '.join(keys)} within {wait_s:g} s")
        return values

    def set(self, key: str, value: bytes | str) -> None:
        """Set the value of a key."""
        self._ask(Request("set", (key,), _as_bytes(value)))

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait for it until the timeout."""
        return self._awaited([key], self.timeout)[0]

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number stored under a key, and return the sum."""
        return self._ask(Request("add", (key,), amount=amount)).number

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set the value of a key to `desired` if it equals `expected`, and return the value that it then has."""
        request = Request("compare_set", (key,), _as_bytes(desired), _as_bytes(expected))
        return (self._ask(request).values or (b"",))[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys have values."""
        self._awaited(keys, timeout or self.timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these keys have values."""
        return self._ask(Request("read", tuple(keys))).values is not None

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it existed."""
        return self._ask(Request("delete", (key,))).number > 0

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._ask(Request("count")).number

    # C++ uses these names for the methods above.
    deleteKey = delete_key
    getNumKeys = num_keys

    def clone(self) -> "StoreCalls":
        """Return a store with another connection to the same values, for another thread; it lives as long as this."""
        self._clones.append(type(self)(self._note, self.timeout))
        return self._clones[-1]


def _as_bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


def rank_store(file_store: Callable[[str, int], S], base: type[S], world_size: int, timeout: timedelta) -> S:
    """Return the store through which the ranks of a launch connect.

    On one node it is made by `file_store`, on several it is a subclass of `base`: `torch.distributed.FileStore` and
    `torch.distributed.Store`.
    """
    files = RankFiles.of_environment()
    if not files.meeting_file.exists():
        store = file_store(str(files.store_file), world_size)
        store.set_timeout(timeout)
        return store
    note = msgspec.json.decode(files.meeting_file.read_bytes(), type=MeetingNote)
    launcher_store: S = type("LauncherStore", (StoreCalls, base), {})(note, timeout)
    return launcher_store


def note_meeting(file: "os.PathLike[str]", place: Place, launch: str) -> None:
    """Write the address at which this node's ranks meet the other nodes' ranks to a new file."""
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(msgspec.json.encode(MeetingNote(place, launch)))
