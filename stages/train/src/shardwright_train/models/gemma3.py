"""The language model of Gemma 3 (Gemma team 2025)."""

from torch import Tensor, nn

from shardwright_formats.types.model import base_type
from shardwright_train.models.gemma2 import Gemma2


class Gemma3(Gemma2):
    """Gemma 2 whose types of block turn by angles of their own."""

    def angles(self, rotary: nn.Module, kind: str, example: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Return the cosines and sines of a type of block."""
        angles: tuple[Tensor, ...] = rotary(example, positions, base_type(kind))
        return angles
