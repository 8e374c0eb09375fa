"""The errors of Shardwright's commands, each with its exit code.

ShardwrightError
├── BadInput     2   a file or a value that cannot be used, or a locked run
├── NothingFits  3   an answer: no plan in the requested space fits, and by how much
├── ReaderGone 141   the reader of standard output has ended; no error line is printed
├── RunFailed    4   a run that failed: NaN loss, a dead rank, a hang
│   ├── OutOfMemory  a device had less memory than was requested
│   └── RanksLost    ranks were killed, hang, or are gone with their node
└── Stopped     75   stopped in order; run the same command again to resume
"""

import errno
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher
from typing import ClassVar

_MAX_CHARACTERS = 1000


class ShardwrightError(Exception):
    """The base class of all errors that end a command with one line and an exit code."""

    exit_code: ClassVar[int] = 1


class BadInput(ShardwrightError):
    """An input that cannot be used: the file, what is wrong with it, and what to do."""

    exit_code = 2

    def __init__(self, file: object, problem: str, remedy: str) -> None:
        super().__init__(str(file), problem, remedy)

    def __str__(self) -> str:
        """Return `FILE: what: what to do` on one line."""
        return ": ".join(_on_one_line(str(part)) for part in self.args)


WRITE_AGAIN = "write it again; a result of the workflow is made again once you delete it"
"""The remedy for a file that is damaged, or has another version."""


class NothingFits(ShardwrightError):
    """No plan of the requested space fits the memory budget."""

    exit_code = 3


class ReaderGone(ShardwrightError):
    """The reader of standard output, such as `head`, ended before the writer: the command ends as Unix tools do."""

    exit_code = 128 + signal.SIGPIPE


class RunFailed(ShardwrightError):
    """A run that ended before its last step for a reason that resuming by itself does not fix."""

    exit_code = 4


class OutOfMemory(RunFailed):
    """A device ran out of memory: on which rank, in which step, and for what."""

    def __init__(
        self, text: str, *, subject: str = "", asked_bytes: int | None = None, rank: int = 0, where: str = ""
    ) -> None:
        super().__init__(text)
        self.subject, self.asked_bytes, self.rank, self.where = subject, asked_bytes, rank, where


class RanksLost(RunFailed):
    """Ranks are gone or hang, with no sign that this would happen again."""

    def __init__(self, text: str, *, nodes: tuple[int, ...] = (), start: int = 0) -> None:
        super().__init__(text)
        self.nodes, self.start = nodes, start
        """The nodes whose launchers are gone, and the number of times that ranks were started before."""


class Stopped(ShardwrightError):
    """A run was stopped on request; its state is saved, and it can be resumed."""

    exit_code = 75


def system_fault(error: OSError | MemoryError, file: object = None) -> BadInput:
    """Return a one-line BadInput for an error of the operating system, about its file if known, else the machine."""
    if isinstance(error, MemoryError):
        return BadInput("memory", "there is too little of it here", "ask for less at once, or use a larger machine")
    problem = error.strerror or " ".join(str(error).split())
    return BadInput(file or error.filename or "this machine", problem, _REMEDIES.get(error.errno or 0, "check it"))


_REMEDIES = {
    errno.ENOSPC: "make room, or choose another place",
    errno.EDQUOT: "make room, or choose another place",
    errno.EFBIG: "raise the limit of file sizes, or choose another place",
    errno.EROFS: "choose another place",
    errno.EACCES: "change its permissions, or choose another place",
    errno.EPERM: "change its permissions, or choose another place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "choose a name below a folder",
    errno.EISDIR: "choose the name of a file",
    errno.EEXIST: "choose another name",
    errno.ENOENT: "check the path",
    errno.EMFILE: "raise the limit of open files",
}


def _on_one_line(text: str) -> str:
    """Return text, possibly from a hostile file, on one line without control characters, shortened if long."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}…"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print a ShardwrightError as one `error: …` line on standard error and exit with its code."""
    try:
        yield
    except ShardwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


# Suggestions for misspelled names.


_MOST = 3
_ALIKE = 0.6
"""Lowest similarity, from 0 to 1, of a name that is suggested: the default of `difflib.get_close_matches`."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a question that suggests the most similar known names, or `otherwise` if none is similar."""
    scored = sorted(((_likeness(name.lower(), each.lower()), each) for each in known), key=lambda pair: -pair[0])
    near = [each for score, each in scored[:_MOST] if score >= _ALIKE]
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def _likeness(name: str, known: str) -> float:
    """Return the similarity of a name to a known one: the mean for the whole known name and for its beginning."""
    return sum(SequenceMatcher(None, name, other).ratio() for other in (known, known[: len(name)])) / 2


# Checks that texts can be shown in a terminal or a picture unchanged.


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def has_controls(text: str) -> bool:
    """Return whether a string contains characters that control a terminal or are not valid in XML.

    These are control characters except line breaks and tabs, changes of the writing direction, separators of lines and
    paragraphs, halves of surrogate pairs, and the two noncharacters U+FFFE and U+FFFF.
    """
    return _CONTROLS.search(text) is not None
