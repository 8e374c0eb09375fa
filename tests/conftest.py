"""All tests: modules are imported without collecting garbage, of which they make none: a third of the time."""

import gc
import os
from collections.abc import Iterator

import pytest

gc.disable()


def pytest_collection_finish() -> None:
    """What was imported is not looked through later; what tests make, seldom. It took a tenth of searches' time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


@pytest.fixture
def unread() -> Iterator[int]:
    """The descriptor of a pipe whose reader has ended, as `head` does."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)
