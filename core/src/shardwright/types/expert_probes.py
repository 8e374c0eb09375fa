"""Probes of a layer's experts by themselves, and their measurements."""

from typing import Annotated

from msgspec import Meta

from shardwright.io import Value
from shardwright.types.limits import Bytes, Count, PositiveSeconds, Ranks, Seconds
from shardwright.types.strategy import Recompute

_Times = Annotated[tuple[Seconds, ...], Meta(min_length=1)]


class ExpertProbe(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Experts of one rank that compute rows in isolation, the same number for each expert."""

    type: str
    """The layer's type in the model description of the plans in the same file."""
    experts: Count
    """Experts of the rank."""
    etp_size: Ranks
    """Ranks that share each expert's features out."""
    recompute: Recompute
    """Activations of the layer that are computed again in the backward pass."""
    rows: Count
    """Rows of the rank over all its experts."""


class ExpertMeasurement(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurement of a probe of experts on a rank, while all ranks ran it."""

    probe: ExpertProbe
    """The probe that was run."""
    forward_s: _Times
    """Time of each forward pass."""
    backward_s: _Times
    """Time of each backward pass."""
    activation_bytes: Bytes
    """Resident from the forward to the backward pass."""
    workspace_bytes: Bytes
    """The most that was resident beyond that during a pass."""
    reference_s: PositiveSeconds
    """Time of the reference workload right before."""
