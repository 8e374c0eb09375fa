"""The end of work whose time is up: a timer interrupts it between two steps of the interpreter, as Ctrl-C does.

So work has no clock to look at, and stops wherever it is: what it has made so far must be true at any moment.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from signal import ITIMER_REAL, SIGALRM, getitimer, getsignal, setitimer, signal
from time import monotonic
from typing import NoReturn, TypeVar

T = TypeVar("T")

GRACE_S = 0.5
"""Seconds that a command may take, once its time is up or Ctrl-C was heard, to make an answer of what it knows."""
_AGAIN_S = 1.0
"""How soon the timer fires again where the interpreter had to drop the first exception, as in a finalizer."""
_AT_ONCE_S = 1e-6


class Stopped(Exception):
    """Time is up."""


class Spent(Stopped):
    """The work that was allowed is done."""


def ended(work: Callable[[], object], deadline: float | None) -> bool:
    """Return whether work came to its end before a deadline, a time of `monotonic`; False: then, or by Ctrl-C.

    None: the work is a part of other work, which the time and Ctrl-C stop; here it ends only where it is `Spent`.
    """
    try:
        with stopped_at(inf if deadline is None else deadline):
            work()
    except Spent:
        return False
    except (Stopped, KeyboardInterrupt):
        if deadline is None:
            raise
        return False
    return True


def latest(values: Iterable[T], deadline: float) -> tuple[T | None, bool]:
    """Return the last value that came before a deadline or Ctrl-C, and whether it is the last of all; None: none."""
    last: list[T] = []

    def take() -> None:
        for value in values:
            last[:] = [value]

    whole = ended(take, deadline)
    return (last[0] if last else None), whole


def soon(deadline: float, seconds: float = GRACE_S) -> float:
    """Return a deadline that leaves so many seconds from now at least."""
    return max(deadline, monotonic() + seconds)


def was_interrupted(began_s: float, time_limit_s: float | None) -> bool:
    """Return whether a search that was stopped was so by Ctrl-C, before its time was up; `began_s`: of `monotonic`."""
    return time_limit_s is None or monotonic() - began_s < time_limit_s


@contextmanager
def stopped_at(deadline: float) -> Iterator[None]:
    """Raise Stopped in the block, which is the main thread's, at a deadline; of nested blocks the first one counts."""
    if deadline == inf:
        yield
        return
    if deadline <= (began := monotonic()):
        raise Stopped
    outer_s, outer_again_s = getitimer(ITIMER_REAL)
    outer = getsignal(SIGALRM)
    try:
        signal(SIGALRM, _stop)
        setitimer(ITIMER_REAL, min(deadline - began, outer_s or inf), _AGAIN_S)
        yield
    finally:
        setitimer(ITIMER_REAL, 0)
        signal(SIGALRM, outer)
        if outer_s > 0:
            setitimer(ITIMER_REAL, max(_AT_ONCE_S, began + outer_s - monotonic()), outer_again_s)


def _stop(*_: object) -> NoReturn:
    raise Stopped
