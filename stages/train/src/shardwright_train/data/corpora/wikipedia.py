"""A dump of Wikipedia, `.xml.bz2` or `.xml`: each article is a document."""

import bz2
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from xml.etree.ElementTree import Element, ParseError, iterparse

from shardwright_formats.io.errors import BadInput
from shardwright_train.data.corpora.files import Files
from shardwright_train.data.corpora.piece import Piece

_ARTICLES = "0"
"""The namespace of articles; the others are talk, templates, users and the like."""


@dataclass(frozen=True)
class WikipediaDump:
    """The articles of dumps; redirects are left out."""

    files: Files
    is_wikitext: bool
    """Whether markup is taken out of the text; else the wikitext is the document as it was written."""

    @property
    def size(self) -> int:
        """Bytes of the files, compressed as they are."""
        return self.files.size

    @property
    def identity(self) -> list[object]:
        """The files, and whether markup is taken out."""
        return [self.is_wikitext, *self.files.identity]

    def pieces(self) -> Iterator[Piece]:
        """The wikitext of each article; BadInput where a dump is damaged."""
        at = 0
        for path in self.files.paths:
            with path.open("rb") as raw:
                for text in _articles(path, raw):
                    yield Piece(text, True, at + raw.tell())
            at += path.stat().st_size


def _articles(path: Path, raw: IO[bytes]) -> Iterator[str]:
    file = bz2.BZ2File(raw) if path.suffix == ".bz2" else raw
    count = 0
    try:
        root: Element | None = None
        for event, element in iterparse(file, events=("start", "end")):
            if root is None:
                root = element
            if event == "end" and _name(element) == "page":
                count += 1
                if text := _article(element):
                    yield text
                root.clear()  # what has been read is let go
    except (ParseError, EOFError, OSError, ValueError) as error:
        raise BadInput(path, f"is damaged behind page {count} ({error})", "fetch it again") from None


def _article(page: Element) -> str:
    parts = {_name(element): element for element in page.iter()}
    if "redirect" in parts or "ns" not in parts or parts["ns"].text != _ARTICLES or "text" not in parts:
        return ""
    return parts["text"].text or ""


def _name(element: Element) -> str:
    """A tag without the version of the dump's format, which is its namespace."""
    return element.tag.rpartition("}")[2]
