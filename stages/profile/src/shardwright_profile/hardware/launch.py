"""Starting one process per rank of this node, watching them, and ending them together."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from shardwright_formats.io.errors import BadInput, RunFailed, ShardwrightError, Stopped

__all__ = ["SECOND_SIGNAL", "run_ranks"]

SECOND_SIGNAL = 130
"""Exit code when a second signal cuts the orderly end short."""

_POLL_S = 0.02
_GRACE_S = 5.0
"""What the ranks have to end by themselves once they were told to."""
_ECHO_S = 0.3
"""How long to look for the rank that died first: its peers fail a moment after it."""


class _Rank(NamedTuple):
    number: int
    process: "subprocess.Popen[bytes]"
    log: Path
    reader: threading.Thread | None
    """Passes on what rank 0 prints."""


def run_ranks(
    module: str,
    argument: Path,
    ranks: Sequence[int],
    environment: Mapping[str, str],
    logs: Path,
    on_line: Callable[[bytes], None],
) -> None:
    """Run `python -m module argument` once per rank, with RANK and LOCAL_RANK set, until all have ended well.

    Lines that rank 0 prints go to `on_line`; what ranks write to standard error goes to `logs`. SIGINT and SIGTERM are
    passed on. Raises BadInput as a rank reported it, RunFailed with the rank that died, Stopped after a signal; no rank
    is left running in any case.
    """
    started: list[_Rank] = []
    with _caught_signals() as received:
        try:
            for local_rank, number in enumerate(ranks):
                numbered = {**os.environ, **environment, "RANK": str(number), "LOCAL_RANK": str(local_rank)}
                started.append(_start(module, argument, number, numbered, logs, on_line))
            _watch(started, received)
        finally:
            _end(started, received)


def _start(
    module: str,
    argument: Path,
    number: int,
    environment: Mapping[str, str],
    logs: Path,
    on_line: Callable[[bytes], None],
) -> _Rank:
    log = logs / f"rank{number}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(argument)],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
            stderr=errors,
            # Signals of the terminal reach the launcher alone, which passes them on.
            start_new_session=True,
        )
    reader = None
    if process.stdout is not None:
        reader = threading.Thread(target=_pass_on_lines, args=(process.stdout, on_line), daemon=True)
        reader.start()
    return _Rank(number, process, log, reader)


def _pass_on_lines(lines: Iterator[bytes], on_line: Callable[[bytes], None]) -> None:
    for line in lines:
        on_line(line)


def _watch(started: Sequence[_Rank], received: Sequence[int]) -> None:
    while any(rank.process.poll() is None for rank in started):
        if received:
            name = signal.Signals(received[0]).name
            raise Stopped(f"stopped by {name}: run the same command again: it goes on with what is not measured yet")
        if any(rank.process.poll() for rank in started):
            time.sleep(_ECHO_S)
            break
        time.sleep(_POLL_S)
    if dead := [rank for rank in started if rank.process.poll()]:
        raise _failure(dead)


def _failure(dead: Sequence[_Rank]) -> ShardwrightError:
    """What ended the run: a rank that was killed explains those that failed after it, so does refused input."""

    def weight(rank: _Rank) -> tuple[bool, bool]:
        return rank.process.returncode > 0, rank.process.returncode != BadInput.exit_code

    rank = min(dead, key=weight)
    status = rank.process.returncode
    if status < 0:
        name = signal.Signals(-status).name
        return RunFailed(f"rank {rank.number} was killed by {name}: the other ranks were ended: read {rank.log}")
    words = rank.log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(words) if line.strip()), "it said nothing")
    parts = last.removeprefix("error: ").split(": ", 2)
    if status == BadInput.exit_code and len(parts) == 3:
        return BadInput(*parts)
    return RunFailed(f"rank {rank.number} ended with status {status}: {last.strip()}: read {rank.log}")


def _end(started: Sequence[_Rank], received: Sequence[int]) -> None:
    """End every rank: with the signal that was received or SIGTERM, then after a grace or a second signal SIGKILL."""
    for rank in started:
        if rank.process.poll() is None:
            rank.process.send_signal(received[0] if received else signal.SIGTERM)
    until = time.monotonic() + _GRACE_S
    while any(rank.process.poll() is None for rank in started) and time.monotonic() < until and len(received) < 2:
        time.sleep(_POLL_S)
    for rank in started:
        rank.process.kill()
        rank.process.wait()
        if rank.reader is not None:
            # The last lines may be on their way still; a child of the rank could hold the pipe open for ever.
            rank.reader.join(_GRACE_S)
    if len(received) > 1:
        raise SystemExit(SECOND_SIGNAL)


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    received: list[int] = []
    caught = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda n, _: received.append(n)) for number in caught}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
