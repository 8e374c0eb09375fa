"""What is asked of a sweep."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from shardwright_formats.types.limits import Count, PositiveSeconds
from shardwright_launch.options import NodeOptions

__all__ = ["HardwareOptions"]

_MessageBytes = Annotated[int, Meta(ge=4, le=2**50)]


class HardwareOptions(NodeOptions, frozen=True, kw_only=True):
    """Time messages and devices, and how they slow each other down: gloo among devices named `cpu`, else NCCL.

    Starts one process per device of this node. All groups of one size work at the same time, as in training. Messages
    grow fourfold, at least to 1 MiB, and as far as the time budget allows; each is repeated until its median is known
    to within 3 %, its share of the time is spent, or --max-repeats is reached. A sweep that was killed goes on when the
    same command is run again: what it has measured lies in OUT.journal until OUT is written.
    """

    cluster: Path
    """The cluster, JSON (shardwright.cluster)."""
    time_budget: PositiveSeconds
    """Time for the sweep, start-up apart, in seconds."""
    out: Path
    """The hardware profile to write, HDF5; node 0 writes it."""
    min_bytes: _MessageBytes = 1024
    """Smallest message, in bytes."""
    max_bytes: _MessageBytes = 256 * 1024**2
    """Largest message, if time allows, in bytes."""
    max_repeats: Count = 100
    """Most repeats of each message, a number."""
