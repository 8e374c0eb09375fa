"""The way from a command line to its exit code."""

import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from shardwright_formats.command.command_line import CommandLine
from shardwright_formats.command.faults import check_streams, discard_output, flush
from shardwright_formats.io import ReaderGone, ShardwrightError, system_fault


def run(app: CommandLine, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and end the process: 0, or one line `error: …` on standard error and the error's exit code.

    2: an input or the world outside is at fault; 3: nothing fits; 4: a run failed; 75: stopped in order; 130:
    interrupted; 141: nobody reads standard output any more, which is not said. An error of our own making passes
    through with its traceback, as exit code 1.
    """
    raise SystemExit(_exit_code(app, sys.argv[1:] if arguments is None else arguments))


def _exit_code(app: CommandLine, arguments: Sequence[str]) -> int:
    try:
        check_streams()
        exit_code = app.call(arguments)
        flush()
        return exit_code
    except ShardwrightError as error:
        return _reported(error)
    except (OSError, MemoryError) as error:
        return _reported(_culprit(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _culprit(error: OSError | MemoryError) -> ShardwrightError:
    """The fault of an error that nobody caught; where it names no file, standard output may have caused it."""
    if isinstance(error, OSError) and error.filename is None:
        try:
            flush()
        except ShardwrightError as fault:
            return fault
    return system_fault(error)


def _reported(error: ShardwrightError) -> int:
    if sys.stderr is not None and not isinstance(error, ReaderGone):
        # Where nobody reads it, as in `2>&1 | head -1`, there is nobody to tell.
        with suppress(BrokenPipeError):
            print(f"error: {error}", file=sys.stderr)
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:
            discard_output()
    return error.exit_code
