"""Facts of attention whose queries, keys and values come from latents of few features (DeepSeek-AI 2024)."""

from typing import NamedTuple

VALUES = "value_head_dim"
"""The key under which a family's `implied` gives the features of a value head, where they are others than a key's."""


class Latents(NamedTuple):
    """The features of latents, from which each head has its queries, keys and values."""

    queries: int | None
    """Those of queries, which a norm takes in; None: queries come from the hidden states."""
    keys: int
    """Those of keys and values, which a norm takes in."""
    rotated: int
    """Features of keys that are rotated, and that all heads share."""
