"""Ctrl-C at any moment: behind any call in some code."""

import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupted_after(calls: int, functions: Collection[Callable[..., object]]) -> Iterator[None]:
    """Raise KeyboardInterrupt once, behind so many calls, by some functions or to them, and returns."""
    codes, left = {function.__code__ for function in functions}, calls

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        left -= frame.f_code in codes
        if left < 0:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def alarm_after(events: int) -> Iterator[None]:
    """Send SIGALRM once, at a call or return, of the interpreter's functions too, behind so many others."""
    left = events

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGALRM)

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
