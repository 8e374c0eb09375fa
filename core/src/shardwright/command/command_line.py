"""The command line: command names, their options, the functions that run them, and the exit codes."""

import os
import shlex
import shutil
import signal
import sys
import textwrap
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

from shardwright.command.options import POSITIONAL, Option, Options, options_of
from shardwright.io import BadInput, ReaderGone, ShardwrightError, read_bytes, system_fault
from shardwright.schema.field_docs import class_doc, field_docs

_STANDARD_OUTPUT = "standard output"


def show(text: str) -> None:
    """Print a result on standard output; raise BadInput if it cannot be written, ReaderGone if its reader has ended."""
    with _faults_of_output():
        print(text, flush=True)


def flush() -> None:
    """Flush standard output; raise BadInput if it cannot be written, ReaderGone if its reader has ended."""
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
    """Make both output streams accept any text; BadInput if one is closed: the next opened file would replace it."""
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


_HELP = ("-h", "--help")


class BatchOptions(Options, frozen=True, kw_only=True):
    """Run many commands in one process; the first failure ends it, and files of earlier commands remain."""

    file: Annotated[Path, POSITIONAL]
    """Text file: on each line the words of one command, quoted as for a shell; # begins a comment."""


class Command(NamedTuple):
    """A command: the options that it accepts, and the function that runs it."""

    options: type[Options]
    function: str
    """`package.module:function`, which accepts the options; it is imported when the command runs."""

    def parse(self, prog: str, arguments: Sequence[str]) -> Options:
        """Return the options that the arguments state; raise BadInput if one is wrong, SystemExit after `--help`."""
        options = list(options_of(self.options))
        places = " ".join(option.name + " ..." * option.repeats for option in options if option.is_positional)
        usage = f"{prog} {places} [options]".replace("  ", " ")
        parser = _Parser(prog, usage, allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter)
        wants_help = any(flag in arguments for flag in _HELP)
        meanings = field_docs(self.options) if wants_help else {}
        parser.description = _filled(class_doc(self.options)) if wants_help else None
        for option in options:
            _add(parser, option, meanings.get(option.field, option.description))
        given = vars(parser.parse_intermixed_args(arguments))
        values = {name: value for name, value in given.items() if value is not None}
        _refuse_lost_inputs(options, values)
        return self.options(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})

    def call(self, options: Options) -> None:
        """Run the command; raise BadInput if a library that only some commands need is not installed."""
        module, _, function = self.function.partition(":")
        try:
            getattr(import_module(module), function)(options)
        except ModuleNotFoundError as error:  # commands import what only they need
            if error.name is None or error.name.startswith("shardwright"):
                raise
            raise BadInput(error.name, "is not installed", "pip install 'shardwright[train]'") from None


class CommandLine(NamedTuple):
    """The commands of one program, by name; a name may be several words, such as `import galvatron`."""

    name: str
    purpose: str
    commands: Mapping[str, Command]

    def call(self, arguments: Sequence[str]) -> int:
        """Run the command that the arguments specify, and return its exit code."""
        for name, command in self._all.items():
            words = name.split()
            if list(arguments[: len(words)]) == words:
                options = command.parse(f"{self.name} {name}", arguments[len(words) :])
                if isinstance(options, BatchOptions):
                    self._batch(options.file)
                else:
                    command.call(options)
                return 0
        given = " ".join(word for word in arguments if word not in _HELP)
        if not given or any(name.startswith(f"{given} ") for name in self._all):
            show(self._overview(given))
            return 0 if set(_HELP) & set(arguments) else BadInput.exit_code
        raise BadInput(self.name, f"there is no command {given!r}", f"see {self.name} --help")

    @property
    def _all(self) -> Mapping[str, Command]:
        return {**self.commands, "batch": Command(BatchOptions, "")}

    def _batch(self, file: Path) -> None:
        for number, line in enumerate(read_bytes(file).decode(errors="replace").splitlines(), start=1):
            try:
                words = shlex.split(line, comments=True)
            except ValueError as error:
                raise BadInput(file, f"line {number}: {error}", "quote as for a shell") from None
            if words[:1] == ["batch"]:
                raise BadInput(file, f"line {number}: a batch cannot contain another batch", "list its commands here")
            if words:
                self.call(words)

    def _overview(self, prefix: str) -> str:
        rows = {name: each for name, each in self._all.items() if name.startswith(prefix)}
        width = max(map(len, rows))
        lines = [
            textwrap.fill(
                class_doc(command.options).split("\n\n")[0],
                _columns(),
                initial_indent=f"  {name:{width}}  ",
                subsequent_indent=" " * (width + 4),
            )
            for name, command in rows.items()
        ]
        usage = f"usage: {self.name} COMMAND ...\n\n{_filled(self.purpose)}\n\ncommands (each has --help):\n"
        return usage + "\n".join(lines)


def run(app: CommandLine, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and end the process: with 0, or with one line `error: …` on standard error and the error's code.

    2: an input or the environment is at fault; 3: nothing fits; 4: a run failed; 75: stopped in order; 130:
    interrupted; 141: the reader of standard output has ended, which prints no line. An internal error passes through
    with its traceback, as exit code 1.
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
    """Return the error to report for an uncaught exception; without a file name, standard output may be the cause."""
    if isinstance(error, OSError) and error.filename is None:
        try:
            flush()
        except ShardwrightError as fault:
            return fault
    return system_fault(error)


def _reported(error: ShardwrightError) -> int:
    if sys.stderr is not None and not isinstance(error, ReaderGone):
        # If nobody reads it, as in `2>&1 | head -1`, the message is dropped.
        with suppress(BrokenPipeError):
            print(f"error: {error}", file=sys.stderr)
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:
            discard_output()
    return error.exit_code


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(self.prog, message, f"see {self.prog} --help")

    def print_help(self, file: object = None) -> None:
        show(self.format_help().rstrip())


def _add(parser: ArgumentParser, option: Option, meaning: str) -> None:
    """Add one option to a parser; an option that is not given stays unset, so that the struct's default applies."""
    settings: dict[str, Any] = {"help": _help(option, meaning), "default": SUPPRESS}
    if option.is_switch:
        settings["action"] = BooleanOptionalAction if option.off is None else "store_true"
    else:
        settings |= {"type": option.value, "metavar": option.placeholder}
    if option.is_positional:
        settings["metavar"] = option.name
        if not option.is_required:
            settings |= {"nargs": "?", "default": None}  # argparse would treat SUPPRESS as a string to convert
        elif option.repeats:
            settings["nargs"] = "+"
        parser.add_argument(option.field, **settings)
        return
    if option.repeats:
        settings["action"] = "append"
    parser.add_argument(option.name, dest=option.field, required=option.is_required, **settings)
    if option.off is not None:
        parser.add_argument(option.off, dest=option.field, action="store_false", default=SUPPRESS, help="The opposite.")


def _refuse_lost_inputs(options: Sequence[Option], values: Mapping[str, Any]) -> None:
    """Raise BadInput if a file to write is also named by another option, because it would be replaced.

    A folder may be named twice; its contents are the command's responsibility.
    """
    seen: dict[str, str] = {}
    for option in sorted(options, key=lambda each: each.is_written):
        value = values.get(option.field)
        for path in value if isinstance(value, list) else (value,):
            if not isinstance(path, Path):
                continue
            resolved = os.path.realpath(path)  # also for a cycle of links, which the command refuses
            if option.is_written and resolved in seen and Path(resolved).is_file():
                raise BadInput(option.name, f"{path} is {seen[resolved]}, too", "choose another file")
            seen[resolved] = option.name


def _help(option: Option, meaning: str) -> str:
    default = getattr(option.default, "value", option.default)
    default = " ".join(map(str, default)) if isinstance(default, tuple) else default
    has_default = default is not None and default != ""
    notes = [option.limits, f"default {default}" if has_default else "", "required" if option.is_required else ""]
    remarks = "; ".join(note for note in notes if note)
    return f"{meaning} ({remarks})".replace("%", "%%") if remarks else meaning.replace("%", "%%")


def _filled(text: str) -> str:
    return "\n\n".join(textwrap.fill(paragraph, _columns()) for paragraph in text.split("\n\n"))


def _columns() -> int:
    return shutil.get_terminal_size().columns - 2
