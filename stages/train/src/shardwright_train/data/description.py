"""data.json, and the names of the files in a folder of prepared data."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from shardwright_formats.io import Document, read_document, sha256_of_value

END_OF_TEXT = "<|endoftext|>"
"""The token that ends every document; its number is 0."""


class PreparedData(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """data.json: the source of the tokens, their number and their hashes."""

    FORMAT = "shardwright.data"
    VERSION = 2

    text: str
    """Path of the text, or `python-stdlib`."""
    source: str
    """Source format: text, jsonl, datasets, wikipedia, wikitext or megatron."""
    glob: str
    """Pattern of the files read from the folder."""
    vocab_size: Annotated[int, Meta(ge=1)]
    """Vocabulary size; every token is below it."""
    documents: Annotated[int, Meta(ge=1)]
    """Number of documents."""
    text_bytes: Annotated[int, Meta(ge=0)] | None
    """Bytes of the text before tokenization; None where the source holds tokens."""
    tokens: Annotated[int, Meta(ge=1)]
    """Number of tokens, the one that ends each document included."""
    tokenizer_sha256: str
    """SHA-256 of tokenizer.json."""
    tokens_sha256: str
    """SHA-256 of tokens.bin."""

    @property
    def sha256(self) -> str:
        """Return the identity of the token stream, wherever its text was stored."""
        return sha256_of_value([self.tokenizer_sha256, self.tokens_sha256, self.vocab_size])


class DataFolder:
    """The files of a folder of data: of tokens, or of images."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = folder / "tokenizer.json"
        self.tokens = folder / "tokens.bin"
        self.index = folder / "tokens.idx"
        self.description = folder / "data.json"
        self.images = folder / "images.npy"
        self.unfinished = folder / "unfinished"

    def read_description(self) -> PreparedData:
        """Read data.json; raises BadInput."""
        return read_document(self.description, PreparedData)
