"""An offers file: what nodes there are to rent."""

from typing import Annotated

import msgspec
from msgspec import Meta

from shardwright_formats.io import Document, Value
from shardwright_formats.types import NonNegativeCount, NonNegativeNumber, Seconds


class Offer(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of one type."""

    usd_per_hour: NonNegativeNumber | None = None
    """Price of one node; null: that of the cluster file."""
    counts: Annotated[tuple[NonNegativeCount, ...], Meta(min_length=1)] | None = None
    """How many can be had; null: any number up to the cluster file's, and none."""
    interruptions_per_hour: NonNegativeNumber = 0.0
    """How often one node is taken away, on average; 0: never, as on demand."""


class Offers(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An offers file: what the cluster file does not say of the nodes that can be rented."""

    FORMAT = "shardwright.offers"

    node_types: dict[str, Offer] = msgspec.field(default_factory=dict)
    """By name of the cluster's node types; one that is left out is as the cluster file has it."""
    checkpoint_s: Seconds | None = None
    """What saving a checkpoint adds to the run; needed where nodes are interrupted."""
    restart_s: Seconds | None = None
    """From an interruption to the first step after it: a new node, the start, the checkpoint's load."""

    def __post_init__(self) -> None:
        risky = any(offer.interruptions_per_hour > 0 for offer in self.node_types.values())
        if risky and (self.checkpoint_s is None or self.restart_s is None):
            raise ValueError("interruptions_per_hour above 0 needs checkpoint_s and restart_s")
