"""Reading the data of the next steps while one runs."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_AHEAD = 2
"""Number of steps read ahead: one is ready while another is read."""


@contextmanager
def read_ahead(read: Callable[[int], T], steps: Iterable[int]) -> Iterator[Iterator[T]]:
    """Yield an iterator over `read` of each step, in order, which a thread reads ahead until the block ends.

    An error of `read` is raised where that step's data is taken.
    """
    with ThreadPoolExecutor(1, "reader") as thread:
        try:
            yield _taken(thread, read, iter(steps))
        finally:
            thread.shutdown(cancel_futures=True)


def _taken(thread: ThreadPoolExecutor, read: Callable[[int], T], steps: Iterator[int]) -> Iterator[T]:
    ahead: deque[Future[T]] = deque()
    for step in steps:
        ahead.append(thread.submit(read, step))
        if len(ahead) > _AHEAD:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()
