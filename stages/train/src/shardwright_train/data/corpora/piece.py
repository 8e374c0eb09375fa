"""What every corpus is read as."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol


class Piece(NamedTuple):
    """Part of a document's text; most documents are one piece, and a long one is never held whole."""

    text: str
    ends: bool
    """Whether the document ends with it."""
    at: int
    """How far the corpus has been read, of its `size`."""


class Corpus(Protocol):
    """Documents in an order that is the same every time."""

    @property
    def size(self) -> int:
        """Where its last piece comes to, in a unit of the corpus: bytes of files, or rows."""

    @property
    def identity(self) -> list[object]:
        """What tells it from another: its files, their sizes and when they were last changed."""

    @property
    def is_wikitext(self) -> bool:
        """Whether the text is marked up as in MediaWiki, and the markup is to be taken out of it."""

    def pieces(self) -> Iterator[Piece]:
        """Its text from the beginning; BadInput naming the place where it is damaged."""
