"""How rows are sent to the ranks of their experts."""

from enum import StrEnum


class Dispatcher(StrEnum):
    """How rows are sent to the ranks of their experts."""

    ALL_TO_ALL = "all-to-all"
    """One message for each pair of a position and an expert of its choice."""
    PER_NODE = "per-node"
    """One message for each other node or NVLink domain, and from there one for each rank, as DeepEP and HybridEP."""
