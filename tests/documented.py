"""The commands that the documentation tells to type, as words."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "config", "benchmarks/results")
PAGES = [ROOT / "README.md", *(path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.md")))]
_PROGRAM = re.compile(r"^ *make(?= )|(?<![\w`./-])(?:snakemake(?= )|shardwright(?= (?!snakemake|shardwright)[a-z]))")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```|^((?: {4}[^\s*-].*\n)+)", re.M | re.S)
_SHELLS = ("", "sh", "bash", "console")
_INLINE = re.compile(r"`((?:snakemake|make) [^`\n]+)`")


class Told(NamedTuple):
    """A command of a page."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def told(program: str) -> list[Told]:
    """Every call of a program, of all pages, once."""
    found = (Told(str(page.relative_to(ROOT)), words) for page in PAGES for words in _calls(page.read_text()))
    return list({call.words: call for call in found if call.words[0] == program}.values())


def _calls(text: str) -> Iterator[tuple[str, ...]]:
    """The calls in blocks and in code of a text; a line that ends in a backslash goes on, # begins a comment."""
    blocks = [fenced + indented for language, fenced, indented in _BLOCK.findall(text) if language in _SHELLS]
    for line in "\n".join([*blocks, *_INLINE.findall(text)]).replace("\\\n", " ").splitlines():
        if program := _PROGRAM.search(line):
            yield _words(line[program.start() :])


def _words(line: str) -> tuple[str, ...]:
    """The words of a command up to what stands behind it on its line; of several choices a|b the first."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # inside a text in quotes, such as bash -c '...'
        words = line.rstrip("'\"").split()
    ends = [i for i, word in enumerate(words) if word in ("|", "&&", ";", ">", "2>", "&")]
    return tuple(word.split("|")[0] for word in words[: min(ends, default=len(words))])


def rebuilding_rows() -> list[tuple[str, str, str, str]]:
    """The rows of docs/rebuilding.md: what changes, the key, its value, and the rules that run again."""
    return re.findall(r"^\| (.+) \| `(.+?): (.+)` \| (.+) \|$", (ROOT / "docs/rebuilding.md").read_text(), re.M)
