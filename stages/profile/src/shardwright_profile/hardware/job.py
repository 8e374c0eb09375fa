"""What the launcher hands its ranks, and what rank 0 tells the launcher meanwhile."""

from typing import Annotated

from msgspec import Meta

from shardwright_formats.io.json import Document, Value
from shardwright_formats.types.cluster import Cluster
from shardwright_profile.hardware.sweep_plan import SizeRange


class SweepIdentity(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must be the same for a killed sweep to be continued."""

    cluster: Cluster
    backend: str
    min_bytes: int
    max_bytes: int
    max_repeats: Annotated[int, Meta(ge=1)]
    versions: str
    """Of the software and the device's driver that measure."""

    @property
    def sizes(self) -> SizeRange:
        """Which sizes messages have."""
        return SizeRange(self.min_bytes, self.max_bytes)


class SweepJob(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sweep: all its ranks read the same job."""

    FORMAT = "shardwright.sweep_job"

    identity: SweepIdentity
    time_budget_s: float
    started_s: float
    """When the ranks of this node were started, on its monotonic clock."""
    out: str


class Progress(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="progress"):
    """Something was measured; rank 0 writes it as a line of JSON."""

    step: int
    """Which step of the sweep, from 0."""
    steps: int
    text: str


class Remark(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="remark"):
    """A sentence for the user; rank 0 writes it as a line of JSON."""

    text: str
