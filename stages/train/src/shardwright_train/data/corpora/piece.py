"""The interface of all corpora: documents read piece by piece."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol


class Piece(NamedTuple):
    """A part of a document's text; most documents are one piece, and a long one is never held as a whole."""

    text: str
    ends: bool
    """Whether the document ends with this piece."""
    at: int
    """Position in the corpus after this piece, in the unit of `Corpus.size`."""


class Corpus(Protocol):
    """A sequence of documents in an order that never changes."""

    @property
    def size(self) -> int:
        """Return the position after the last piece, in the corpus' unit: bytes of files, or rows."""

    @property
    def identity(self) -> list[object]:
        """Return the properties that identify the corpus: its files, their sizes and modification times."""

    @property
    def is_wikitext(self) -> bool:
        """Return whether the text has MediaWiki markup that must be removed."""

    def pieces(self) -> Iterator[Piece]:
        """Yield the text from the beginning; raise BadInput with the place where it is damaged."""
