"""A command line for the tests of the front door."""

import errno
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from shardwright.command import POSITIONAL, Command, CommandLine, Off, Options, run, show
from shardwright.io import NothingFits, atomic_path
from shardwright.types import Count, Seconds


class Schedule(StrEnum):
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"


class WriteOptions(Options, frozen=True, kw_only=True):
    """Write what was asked.

    A second paragraph, 100 % plain, that is long enough to be broken into two lines when the terminal has only 80
    columns.
    """

    plans: Annotated[tuple[Path, ...], POSITIONAL]
    """Plans to write of."""
    out: Path
    """Where to."""
    an_option_with_quite_a_long_name_that_nobody_should_cut: Count = 1
    """How many."""
    time_limit: Seconds | None = None
    """Seconds, or 100 % of them."""
    schedule: Schedule = Schedule.ONE_F_ONE_B
    dtype: Literal["float32", "bfloat16"] = "float32"
    model: tuple[Path, ...] = ()
    consecutive: Annotated[bool, Off("--strided"), Meta(description="Neighbours.")] = True
    tables: bool = True
    name: str | None = None


def write(options: WriteOptions) -> None:
    with atomic_path(options.out) as path:
        path.write_text(repr(options), encoding="utf-8")
        show(options.out.name)


class FailOptions(Options, frozen=True, kw_only=True):
    """Fail."""

    how: Annotated[Literal["memory", "nothing", "full", "bug", "interrupt"], POSITIONAL]
    out: Annotated[Path | None, POSITIONAL] = None
    again: bool = False


def fail(options: FailOptions) -> None:
    match options.how:
        case "nothing" if options.again:
            show(repr(options))
        case "memory":
            raise MemoryError
        case "nothing":
            raise NothingFits("plan: nothing fits")
        case "full":
            with atomic_path(options.out) as path:
                path.write_text("half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "interrupt":
            raise KeyboardInterrupt
        case "bug":
            raise ValueError("a bug")


APP = CommandLine(
    name="front-door",
    purpose="Try the front door.",
    commands={
        "write": Command(WriteOptions, "front_door:write"),
        "import fail": Command(FailOptions, "front_door:fail"),
    },
)

if __name__ == "__main__":
    run(APP)
