"""The parts of a layer: the tensors between layers, where tensor parallelism communicates, attention and experts."""

from typing import Literal

from msgspec import UNSET, UnsetType

from shardwright.io import Value
from shardwright.types.limits import Length, Tokens


class BoundaryTensor(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor [batch, sequence_length, features] that a layer passes to the next, also between pipeline stages."""

    name: str
    """Name that the runtime gives it."""
    sequence_length: Tokens
    """Positions per sample."""
    features: Length
    """Elements per position."""


class Heads(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The attention heads of a region; Ulysses exchanges positions for heads."""

    queries: str
    """The boundary tensor whose positions attend."""
    keys: str
    """The boundary tensor whose positions are attended to."""
    heads: Length
    """Query heads."""
    kv_heads: Length
    """Key and value heads."""
    head_features: Length
    """Features of one head."""
    value_features: Length | None = None
    """Features of one value head; null: as many as a query head's."""
    window: Length | None = None
    """Number of positions to which each attends, itself the last (an encoder as many after it), below the samples'
    length; null: all."""
    alibi: bool = False
    """True if scores fall with the distance of positions, at a slope for each head (Press et al. 2022)."""
    sinks: bool = False
    """True if the softmax has a further score of each head, which weighs nothing (Xiao et al. 2024)."""

    @property
    def features_of_values(self) -> int:
        """Return the features of one value head, which are also a head's output features."""
        return self.value_features or self.head_features


class Region(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stretch of a layer in which tensor-parallel ranks hold different features (Shoeybi et al. 2019)."""

    name: Literal["attention", "mlp", "lookup", "logits"]
    """Part of the layer that it is of: `recompute` names the first two."""
    enters: tuple[str, ...] = ()
    """Boundary tensors whose whole sequence the region's matrices take in."""
    leaves: str | None = None
    """The boundary tensor with the shape of the sum over the ranks; null for the head, where only numbers are
    summed."""
    replays_sum: tuple[Literal["full", "attention", "mlp"], ...] = ()
    """The kinds of recomputation that repeat that sum even at their end, because something after it is kept."""
    attention: Heads | None = None
    """The attention inside."""


class Experts(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The experts of a layer: feed-forward networks, some of which a router chooses for each position."""

    number: Length
    """Experts of the layer."""
    top_k: Length
    """Experts that compute each position."""
    features: Length
    """Features between the matrices of one expert."""
    shared_features: Length | UnsetType = UNSET
    """Hidden features of the experts that compute every position; omitted if there are none."""

    def __post_init__(self) -> None:
        if self.top_k > self.number:
            raise ValueError(f"top_k {self.top_k} exceeds the number of experts, {self.number}")
