"""A dump of Wikipedia, `.xml.bz2` or `.xml`: each article is a document."""

import bz2
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from xml.etree.ElementTree import Element, ParseError, iterparse

from shardwright_formats.io import BadInput
from shardwright_train.data.corpora.files import Files
from shardwright_train.data.corpora.piece import Piece

_ARTICLES = "0"
"""The namespace of articles; the others are talk, templates, users and the like."""
_MAX_PAGE_BYTES = 1 << 25
"""Largest size of a page with its head, in bytes; Wikipedia allows texts of 2 MiB."""


@dataclass(frozen=True)
class WikipediaDump:
    """The articles of dumps; redirects are left out."""

    files: Files
    is_wikitext: bool
    """Whether markup is removed; if not, each document is the wikitext as written."""

    @property
    def size(self) -> int:
        """Return the bytes of the files as stored, compressed or not."""
        return self.files.size

    @property
    def identity(self) -> list[object]:
        """Return the files, and whether markup is removed."""
        return [self.is_wikitext, *self.files.identity]

    def pieces(self) -> Iterator[Piece]:
        """Yield the wikitext of each article; raise BadInput where a dump is damaged."""
        at = 0
        for path in self.files.paths:
            with path.open("rb") as raw:
                for text in _articles(path, raw):
                    yield Piece(text, True, at + raw.tell())
            at += path.stat().st_size


class _PageReader:
    """A reader of a dump that limits the size of a page: a few compressed KB can unpack to a GiB."""

    def __init__(self, path: Path, raw: IO[bytes]) -> None:
        self._path, self._file = path, bz2.BZ2File(raw) if path.suffix == ".bz2" else raw
        self.pages, self._of_page = 0, 0

    def read(self, size: int = -1, /) -> bytes:
        """Read the next bytes; raise BadInput where their page is too long."""
        content = self._file.read(size)
        self._of_page += len(content)
        if self._of_page > _MAX_PAGE_BYTES:
            what = f"page {self.pages + 1} is longer than {_MAX_PAGE_BYTES >> 20} MiB"
            raise BadInput(self._path, what, "leave it out")
        return content

    def end_page(self) -> None:
        """Mark the end of a page, so that the next one is counted anew."""
        self.pages, self._of_page = self.pages + 1, 0


def _articles(path: Path, raw: IO[bytes]) -> Iterator[str]:
    file = _PageReader(path, raw)
    try:
        root: Element | None = None
        for event, element in iterparse(file, events=("start", "end")):
            if root is None:
                root = element
            if event == "end" and _name(element) == "page":
                file.end_page()
                if text := _article(element):
                    yield text
                root.clear()  # what has been read is let go
    except (ParseError, EOFError, OSError, ValueError) as error:
        raise BadInput(path, f"is damaged behind page {file.pages} ({error})", "fetch it again") from None


def _article(page: Element) -> str:
    parts = {_name(element): element for element in page.iter()}
    if "redirect" in parts or "ns" not in parts or parts["ns"].text != _ARTICLES or "text" not in parts:
        return ""
    return parts["text"].text or ""


def _name(element: Element) -> str:
    """Return a tag without its namespace, which is the version of the dump's format."""
    return element.tag.rpartition("}")[2]
