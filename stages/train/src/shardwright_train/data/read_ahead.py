"""Reading what the next steps need while one runs."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_AHEAD = 2
"""Steps: one is ready while another is read."""


@contextmanager
def read_ahead(read: Callable[[int], T], steps: Iterable[int]) -> Iterator[Iterator[T]]:
    """What `read` gives for each step, in order, read by a thread of its own that ends with the block.

    What it raises is raised where that step's data is taken.
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
