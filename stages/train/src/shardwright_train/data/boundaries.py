"""The treatment of document boundaries within a sample."""

from typing import NamedTuple

DOCUMENTS, POSITIONS = "documents", "positions"
"""Keys of the tensors [samples, positions] of a batch that hold each position's document and its number in it."""


class Boundaries(NamedTuple):
    """The treatment of document boundaries in a sample, with Megatron-LM's names for the settings."""

    reset_attention_mask: bool = False
    """Whether attention and prediction stay within each document."""
    reset_position_ids: bool = False
    """Whether positions are numbered from 0 in each document."""


ACROSS = Boundaries()
"""Boundaries that are ignored: a sample is one text, whatever its documents."""
