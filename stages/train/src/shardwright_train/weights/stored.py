"""Tensors of safetensors files, as their headers say."""

from pathlib import Path
from typing import NamedTuple


class Stored(NamedTuple):
    """A tensor of a file, or some rows of one, as the file's header says; `dtype` in the words of safetensors."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    first: int = 0
    """Number of its first row in the file's tensor."""
