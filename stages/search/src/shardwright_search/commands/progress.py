"""Where a command tells how far it is."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Takes lines: one live line on a terminal, plain lines on standard error otherwise."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("reading") as status:
            yield status.update
    else:
        yield lambda line: print(line, file=sys.stderr, flush=True)
