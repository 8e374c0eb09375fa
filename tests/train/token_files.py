"""Token files as tests write them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright_train.data.tokens import token_dtype, write_index


def write_tokens(bin_path: Path, index_path: Path, documents: Iterable[NDArray[Any]], vocab_size: int) -> None:
    """Write documents of one sequence each, in the dtype that `prepare` takes for a vocabulary."""
    dtype, arrays = token_dtype(vocab_size), list(documents)
    bin_path.parent.mkdir(parents=True, exist_ok=True)
    bin_path.write_bytes(b"".join(array.astype(dtype).tobytes() for array in arrays))
    write_index(index_path, np.array([len(array) for array in arrays], np.int64), dtype)
