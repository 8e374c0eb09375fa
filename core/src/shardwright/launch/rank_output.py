"""The output of ranks, shown as it is printed, and kept in a file for each rank if requested.

A rank that is killed keeps what it has printed, for that lies in a pipe whose other end is the launcher's.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO

from shardwright.io import BadInput, system_fault

LAST_LINES = 10
"""Number of the last lines of a failed rank that are shown once more."""
_CHUNK_BYTES = 64 * 1024
_JOIN_S = 5.0
_STDOUT, _STDERR = 1, 2

OnLine = Callable[[bytes], None]


class RankLog:
    """The log file of one rank, to which every start appends."""

    def __init__(self, path: Path, heading: str) -> None:
        """Open the log and write a heading line; raise BadInput if the file cannot be written."""
        self.path = path
        if path.exists() and not path.is_file():
            raise BadInput(path, "is not a regular file", "choose another folder for logs")
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise system_fault(error, path) from None
        before = "\n" if os.fstat(self._descriptor).st_size else ""
        self._failed = False
        self.write(f"{before}=== {heading} ===\n".encode())
        self._begin = os.fstat(self._descriptor).st_size

    def write(self, piece: bytes) -> None:
        """Append to the log; if that fails, report it once and continue without a log."""
        if self._failed:
            return
        try:
            _write(self._descriptor, piece)
        except OSError as error:
            self._failed = True
            print(f"{self.path}: {error.strerror}: the rank's further output is not logged", file=sys.stderr)

    def last_lines(self) -> list[str]:
        """Return the last lines that were written since this start."""
        begin = max(self._begin, os.fstat(self._descriptor).st_size - _CHUNK_BYTES)
        return os.pread(self._descriptor, _CHUNK_BYTES, begin).decode(errors="replace").splitlines()[-LAST_LINES:]

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class RankOutput:
    """The output of a node's ranks: a thread for each stream that is not the launcher's own."""

    def __init__(self, logs: dict[int, RankLog], on_line: OnLine | None) -> None:
        self._logs, self._on_line = logs, on_line
        self._readers: list[threading.Thread] = []

    def takes(self, rank: int) -> tuple[bool, bool]:
        """Whether the launcher reads standard output and standard error of a rank."""
        kept = rank in self._logs
        return kept or (self._on_line is not None and rank == 0), kept

    def follow(self, rank: int, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> None:
        """Show and store the output of a rank's pipes until they are closed."""
        keep = [self._logs[rank].write] if rank in self._logs else []
        if stdout is not None and self._on_line is not None and rank == 0:
            self._read(stdout, [*keep, self._on_line])
        elif stdout is not None:
            self._read(_lines(stdout), [*keep, partial(_show, _STDOUT)])
        if stderr is not None:
            self._read(_lines(stderr), [*keep, partial(_show, _STDERR)])

    def _read(self, lines: Iterable[bytes], takers: list[OnLine]) -> None:
        reader = threading.Thread(target=_hand_on, args=(lines, takers), daemon=True)
        reader.start()
        self._readers.append(reader)

    def join(self) -> None:
        """Wait until all output of ended ranks is shown and stored, up to a limit: a child may hold a pipe open."""
        until_s = time.monotonic() + _JOIN_S
        for reader in self._readers:
            reader.join(max(0.0, until_s - time.monotonic()))

    def show(self, rank: int, text: str) -> None:
        """Show on standard error, and store, a text that a rank could not print itself."""
        print(text, end="", file=sys.stderr)
        if rank in self._logs:
            self._logs[rank].write(text.encode())

    def show_last_lines(self, rank: int) -> None:
        """Show a rank's last lines on standard error, if it has a log here and printed anything."""
        if rank in self._logs and (lines := self._logs[rank].last_lines()):
            indented = "".join(f"    {line}\n" for line in lines)
            print(f"the last lines of rank {rank}, of {self._logs[rank].path}:\n{indented}", end="", file=sys.stderr)

    def close(self) -> None:
        """Close the logs, unless a thread is still writing to them."""
        if not any(reader.is_alive() for reader in self._readers):
            for log in self._logs.values():
                log.close()


@contextmanager
def rank_output(
    folder: Path | None, ranks: range, world_size: int, start: int, on_line: OnLine | None
) -> Iterator[RankOutput]:
    """Yield the output of these ranks: rank 0's lines go to `on_line`, and with a folder all output is stored there.

    Raises BadInput if the folder or a file in it cannot be written.
    """
    logs: dict[int, RankLog] = {}
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise system_fault(error, folder) from None
        now = datetime.now(UTC).isoformat(timespec="seconds")
        for rank in ranks:
            heading = f"start {start} at {now}: rank {rank} of {world_size}"
            logs[rank] = RankLog(folder / f"rank-{rank}.log", heading)
    with closing(RankOutput(logs, on_line)) as output:
        yield output


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield complete lines as soon as they arrive, or the beginning of a line that grows too long."""
    begun = b""
    with stream:
        while piece := os.read(stream.fileno(), _CHUNK_BYTES):
            begun += piece
            end = 1 + max(begun.rfind(b"\n"), begun.rfind(b"\r"))
            end = end or (len(begun) if len(begun) >= _CHUNK_BYTES else 0)
            if end:
                yield begun[:end]
                begun = begun[end:]
    if begun:
        yield begun


def _hand_on(lines: Iterable[bytes], takers: Iterable[OnLine]) -> None:
    for some in lines:
        for take in takers:
            take(some)


def _show(descriptor: int, piece: bytes) -> None:
    """Print output as the rank itself would; a closed stream is not an error."""
    with suppress(OSError):
        _write(descriptor, piece)


def _write(descriptor: int, piece: bytes) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]
