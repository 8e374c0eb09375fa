"""A folder of prepared data: data.json, a .bin of tokens, and an .idx with the position of each sequence.

Data prepared with `--loss-on completions` also has targets.bin: a byte for each token, 1 if it is learned, 0 if not.

The .idx has one of the two layouts that Megatron has written.

`MMIDIDX`, little-endian: 9 bytes magic, version 1 (uint64), dtype code (uint8), number of sequences and length of the
document list (uint64 each), then each sequence's length in tokens (int32) and first byte in the .bin (int64), then
the document list (int64): the first sequence of each document, closed by the number of sequences.
Source: megatron/core/datasets/indexed_dataset.py of Megatron-LM.

`TNTIDX`, before it: 8 bytes magic, version 1, dtype code, bytes of a token, number of sequences, number of their dims,
length of the document list (uint64 each), then the first dim of each sequence, closed by the number of dims, its first
token in the .bin, closed by the number of tokens, the lengths of the dims, and the document list (int64 each).
Source: megatron/data/indexed_dataset.py of Megatron-LM 2 and 3. It is read, not written.
"""

import shutil
import struct
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from shardwright.io import BadInput, Document, atomic_path, check_regular, read_document, sha256_of_value, system_fault
from shardwright.launch.lock import only_run
from shardwright.launch.nodes import Nodes

_MAGIC, _OLD_MAGIC = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00"
_VERSION = 1
_HEADER, _OLD_HEADER = struct.Struct("<9sQBQQ"), struct.Struct("<8sQQQQQQ")
_DTYPE_OF_CODE = {1: "uint8", 2: "int8", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODE_OF_DTYPE = {np.dtype(dtype): code for code, dtype in _DTYPE_OF_CODE.items()}
_MAX_BYTES = 2**50
_BLOCK = 1 << 16
"""Number of sequences checked at once, which bounds the memory of a check."""
AGAIN = "prepare the data again"


class TokenIndex(NamedTuple):
    """The position of each sequence in a .bin; all arrays are mapped from the .idx, not read."""

    dtype: np.dtype[Any]
    """Dtype of the tokens."""
    lengths: NDArray[Any]
    """Length of each sequence [sequences], in tokens."""
    starts: NDArray[np.int64]
    """Start of each sequence [sequences], in units of `start_unit`."""
    start_unit: int
    """Unit of `starts`: bytes of a token, or 1 if they count tokens."""
    documents: NDArray[np.int64]
    """First sequence of each document, and the number of sequences [documents + 1]."""
    total: int
    """Total number of tokens."""

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""
        return len(self.documents) - 1

    def document_start(self, document: int) -> int:
        """Return the index of a document's first token; for `document` = number of documents, the number of tokens."""
        sequence = int(self.documents[document])
        return self.total if sequence == len(self.starts) else int(self.starts[sequence]) // self.start_unit

    def first_document_from(self, token: int) -> int:
        """Return the first document that begins at or after a token; the number of documents if there is none."""
        return bisect_left(range(self.num_documents), token, key=self.document_start)


def open_index(path: Path) -> TokenIndex:
    """Map an index of either layout into memory and check it; raise BadInput if it is damaged.

    The check reads the file once, some sequences at a time.
    """
    raw = _mapped_bytes(path)
    index = _old_index(path, raw) if raw[:8].tobytes() == _OLD_MAGIC else _index(path, raw)
    total = _checked_total(path, index)
    _check_documents(path, index.documents, len(index.lengths))
    return index._replace(total=total)


def write_index(
    path: Path, lengths: NDArray[Any], dtype: np.dtype[Any], documents: NDArray[np.int64] | None = None
) -> None:
    """Write an index of consecutive sequences atomically; lengths [sequences], in tokens.

    `documents` [documents + 1]: as in `TokenIndex`; None: each sequence is a document. Raises ValueError for a length
    beyond 2^31 - 1.
    """
    if documents is None:
        documents = np.arange(len(lengths) + 1, dtype=np.int64)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, _CODE_OF_DTYPE[dtype], len(lengths), len(documents)))
        for block in _blocks(len(lengths)):
            if lengths[block].max() > np.iinfo(np.int32).max:
                raise ValueError("a document has more than 2^31 - 1 tokens")
            file.write(lengths[block].astype("<i4").tobytes())
        end = 0
        for block in _blocks(len(lengths)):
            ends = end + np.cumsum(lengths[block], dtype=np.int64)
            file.write(((ends - lengths[block]) * dtype.itemsize).astype("<i8").tobytes())
            end = int(ends[-1])
        for block in _blocks(len(documents)):
            file.write(documents[block].astype("<i8").tobytes())


def _blocks(count: int) -> Iterator[slice]:
    return (slice(first, min(first + _BLOCK, count)) for first in range(0, count, _BLOCK))


def _mapped_bytes(path: Path) -> NDArray[np.uint8]:
    check_regular(path, _MAX_BYTES)
    try:
        return np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise system_fault(error, path) from None


def _index(path: Path, raw: NDArray[np.uint8]) -> TokenIndex:
    if raw[: len(_MAGIC)].tobytes() != _MAGIC:
        raise BadInput(path, f"does not begin with {_MAGIC!r}", "pass an index in Megatron's format")
    _, version, code, sequences, listed = _header(path, raw, _HEADER)
    dtype = _dtype(path, version, code)
    _check_size(path, raw, _HEADER.size + 12 * sequences + 8 * listed)
    lengths = np.frombuffer(raw, "<i4", sequences, _HEADER.size)
    starts = np.frombuffer(raw, "<i8", sequences, _HEADER.size + 4 * sequences)
    documents = np.frombuffer(raw, "<i8", listed, _HEADER.size + 12 * sequences)
    return TokenIndex(dtype, lengths, starts, dtype.itemsize, documents, 0)


def _old_index(path: Path, raw: NDArray[np.uint8]) -> TokenIndex:
    _, version, code, itemsize, sequences, dims, listed = _header(path, raw, _OLD_HEADER)
    dtype = _dtype(path, version, code)
    if itemsize != dtype.itemsize or dims != sequences:
        raise BadInput(path, f"{dims} dims of {itemsize} bytes for {sequences} sequences of {dtype} tokens", AGAIN)
    _check_size(path, raw, _OLD_HEADER.size + 8 * (2 * (sequences + 1) + sequences + listed))
    at = _OLD_HEADER.size + 8 * (sequences + 1)
    starts = np.frombuffer(raw, "<i8", sequences, at)
    lengths = np.frombuffer(raw, "<i8", sequences, at + 8 * (sequences + 1))
    documents = np.frombuffer(raw, "<i8", listed, at + 8 * (2 * sequences + 1))
    return TokenIndex(dtype, lengths, starts, 1, documents, 0)


def _header(path: Path, raw: NDArray[np.uint8], header: struct.Struct) -> tuple[Any, ...]:
    if len(raw) < header.size:
        raise BadInput(path, "ends inside its header", AGAIN)
    return header.unpack(raw[: header.size].tobytes())


def _dtype(path: Path, version: int, code: int) -> np.dtype[Any]:
    if version != _VERSION:
        raise BadInput(path, f"version {version} is unknown here, only {_VERSION} is read", AGAIN)
    if code not in _DTYPE_OF_CODE:
        raise BadInput(path, f"dtype code {code} is not an integer type", AGAIN)
    return np.dtype(_DTYPE_OF_CODE[code])


def _check_size(path: Path, raw: NDArray[np.uint8], expected: int) -> None:
    if len(raw) != expected:
        raise BadInput(path, f"has {len(raw)} bytes, but its header announces {expected}", AGAIN)


def _checked_total(path: Path, index: TokenIndex) -> int:
    """Return the number of tokens of all sequences; raise BadInput unless each begins where the previous one ends."""
    total = 0
    for block in _blocks(len(index.lengths)):
        lengths = index.lengths[block]
        ends = total + np.cumsum(lengths, dtype=np.int64)
        if (lengths < 0).any() or (index.starts[block] != (ends - lengths) * index.start_unit).any():
            raise BadInput(path, "the sequences do not follow one another", AGAIN)
        total = int(ends[-1])
    return total


def _check_documents(path: Path, documents: NDArray[np.int64], sequences: int) -> None:
    ordered = len(documents) > 0 and documents[0] == 0 and documents[-1] == sequences
    ordered = ordered and all(
        (np.diff(documents[max(0, block.start - 1) : block.stop]) >= 0).all() for block in _blocks(len(documents))
    )
    if not ordered:
        raise BadInput(path, "the documents do not cover the sequences", AGAIN)


@dataclass(frozen=True)
class TokenFile:
    """A token file and its index, opened."""

    tokens: NDArray[Any]
    """Tokens [tokens], mapped from the .bin, not read."""
    index: TokenIndex


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype for writing tokens: uint16 if every token fits, else int32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<i4")


def read_tokens(bin_path: Path, index_path: Path) -> TokenFile:
    """Map a token file into memory.

    Raises BadInput naming the one of the two files that is damaged, or does not belong to the other.
    """
    index = open_index(index_path)
    return TokenFile(_mapped(bin_path, index_path, index.dtype, index.total), index)


def _mapped(path: Path, index_path: Path, dtype: np.dtype[Any], total: int) -> NDArray[Any]:
    try:
        size = path.stat().st_size
        if size != total * dtype.itemsize:
            raise BadInput(path, f"has {size} bytes, but {index_path.name} announces {total * dtype.itemsize}", AGAIN)
        # An empty file cannot be mapped.
        return np.memmap(path, dtype, mode="r") if total else np.empty(0, dtype)
    except OSError as error:
        raise BadInput(path, error.strerror or str(error), "check the path") from None


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
    """Bytes of the text before tokenization; None if the source contains tokens."""
    tokens: Annotated[int, Meta(ge=1)]
    """Number of tokens, including the one that ends each document."""
    tokenizer_sha256: str
    """SHA-256 of tokenizer.json."""
    tokens_sha256: str
    """SHA-256 of tokens.bin."""
    tokens_before: tuple[int, ...] | None = None
    """Tokens before each document; None: unknown, or, for text that an earlier version prepared, none."""
    tokens_after: tuple[int, ...] | None = None
    """Tokens after each document, including its end token; None: unknown, or only the end token."""
    targets: Annotated[int, Meta(ge=0)] | None = None
    """Number of tokens that are learned, as targets.bin marks them; None: there are no marks."""
    targets_sha256: str | None = None
    """SHA-256 of targets.bin."""

    @property
    def sha256(self) -> str:
        """A hash of the token stream, independent of where its text was stored."""
        return sha256_of_value([self.tokenizer_sha256, self.tokens_sha256, self.vocab_size])


class DataFolder:
    """The files in a folder of data: tokens, images, or texts with images or recordings."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = folder / "tokenizer.json"
        self.settings = folder / "tokenizer_config.json"
        self.tokens = folder / "tokens.bin"
        self.index = folder / "tokens.idx"
        self.targets = folder / "targets.bin"
        self.description = folder / "data.json"
        self.arrays = folder / "images.npy", folder / "features.npy"
        self.unfinished = folder / "unfinished"

    def read_description(self) -> PreparedData:
        """Return the contents of data.json; raise BadInput if it is missing or malformed."""
        return read_document(self.description, PreparedData)


@contextmanager
def only_writer(out: Path) -> Iterator[None]:
    """Hold the lock of a folder while it is prepared; on bad input, remove unfinished files and a new folder."""
    is_new = not out.exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    with only_run(out.with_name(f"{out.name}.lock"), Nodes()):
        try:
            yield
        except BadInput:
            shutil.rmtree(DataFolder(out).unfinished, ignore_errors=True)
            if is_new and out.is_dir():
                out.rmdir()
            raise
