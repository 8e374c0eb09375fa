"""Token files in Megatron's indexed format: a .bin of tokens and an .idx of where each sequence lies."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright_formats.io import BadInput, atomic_path
from shardwright_train.data.token_index import AGAIN, TokenIndex, open_index, write_index


@dataclass(frozen=True)
class TokenFile:
    """An opened pair of files."""

    tokens: NDArray[Any]
    """Tokens [tokens], mapped from the .bin, not read."""
    index: TokenIndex


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype that tokens are written in: uint16 where every token fits, else int32."""
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
        write_index(index_path, np.array(lengths, np.int64), dtype)
    return sum(lengths)


def read_tokens(bin_path: Path, index_path: Path) -> TokenFile:
    """Map a token file into memory.

    Raises BadInput naming the file of the two that is damaged, or does not belong to the other.
    """
    index = open_index(index_path)
    return TokenFile(_mapped(bin_path, index_path, index.dtype, index.total), index)


def _mapped(path: Path, index_path: Path, dtype: np.dtype[Any], total: int) -> NDArray[Any]:
    try:
        size = path.stat().st_size
        if size != total * dtype.itemsize:
            raise BadInput(path, f"has {size} bytes, {index_path.name} announces {total * dtype.itemsize}", AGAIN)
        # An empty file cannot be mapped.
        return np.memmap(path, dtype, mode="r") if total else np.empty(0, dtype)
    except OSError as error:
        raise BadInput(path, error.strerror or str(error), "check the path") from None
