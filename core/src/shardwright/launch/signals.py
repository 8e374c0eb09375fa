"""Handling of the signals that ask a run to stop."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TextIO, cast

SECOND_SIGNAL = 130
"""Exit code if a second signal interrupts the orderly end."""
_RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@contextmanager
def relayed_signals(ask_to_stop: Callable[[], None]) -> Iterator[list[signal.Signals]]:
    """Call `ask_to_stop` at the first INT, TERM, USR1 or HUP, and raise SystemExit at the second.

    Yields the list of received signals.
    """
    seen: list[signal.Signals] = []

    def relay(number: int, _frame: FrameType | None) -> None:
        seen.append(signal.Signals(number))
        if number == signal.SIGHUP:
            outlive_terminal()
        if len(seen) > 1:
            sys.exit(SECOND_SIGNAL)
        ask_to_stop()

    before = {number: signal.signal(number, relay) for number in _RELAYED}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def outlive_terminal() -> None:
    """Keep this process running when its output is closed, as by a closed terminal."""
    sys.stdout, sys.stderr = cast(TextIO, _Lossy(sys.stdout)), cast(TextIO, _Lossy(sys.stderr))


class _Lossy:
    """A text stream whose write errors are ignored."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
