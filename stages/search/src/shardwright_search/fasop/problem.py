"""What FASOP's estimate of a model on a cluster is made of: arrays, whatever they were read from."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import msgspec
from numpy.typing import NDArray

BYTES = 2
"""Of one number that is sent or reduced: FASOP's 16 bits."""


class LayerKind(IntEnum):
    """What FASOP's memory formula tells apart."""

    EMBEDDING = 0
    BLOCK = 1
    HEAD = 2


class NodeCosts(msgspec.Struct, frozen=True, kw_only=True):
    """One type of node; rates in bytes/s, infinite where there is no such link."""

    name: str
    limit_gib: float
    """What may be used of one device."""
    usd_per_hour: float | None
    """Of one node; null where no price is known."""
    send_inside: float
    """Of a message between two devices of a node."""
    send_between: float
    """Of all messages that leave a node together."""
    reduce_inside: float
    """Of the ring of an all-reduce inside a node; `reduce_between` likewise."""
    reduce_between: float
    shares_inside: bool = False
    """Whether several rings inside a node share one bus, as over PCIe."""


class Problem(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A model, a batch and the node types; arrays are over all layers, embedding and head included."""

    node_types: tuple[NodeCosts, ...]
    devices_per_node: int
    """Of every type."""
    batch: int
    """Samples of a step."""
    max_pp_size: int
    """Number of blocks."""
    kinds: tuple[LayerKind, ...]
    layer_ps: Mapping[tuple[str, int, int], NDArray[Any]]
    """Forward and backward of one microbatch in picoseconds, by node type, tp_size and micro-batch size."""
    parameters: Mapping[int, NDArray[Any]]
    """What a rank holds of each layer, by tp_size."""
    reduced: Mapping[int, NDArray[Any]]
    """Of these what data-parallel ranks reduce; FASOP counts a little more."""
    tied: int
    """Parameters of the embedding that first and last stage keep equal; 0 where nothing is tied."""
    outer_once: bool
    """Whether embedding and head are one parameter, reduced once where a stage has both."""
    hidden: int
    sequence_length: int
    vocabulary: int
    heads: int

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """What layers are known at."""
        return tuple(sorted(self.parameters))
