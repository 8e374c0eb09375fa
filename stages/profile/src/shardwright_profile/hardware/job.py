"""What the launcher tells its ranks, and what rank 0 tells the launcher meanwhile."""

from typing import Annotated

from msgspec import Meta

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.json import Document, Value
from shardwright_formats.types.cluster import Cluster

__all__ = ["CPU", "Progress", "Remark", "SweepIdentity", "SweepJob", "backend_of"]

CPU = "cpu"
"""The device name of nodes that compute on their processors."""


class SweepIdentity(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must be the same for a killed sweep to be continued."""

    cluster: Cluster
    backend: str
    min_bytes: int
    max_bytes: int
    max_repeats: Annotated[int, Meta(ge=1)]
    versions: str
    """Of the software and the device's driver that measure."""


class SweepJob(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sweep: all its ranks read the same job."""

    FORMAT = "shardwright.sweep_job"

    identity: SweepIdentity
    rendezvous: str
    """The init_method of torch.distributed: `file://…` on one node, `tcp://HOST:PORT` on several."""
    time_budget_s: float
    started_s: float
    """When the ranks of this node were started, on its monotonic clock."""
    out: str


class Progress(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="progress"):
    """Something was measured; rank 0 writes it as a line of JSON."""

    step: int
    """Which step of the sweep, from 0."""
    steps: int
    words: str


class Remark(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="remark"):
    """A sentence for the user; rank 0 writes it as a line of JSON."""

    words: str


def backend_of(cluster: Cluster) -> str:
    """The backend of torch.distributed: gloo among processors, nccl among GPUs; BadInput for a mixture."""
    on_cpu = {cluster.node_types[group.node_type].device == CPU for group in cluster.nodes}
    if len(on_cpu) > 1:
        raise BadInput("--cluster", "nodes with and without GPUs exchange no collectives", "describe them apart")
    return "gloo" if on_cpu.pop() else "nccl"
