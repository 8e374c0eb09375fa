"""Whether documents in one sample are told of one another."""

from typing import NamedTuple

DOCUMENTS, POSITIONS = "documents", "positions"
"""The tensors of a batch [samples, positions] that say which document each position is of, and its number in it."""


class Boundaries(NamedTuple):
    """What is done where documents meet in a sample; Megatron-LM's settings of these names."""

    reset_attention_mask: bool = False
    """Each position attends to its own document alone, and no token is predicted from another document."""
    reset_position_ids: bool = False
    """Positions are numbered from 0 in each document."""


ACROSS = Boundaries()
"""A sample is one text, whatever documents it is of."""
