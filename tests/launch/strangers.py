"""A process that is no part of a run and calls whatever the run listens at: `python strangers.py HOST:PORT...`.

It knows everything but the secret: the protocol of the launchers (that of earlier versions, too), that of PyTorch's
TCPStore, and pickles. It prints what it was answered, as JSON: bytes in hexadecimal, by address and attempt.
"""

import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 0.3
IDLE = 200
"""Lines that are opened and never spoken over."""
_LISTENS = "0A"
_KILLED = {"rank": 0, "status": -9, "seen_s": 0.0, "step": None, "error": None}
_TAG = {"type": "report"}
_SAID = {
    "ended": {"ended": True},
    "gone": {"gone": True},
    "hang": {"hang": "all of it"},
    "killed": {"ranks": [_KILLED]},
}
REPORTS = {
    kind: [{"node": 1, "run": run, "start": start} | said for run in ("2 ", "4") for start in (0, 1_000_000)]
    for kind, said in _SAID.items()
}
"""Well-formed reports of a launcher: they would end a run, silence its nodes, or raise its number of starts."""


class _Command:
    """What runs a command where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {Path(sys.argv[1]) / 'ran'}",)


def attempts() -> dict[str, bytes]:
    """What a stranger says, by name."""
    lines = {kind: b"".join(json.dumps(each).encode() + b"\n" for each in some) for kind, some in REPORTS.items()}
    framed = {kind: b"".join(_framed(_TAG | each) for each in some) for kind, some in REPORTS.items()}
    nested = b"[" * 200_000 + b"]" * 200_000
    store = b"\x00" + (0x3C85F7CE).to_bytes(4, "little")  # TCPStore: VALIDATE
    store += b"\x01" + b"".join(len(word).to_bytes(8, "little") + word for word in (b"init/taken", b"1"))  # SET
    store += b"\x04" + (10).to_bytes(8, "little") + b"init/taken" + (1).to_bytes(8, "little")  # ADD
    return {
        "nothing": b"",
        **{f"{kind} behind a wrong proof": bytes(64) + reports for kind, reports in framed.items()},
        **framed,
        **{f"{kind} in a line": reports for kind, reports in lines.items()},
        "nested": nested + b"\n",
        "nested in a report": b'{"node":1,"unknown":' + nested + b"}\n",
        "store": store,
        "pickle": pickle.dumps(_Command()),
        "long": b"\xff" * 1_000_000,
        "http": b"GET / HTTP/1.0\r\n\r\n",
    }


def _framed(message: dict[str, object]) -> bytes:
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "big") + body


def listeners(processes: Iterable[int]) -> set[tuple[str, int]]:
    """Where processes of this machine listen: addresses as the kernel writes them, and ports."""
    sockets = set[str]()
    for process in processes:
        for file in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(file))
    found = set[tuple[str, int]]()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENS and f"socket:[{inode}]" in sockets:
                address, port = local.split(":")
                found.add((address, int(port, 16)))
    return found


LOOPBACK = {"0100007F", "0" * 24 + "01000000"}
"""127.0.0.1 and ::1, as the kernel writes them."""


def molest(folder: Path, ports: Iterable[int]) -> dict[str, str]:
    """Have a process of its own call these ports of loopback, and return what it was answered."""
    command = [sys.executable, __file__, str(folder), *map(str, ports)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    answers: dict[str, str] = json.loads(done.stdout)
    return answers


def _answered(port: int, words: bytes) -> bytes:
    answered = b""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as line:
        with suppress(OSError):
            line.sendall(words)
        while part := line.recv(1 << 16):
            answered += part
    return answered


def main(ports: list[int]) -> None:
    """Call every port with every attempt, while idle lines are open."""
    idle = []
    for port in ports:
        for _ in range(IDLE):
            with suppress(OSError):
                idle.append(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
    calls = [(port, name, words) for port in ports for name, words in attempts().items()]
    with ThreadPoolExecutor(8) as pool:
        answered = pool.map(lambda call: _answered(call[0], call[2]).hex(), calls)
    print(json.dumps({f"{port}, {name}": answer for (port, name, _), answer in zip(calls, answered, strict=True)}))


if __name__ == "__main__":
    main(list(map(int, sys.argv[2:])))
