"""Faults of the outside world, each reported in one line."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper

from shardwright.io import BadInput, ReaderGone, system_fault

_STANDARD_OUTPUT = "standard output"


def show(text: str) -> None:
    """Print a result on standard output; raise BadInput if it cannot be written, ReaderGone if the reader has left."""
    with _faults_of_output():
        print(text, flush=True)


def flush() -> None:
    """Flush standard output; raise BadInput if it cannot be written, ReaderGone if the reader has left."""
    with _faults_of_output():
        sys.stdout.flush()


@contextmanager
def _faults_of_output() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as error:
        raise system_fault(error, _STANDARD_OUTPUT) from None


def check_streams() -> None:
    """Make both streams take any text; BadInput if one is closed, as the next opened file would take its place."""
    for name, stream in {_STANDARD_OUTPUT: sys.stdout, "standard error": sys.stderr}.items():
        if stream is None:
            raise BadInput(name, "is closed", "open it, or send it to /dev/null")
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Discard output that could not be written, so that Python does not try to write it again when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
