"""The key-value store by which the ranks of several nodes find one another, kept by node 0's launcher.

PyTorch's own TCPStore listens on all addresses and answers everybody. This one answers callers that have proved the
secret of the run. On one node the ranks use PyTorch's FileStore in the launcher's folder, and nothing listens.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar

import msgspec

from shardwright_launch.heartbeat import RankFiles
from shardwright_launch.meeting import ANSWER_S, Place, call, framed, read_frame, receive_frame


class RankCall(msgspec.Struct, frozen=True, tag="rank"):
    """The first message of a rank, which names the launch it belongs to."""

    launch: str


class SetValue(msgspec.Struct, frozen=True, tag="set"):
    """A request to set a value."""

    key: str
    value: bytes


class AddNumber(msgspec.Struct, frozen=True, tag="add"):
    """A request to add to a value that is a number, 0 at first; answered by the sum."""

    key: str
    amount: int


class SwapValue(msgspec.Struct, frozen=True, tag="swap"):
    """A request to set a value if it equals the expected one, or is missing and expected to be empty.

    It is answered by the value that is there afterwards.
    """

    key: str
    expected: bytes
    desired: bytes


class ReadValues(msgspec.Struct, frozen=True, tag="read"):
    """A request for values once all of them are set; answered by None where that takes longer than `wait_s`."""

    keys: tuple[str, ...]
    wait_s: float


class DeleteValue(msgspec.Struct, frozen=True, tag="delete"):
    """A request to delete a value; answered by the number of values that were deleted."""

    key: str


class CountValues(msgspec.Struct, frozen=True, tag="count"):
    """A request for the number of values."""


Request = SetValue | AddNumber | SwapValue | ReadValues | DeleteValue | CountValues


class Answer(msgspec.Struct, frozen=True):
    """The answer to a request."""

    values: tuple[bytes, ...] | None = ()
    number: int = 0


_CALL_S = 60.0
"""Seconds that node 0's launcher has to answer a rank's call; at a large start many call at once."""
_REQUESTS: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_ANSWERS: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


class Values:
    """The values of one launch at node 0, changed in one event loop."""

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
        match request:
            case ReadValues(keys, wait_s):
                return Answer(await self._read(keys, wait_s))
            case CountValues():
                return Answer(number=len(self._values))
            case DeleteValue(key):
                return Answer(number=int(self._values.pop(key, None) is not None))
            case SetValue(key, value):
                return self._set(key, value)
            case AddNumber(key, amount):
                number = int(self._values.get(key, b"0")) + amount
                self._set(key, str(number).encode())
                return Answer(number=number)
            case SwapValue(key, expected, desired):
                present = self._values.get(key, b"")
                return self._set(key, desired) if present == expected else Answer((present or expected,))

    def _set(self, key: str, value: bytes) -> Answer:
        self._values[key] = value
        self._changed.set()
        self._changed = asyncio.Event()
        return Answer((value,))

    async def _read(self, keys: tuple[str, ...], wait_s: float) -> tuple[bytes, ...] | None:
        try:
            async with asyncio.timeout(wait_s):
                while not all(key in self._values for key in keys):
                    await self._changed.wait()
        except TimeoutError:
            return None
        return tuple(self._values[key] for key in keys)


class MeetingNote(msgspec.Struct, frozen=True):
    """The address, secret and launch that a launcher of several nodes leaves for its ranks in a private file."""

    place: Place
    launch: str


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used here."""

    def set_timeout(self, timeout: timedelta, /) -> None:
        """Set how long `get` waits."""


S = TypeVar("S", bound=Store)


class StoreCalls:
    """The methods that PyTorch calls of a `torch.distributed.Store`, answered by node 0's launcher."""

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

    def _ask(self, request: Request, wait_s: float = 0.0) -> Answer:
        with self._lock:
            self._line.settimeout(wait_s + _CALL_S)
            self._line.sendall(framed(request))
            return _ANSWERS.decode(receive_frame(self._line))

    def _awaited(self, keys: list[str], wait: timedelta) -> tuple[bytes, ...]:
        wait_s = wait.total_seconds()
        values = self._ask(ReadValues(tuple(keys), wait_s), wait_s).values
        if values is None:
            raise TimeoutError(f"no rank has set {', '.join(keys)} within {wait_s:g} s")
        return values

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value."""
        self._ask(SetValue(key, _as_bytes(value)))

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it until the timeout."""
        return self._awaited([key], self.timeout)[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum."""
        return self._ask(AddNumber(key, amount)).number

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set a value if it equals the expected one, and return the value that is there afterwards."""
        (value,) = self._ask(SwapValue(key, _as_bytes(expected), _as_bytes(desired))).values or (b"",)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all values are set."""
        self._awaited(keys, timeout or self.timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether all values are set."""
        return self._ask(ReadValues(tuple(keys), 0.0)).values is not None

    def delete_key(self, key: str) -> bool:
        """Delete a value, and return whether there was one."""
        return self._ask(DeleteValue(key)).number > 0

    def num_keys(self) -> int:
        """Return the number of values."""
        return self._ask(CountValues()).number

    # By these names C++ calls what Python calls by the names above.
    deleteKey = delete_key
    getNumKeys = num_keys

    def clone(self) -> "StoreCalls":
        """Return a store with its own connection to the same values, for another thread; it lives as long as this."""
        self._clones.append(type(self)(self._note, self.timeout))
        return self._clones[-1]


def _as_bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


def rank_store(file_store: Callable[[str, int], S], base: type[S], world_size: int, timeout: timedelta) -> S:
    """Return the store by which the ranks of a launch find one another.

    It is a `file_store` on one node and a subclass of `base` on several: `torch.distributed.FileStore` and `Store`.
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
    """Write the address where the ranks of this node meet the others into a file for them."""
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(msgspec.json.encode(MeetingNote(place, launch)))
