"""All tests: modules are imported without collecting garbage, of which they make none: a third of the time."""

import gc
import importlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from shardwright.display import columns

gc.disable()
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")  # which readline sets for child processes, unseen by os.environ, as pytest imports it
_BEGAN_S = time.monotonic()
_PIPED_WIDTH = columns.PIPED_WIDTH
columns.PIPED_WIDTH = 4000  # Lines are read whole; how they are broken has its own tests.


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--every N` and `--minutes M`, by which continuous integration stays within its time on any machine."""
    text = "of each long test with several cases, run the first case and every Nth after it"
    parser.addoption("--every", type=int, default=1, metavar="N", help=text)
    text = "begin no long test later than M minutes after the start: it is skipped, and -rs says how many were"
    parser.addoption("--minutes", type=float, default=math.inf, metavar="M", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect long cases as `--every` says; each test function keeps its first case."""
    every, seen, kept, left = config.getoption("every"), Counter[str](), [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        (left if item.get_closest_marker("long") and seen[name] % every else kept).append(item)
        seen[name] += item.get_closest_marker("long") is not None
    items[:] = kept
    if left:
        config.hook.pytest_deselected(items=left)


@pytest.hookimpl(tryfirst=True)  # before any fixture is made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a long test once the `--minutes` are over."""
    minutes = item.config.getoption("minutes")
    if item.get_closest_marker("long") and time.monotonic() - _BEGAN_S > 60 * minutes:
        pytest.skip(f"not begun: the {minutes:g} minutes of --minutes are over")


@pytest.fixture(scope="session")
def every(pytestconfig: pytest.Config) -> int:
    """Return the N of `--every N`, for fixtures that run what many long cases look at."""
    found: int = pytestconfig.getoption("every")
    return found


def pytest_collection_finish() -> None:
    """What was imported is not looked through later; what tests make, seldom. It took a tenth of searches' time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


@pytest.fixture
def usual_width(monkeypatch: pytest.MonkeyPatch) -> int:
    """The characters of a line of output that is no terminal, where lines are broken as for people."""
    monkeypatch.setattr(columns, "PIPED_WIDTH", _PIPED_WIDTH)
    return _PIPED_WIDTH


@pytest.fixture
def unread() -> Iterator[int]:
    """The descriptor of a pipe whose reader has ended, as `head` does."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.fixture(scope="module")
def gpu_kit() -> Iterator[Callable[[str], ModuleType]]:
    """A module of the GPU kit, which is in no package, by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        yield lambda name: importlib.import_module(f"gpu_kit.{name}")
