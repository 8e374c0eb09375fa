"""Lines of text that are no wider than the terminal."""

import re
import sys
from collections.abc import Iterable
from os import environ
from shutil import get_terminal_size
from textwrap import TextWrapper

PIPED_WIDTH = 100
"""Characters of a line if the output is not a terminal and COLUMNS is not set."""
_QUOTED = re.compile(r"(?:\"[^\"]*\"|'[^']*'|[^\s\"'])+")


def line_width() -> int:
    """Return the width of a line of standard output: its terminal's, else COLUMNS, else `PIPED_WIDTH`."""
    is_known = sys.stdout.isatty() or environ.get("COLUMNS", "").isdigit()
    return get_terminal_size((PIPED_WIDTH, 24)).columns if is_known else PIPED_WIDTH


def wrapped(lines: Iterable[str], width: int) -> str:
    """Return lines wrapped between words; continuation lines are indented."""
    return "\n".join(_wrapped(part, width) for line in lines for part in line.split("\n"))


def wrapped_command(command: str, width: int) -> str:
    """Return an indented shell command, wrapped with backslashes; quoted words stay whole."""
    indent, lines = command[: len(command) - len(command.lstrip())], [""]
    for word in _QUOTED.findall(command):
        if lines[-1] and len(f"{indent}    {lines[-1]} {word} \\") > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(f"{indent}{'    ' if number else ''}{line}" for number, line in enumerate(lines))


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    further = indent + "    " if len(indent) + 24 < width else ""
    wrapper = TextWrapper(width, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False)
    return wrapper.fill(line.strip())
