"""Time limits: a timer interrupts work between two steps of the interpreter, as Ctrl-C does.

The work itself need not look at a clock, and stops wherever it is: its results so far must be valid at any moment. A
limit in CPU time stops the same work at the same place, however busy the machine is.
"""

from collections.abc import Callable, Iterable
from math import inf
from signal import ITIMER_PROF, ITIMER_REAL, SIGALRM, SIGPROF, getitimer, getsignal, setitimer, signal
from threading import current_thread, main_thread
from time import monotonic, process_time
from types import FrameType
from typing import NamedTuple, TypeVar

T = TypeVar("T")

GRACE_S = 0.5
"""CPU seconds that a command may use, after its limit or Ctrl-C, to build an answer from what it knows."""
_AGAIN_S = 1.0
"""Delay until the timer fires again if the interpreter dropped the first exception, as in a finalizer."""
_SOON_S = 0.01
"""Delay until the timer fires again if a block was just beginning or ending."""
_AT_ONCE_S = 1e-6
_NEAR_S = 0.05
"""Work that was stopped less than this before its deadline is taken to be stopped by the deadline, not by Ctrl-C."""
_EARLY_S = 1e-3
"""Seconds by which a timer may fire too early: CPU timers count whole ticks, and are up to 5 % ahead of the clock."""


class CpuSeconds(float):
    """CPU seconds of this process: a limit, or a deadline of `process_time`; other floats refer to `monotonic`."""


class _Clock(NamedTuple):
    """A clock, its timer, and the timer's signal."""

    now: Callable[[], float]
    timer: int
    alarm: int


class Stopped(Exception):
    """The time limit was reached."""


class Spent(Stopped):
    """The allowed amount of work is done."""


def ended(work: Callable[[], object], deadline: float | None) -> bool:
    """Return whether work finished before a deadline; False: it was stopped by the deadline or by Ctrl-C.

    Without a deadline the work is part of other work: a time limit or Ctrl-C stops that, too, and only `Spent` ends the
    work here.
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
    """Return the last value before a deadline or Ctrl-C, and whether it is the final one; None: there is none."""
    last: list[T] = []

    def take() -> None:
        for value in values:
            last[:] = [value]

    whole = ended(take, deadline)
    return (last[0] if last else None), whole


def until(limit_s: float | None) -> float:
    """Return the deadline of a limit that starts now, on the limit's clock; None: there is none."""
    if limit_s is None:
        return inf
    now = _clock_of(limit_s).now()
    return CpuSeconds(now + limit_s) if isinstance(limit_s, CpuSeconds) else now + limit_s


def left(deadline: float) -> float | None:
    """Return the limit from now to a deadline; None: there is none."""
    if deadline == inf:
        return None
    left_s = deadline - _clock_of(deadline).now()
    return CpuSeconds(left_s) if isinstance(deadline, CpuSeconds) else left_s


def soon(deadline: float) -> float:
    """Return the deadline, moved so that at least `GRACE_S` CPU seconds remain from now."""
    left_s = left(deadline)
    return deadline if left_s is None or left_s > GRACE_S else until(CpuSeconds(GRACE_S))


def expired(deadline: float) -> bool:
    """Return whether a deadline has passed, or is so near that a timer may have been early."""
    left_s = left(deadline)
    return left_s is not None and left_s < _NEAR_S


def was_interrupted(began_s: float, time_limit_s: float | None) -> bool:
    """Return whether a search was stopped by Ctrl-C, before its time was up; `began_s`: its start by `monotonic`."""
    return time_limit_s is None or monotonic() - began_s < time_limit_s


class stopped_at:
    """A context manager in whose block, in the main thread, Stopped is raised at a deadline.

    In nested blocks an earlier deadline of an outer block stops the inner one. Nothing is raised while a block begins
    or ends: the timer then fires again soon, or is already off. If the deadline of an outer block stopped an inner one,
    the outer block is stopped after the inner one has ended, by its own end at the latest, because its work is not
    complete; its clock does not matter.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline, self._clock, self.fired = deadline, _clock_of(deadline), False
        self.ends = deadline

    def __enter__(self) -> None:
        if self._deadline == inf:
            return
        # Python runs signal handlers only in the main thread: elsewhere a limit would never end anything.
        if current_thread() is not main_thread():
            raise RuntimeError("a time limit works only in the main thread: search without one in other threads")
        now, timer, alarm = self._clock
        self._began = now()
        if self._deadline <= self._began:
            raise Stopped
        self._outer_s, self._outer_again_s = getitimer(timer)
        outer = _block_of(self._clock)
        outer_ends = self._began + self._outer_s if outer is None else outer.ends
        # Each clock has one timer: an inner block takes it over, and later gives back what is left of the outer limit.
        self._outer = signal(alarm, self._stop)
        self._outer_is_first = self._outer_s > 0 and outer_ends < self._deadline
        self.ends = outer_ends if self._outer_is_first else self._deadline
        setitimer(timer, max(_AT_ONCE_S, self.ends - self._began), _AGAIN_S)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._deadline != inf:
            self._give_back_timer()
        for clock in _CLOCKS:
            outer = _block_of(clock)
            if outer is not None and outer.fired:
                setitimer(clock.timer, _AT_ONCE_S, _AGAIN_S)
        if error is None and self.fired:
            raise Stopped

    def _give_back_timer(self) -> None:
        now, timer, alarm = self._clock
        # This comes first: a signal before the next line would stop a block that is over.
        signal(alarm, _pass)
        setitimer(timer, 0)
        signal(alarm, self._outer)
        if self._outer_s > 0:
            left_s = self._began + self._outer_s - now()
            setitimer(timer, max(_AT_ONCE_S, left_s), self._outer_again_s)
        outer = _block_of(self._clock)
        if outer is not None and self.fired and self._outer_is_first:
            outer.fired = True

    def _stop(self, alarm: int, frame: FrameType | None) -> None:
        left_s = self.ends - self._clock.now()
        if left_s > _EARLY_S:
            setitimer(self._clock.timer, left_s, _AGAIN_S)
            return
        # An exception inside of __enter__ or __exit__ would leave a timer set, or lose the outer one.
        while frame is not None:
            if frame.f_code in _LIMITS:
                setitimer(self._clock.timer, _SOON_S, _AGAIN_S)
                return
            frame = frame.f_back
        self.fired = True
        raise Stopped


_CLOCKS = _Clock(process_time, ITIMER_PROF, SIGPROF), _Clock(monotonic, ITIMER_REAL, SIGALRM)


def _clock_of(seconds: float) -> _Clock:
    return _CLOCKS[not isinstance(seconds, CpuSeconds)]


def _block_of(clock: _Clock) -> stopped_at | None:
    """Return the innermost block that the clock's alarm stops; None: there is none."""
    block = getattr(getsignal(clock.alarm), "__self__", None)
    return block if isinstance(block, stopped_at) else None


_LIMITS = {stopped_at.__enter__.__code__, stopped_at.__exit__.__code__}


def _pass(*_: object) -> None:
    """Ignore the last signal of a block."""
