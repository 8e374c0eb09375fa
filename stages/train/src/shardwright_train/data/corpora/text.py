"""Plain text in UTF-8: each file is a document."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardwright_formats.io import BadInput
from shardwright_train.data.corpora.files import Files
from shardwright_train.data.corpora.piece import Piece

_PIECE_BYTES = 1 << 20
"""Bytes of a piece of a longer file, extended to the end of a line that no space follows: there, tokenizers that
split words as GPT-2's does give the same tokens as for the whole text."""
_LINE_END = re.compile(rb"\n(?=\S)")


@dataclass(frozen=True)
class TextFiles:
    """Text files; the one that exceeds `most_bytes` is cut at the end of a line, and those after it are left out."""

    files: Files
    most_bytes: int | None
    piece_bytes: int = _PIECE_BYTES
    is_wikitext: bool = False

    @property
    def size(self) -> int:
        """Return the number of bytes that are read."""
        return self.files.size if self.most_bytes is None else min(self.files.size, self.most_bytes)

    @property
    def identity(self) -> list[object]:
        """Return the files, and how many bytes of them are read."""
        return [self.most_bytes, *self.files.identity]

    def pieces(self) -> Iterator[Piece]:
        """Yield each file's text; raise BadInput where it is not UTF-8."""
        at = 0
        for path in self.files.paths:
            size = path.stat().st_size
            room = size if self.most_bytes is None else self.most_bytes - at
            taken = size if size <= room else _last_line_end(path, room)
            yield from _pieces_of(path, taken, at, self.piece_bytes)
            at += taken
            if taken < size:
                return


def _pieces_of(path: Path, size: int, at: int, piece_bytes: int) -> Iterator[Piece]:
    with path.open("rb") as file:
        done, rest = 0, b""
        while done < size:
            content = rest + file.read(min(piece_bytes, size - done - len(rest)))
            if len(content) < piece_bytes and done + len(content) < size:
                raise BadInput(path, "became shorter while it was read", "leave it alone, and prepare again")
            cut = len(content) if done + len(content) == size else _cut(content)
            yield Piece(_decoded(path, content[:cut], done), done + cut == size, at + done + cut)
            done, rest = done + cut, content[cut:]


def _cut(content: bytes) -> int:
    """Return where a piece of a longer text may end: after a line, a word, or else a character."""
    lines = [found.end() for found in _LINE_END.finditer(content, len(content) // 2)]
    if lines or (word := content.rfind(b" ")) < 1:
        return lines[-1] if lines else _last_character(content)
    return word


def _last_character(content: bytes) -> int:
    """Return the end of the last whole character."""
    starts = (place for place in range(len(content) - 1, max(0, len(content) - 5), -1) if content[place] & 0xC0 != 0x80)
    return next(starts, len(content))


def _decoded(path: Path, content: bytes, done: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        what = f"not UTF-8 ({error.reason} at byte {done + error.start})"
        raise BadInput(path, what, "convert it, or narrow --glob") from None


def _last_line_end(path: Path, most_bytes: int) -> int:
    """Return the length of the file's whole lines within a number of bytes."""
    with path.open("rb") as file:
        end = most_bytes
        while end > 0:
            begin = max(0, end - _PIECE_BYTES)
            file.seek(begin)
            found = _whole_lines(file, end - begin)
            if found:
                return begin + found
            end = begin
    return 0


def _whole_lines(file: BinaryIO, count: int) -> int:
    return file.read(count).rfind(b"\n") + 1
