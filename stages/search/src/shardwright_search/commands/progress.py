"""Where a command tells how far it is."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

__all__ = ["progress"]


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Takes lines: one live line on a terminal, plain lines on standard error otherwise."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("reading") as status:
            yield status.update
    else:
        yield lambda line: print(line, file=sys.stderr, flush=True)
