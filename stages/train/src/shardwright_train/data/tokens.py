"""Token files in Megatron's indexed format: a .bin of tokens and an .idx of where each sequence lies.

The .idx, little-endian: 9 bytes magic, version 1 (uint64), dtype code (uint8), number of sequences and length of the
document list (uint64 each), then each sequence's length in tokens (int32) and first byte in the .bin (int64), then
the document list (int64): the first sequence of each document, closed by the number of sequences.
Source: megatron/core/datasets/indexed_dataset.py of Megatron-LM.
"""

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.json import atomic_path, write_bytes

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPE_OF_CODE = {1: "uint8", 2: "int8", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODE_OF_DTYPE = {np.dtype(dtype): code for code, dtype in _DTYPE_OF_CODE.items()}
_AGAIN = "prepare the data again"


class TokenFile(NamedTuple):
    """An opened pair of files.

    `tokens`: [all tokens], mapped from the .bin, not read. `lengths`: [sequences], in tokens. `documents`: [documents
    + 1], the first sequence of each and the number of sequences.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    documents: NDArray[np.int64]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype tokens are written in: uint16 where every token fits, else int32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<i4")


def write_tokens(bin_path: Path, index_path: Path, documents: Iterable[NDArray[Any]], vocab_size: int) -> int:
    """Write documents of one sequence each, atomically, the index last; returns the number of tokens.

    Raises ValueError for a token that is not in [0, vocab_size).
    """
    dtype = token_dtype(vocab_size)
    lengths: list[int] = []
    with atomic_path(bin_path) as temporary:
        with temporary.open("wb") as file:
            for document in documents:
                if document.size and not 0 <= document.min() <= document.max() < vocab_size:
                    raise ValueError(f"document {len(lengths)} has a token that is not in [0, {vocab_size})")
                file.write(document.astype(dtype).tobytes())
                lengths.append(len(document))
        write_bytes(index_path, _index(np.array(lengths, "<i8"), dtype))
    return sum(lengths)


def read_tokens(bin_path: Path, index_path: Path) -> TokenFile:
    """Map a token file into memory.

    Raises BadInput naming the file of the two that is damaged, or does not belong to the other.
    """
    raw = _bytes_of(index_path)
    dtype, sequences, listed = _check_header(index_path, raw)
    expected = _HEADER.size + 12 * sequences + 8 * listed
    if len(raw) != expected:
        raise BadInput(index_path, f"has {len(raw)} bytes, {expected} were announced", _AGAIN)
    lengths = np.frombuffer(raw, "<i4", sequences, _HEADER.size)
    pointers = np.frombuffer(raw, "<i8", sequences, _HEADER.size + 4 * sequences)
    documents = np.frombuffer(raw, "<i8", listed, _HEADER.size + 12 * sequences)
    ends = np.cumsum(lengths, dtype=np.int64)
    if (lengths < 0).any() or (pointers != (ends - lengths) * dtype.itemsize).any():
        raise BadInput(index_path, "the sequences do not follow one another", _AGAIN)
    if listed == 0 or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise BadInput(index_path, "the documents do not cover the sequences", _AGAIN)
    total = int(ends[-1]) if sequences else 0
    return TokenFile(_mapped(bin_path, index_path, dtype, total), lengths, documents)


def _index(lengths: NDArray[np.int64], dtype: np.dtype[Any]) -> bytes:
    if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
        raise ValueError("a document has more than 2^31 - 1 tokens")
    pointers = (np.cumsum(lengths) - lengths) * dtype.itemsize
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    header = _HEADER.pack(_MAGIC, _VERSION, _CODE_OF_DTYPE[dtype], len(lengths), len(documents))
    return header + lengths.astype("<i4").tobytes() + pointers.astype("<i8").tobytes() + documents.tobytes()


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(path, error.strerror or str(error), "check the path") from None


def _check_header(path: Path, raw: bytes) -> tuple[np.dtype[Any], int, int]:
    if not raw.startswith(_MAGIC):
        raise BadInput(path, f"does not begin with {_MAGIC!r}", "pass an index in Megatron's format")
    if len(raw) < _HEADER.size:
        raise BadInput(path, "ends inside its header", _AGAIN)
    _, version, code, sequences, listed = _HEADER.unpack_from(raw)
    if version != _VERSION:
        raise BadInput(path, f"version {version} is unknown here, only {_VERSION} is read", _AGAIN)
    if code not in _DTYPE_OF_CODE:
        raise BadInput(path, f"dtype code {code} is none of integers", _AGAIN)
    return np.dtype(_DTYPE_OF_CODE[code]), sequences, listed


def _mapped(path: Path, index_path: Path, dtype: np.dtype[Any], total: int) -> NDArray[Any]:
    try:
        size = path.stat().st_size
        if size != total * dtype.itemsize:
            raise BadInput(path, f"has {size} bytes, {index_path.name} announces {total * dtype.itemsize}", _AGAIN)
        # An empty file cannot be mapped.
        return np.memmap(path, dtype, mode="r") if total else np.empty(0, dtype)
    except OSError as error:
        raise BadInput(path, error.strerror or str(error), "check the path") from None
