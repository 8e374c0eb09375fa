"""The rendezvous of launchers and ranks of several nodes, and the proof that each knows the run's secret.

Node 0 listens at one address. A caller and node 0 exchange random numbers and prove by HMAC-SHA256 over both (RFC 2104)
that they know the secret, which is never sent. Until then, only 32 and 64 bytes are read from a peer, without parsing.
Afterwards every message is its length followed by JSON; messages are not encrypted.
"""

import asyncio
import hmac
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from shardwright.io import BadInput
from shardwright.launch.nodes import Address, Meeting, Nodes, means_loopback

SECRET_VARIABLE = "SHARDWRIGHT_SECRET"
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
ANSWER_S = 10.0
"""Seconds that a peer has to prove that it knows the secret, and to receive a message."""

_MIN_SECRET_CHARACTERS, _MAX_SECRET_CHARACTERS = 32, 1024
_FIRST_PORT, _PORTS = 20000, 12000
_NONCE_BYTES = _PROOF_BYTES = 32
_LENGTH_BYTES = 4
REMEDY = f"set {SECRET_VARIABLE} to the same {_MIN_SECRET_CHARACTERS} or more random characters on all nodes"


class Refused(ConnectionError):
    """A peer does not know the secret, or sends something invalid."""


@dataclass(frozen=True)
class Place:
    """The address of node 0, and the secret to prove."""

    address: Address
    secret: bytes


@contextmanager
def meeting_of(nodes: Nodes, file: Path, environment: Mapping[str, str]) -> Iterator[Nodes]:
    """Yield the nodes of a run, ready to meet: node 0 listens, and the others can read the secret.

    The secret is SHARDWRIGHT_SECRET or, if that is not set, a random one that node 0 writes to `file` (mode 600) in a
    folder that the nodes share. Raises BadInput if the secret is short, if others than the user can read `file`, or if
    node 0 cannot listen at its address.
    """
    if nodes.count == 1 or nodes.meeting is not None:
        yield nodes
        return
    meeting = Meeting(file, _checked(environment))
    if nodes.rank:
        yield replace(nodes, meeting=meeting)
        return
    if meeting.secret is None:
        _write_secret(file)
    try:
        place = place_of(replace(nodes, meeting=meeting))
        with _listening(place.address) as server:
            yield replace(nodes, meeting=replace(meeting, secret=place.secret, server=server))
    finally:
        if meeting.secret is None:
            file.unlink(missing_ok=True)


def place_of(nodes: Nodes) -> Place:
    """Return the address of node 0 and the secret; FileNotFoundError if the secret's file does not exist (yet)."""
    address, meeting = nodes.address, nodes.meeting
    assert address is not None and meeting is not None, "several nodes meet within meeting_of"
    secret = meeting.secret or _read_secret(meeting.file)
    if not address.port:  # under srun: derived from the secret, so that no other user can occupy it in advance
        number = int.from_bytes(_proof(secret, b"port", nodes.step.encode()))
        address = address._replace(port=_FIRST_PORT + number % _PORTS)
    return Place(address, secret)


def _checked(environment: Mapping[str, str]) -> bytes | None:
    given = environment.get(SECRET_VARIABLE)
    if given is None:
        return None
    if not _MIN_SECRET_CHARACTERS <= len(given) <= _MAX_SECRET_CHARACTERS:
        remedy = f"use {_MIN_SECRET_CHARACTERS} or more random characters"
        raise BadInput(SECRET_VARIABLE, f"has {len(given)} characters", remedy)
    return os.fsencode(given)


def _write_secret(file: Path) -> None:
    """Write the secret's file atomically; keep a file from an earlier start of this run."""
    try:
        if not file.is_symlink() and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # with mode 600
            with open(descriptor, "w") as temporary:
                temporary.write(secrets.token_hex(_NONCE_BYTES))
            os.replace(name, file)
        _read_secret(file)
    except OSError as error:
        raise BadInput(file, f"cannot be written and read ({error.strerror})", f"correct it, or {REMEDY}") from None


def _read_secret(file: Path) -> bytes:
    # The folder is listed, because an NFS client may cache for a long time that a file does not exist.
    if not file.parent.is_dir() or file.name not in os.listdir(file.parent):
        raise FileNotFoundError(f"{file} does not exist")
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise BadInput(file, "is not a file that only this user can read", f"remove it, or {REMEDY}")
        secret = opened.read(_MAX_SECRET_CHARACTERS)
    if len(secret) < _MIN_SECRET_CHARACTERS:
        raise BadInput(file, "contains no secret", "remove it")
    return secret


@contextmanager
def _listening(address: Address) -> Iterator[socket.socket]:
    """Listen only at this address of this machine until the run ends, also while ranks are restarted."""
    if means_loopback(address.host):
        problem = f"{address.host} is this machine's loopback interface here, which other nodes cannot reach"
        raise BadInput("--rendezvous", problem, "give an address of node 0 that all nodes reach")
    try:
        family, _, _, _, here = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        server = socket.create_server(here[:2], family=family)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        problem = f"{address.host}, port {address.port} cannot be listened at ({why})"
        raise BadInput("--rendezvous", problem, "choose an address of node 0 and a free port") from None
    with server:
        yield server


def call(place: Place, timeout_s: float = ANSWER_S / 2) -> socket.socket:
    """Return a connection to node 0's launcher after both have proved the secret; raise OSError if they cannot."""
    line = socket.create_connection(place.address, timeout=timeout_s)
    try:
        challenge, nonce = receive(line, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        line.sendall(nonce + _proof(place.secret, b"caller", challenge + nonce))
        if not hmac.compare_digest(receive(line, _PROOF_BYTES), _proof(place.secret, b"node 0", challenge + nonce)):
            raise Refused(f"what listens at {place.address.host}, port {place.address.port} does not know the secret")
    except BaseException:
        line.close()
        raise
    return line


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Return after a caller has proved that it knows the secret; raise Refused or EOFError if it does not."""
    challenge = secrets.token_bytes(_NONCE_BYTES)
    writer.write(challenge)
    nonce = await reader.readexactly(_NONCE_BYTES)
    if not hmac.compare_digest(await reader.readexactly(_PROOF_BYTES), _proof(secret, b"caller", challenge + nonce)):
        raise Refused("a caller does not know the secret")
    writer.write(_proof(secret, b"node 0", challenge + nonce))


def _proof(secret: bytes, role: bytes, numbers: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + numbers, "sha256")


def receive(line: socket.socket, count: int) -> bytes:
    """Receive `count` bytes from a connection; raise Refused if it is closed before."""
    parts = bytearray()
    while len(parts) < count:
        part = line.recv(count - len(parts))
        if not part:
            raise Refused("connection closed by node 0's launcher")
        parts += part
    return bytes(parts)


def framed(message: msgspec.Struct) -> bytes:
    """Return a message in wire format: its length, then JSON."""
    body = msgspec.json.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES) + body


def receive_frame(line: socket.socket) -> bytes:
    """Receive the next message of a connection."""
    return receive(line, _length(receive(line, _LENGTH_BYTES)))


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read the next message of a connection; raise EOFError if it ends, Refused if the message is too long."""
    return await reader.readexactly(_length(await reader.readexactly(_LENGTH_BYTES)))


def _length(head: bytes) -> int:
    length = int.from_bytes(head)
    if length > MAX_MESSAGE_BYTES:
        raise Refused(f"a message of {length} bytes")
    return length
