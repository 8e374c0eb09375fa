"""What the launcher tells its ranks, and what rank 0 tells the launcher meanwhile."""

from shardwright_formats.cluster import Cluster
from shardwright_formats.errors import BadInput
from shardwright_formats.files import Document, Value

__all__ = ["CPU", "Progress", "SweepJob", "backend_of"]

CPU = "cpu"
"""The device name of nodes that compute on their processors."""


class SweepJob(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sweep: all its ranks read the same job."""

    FORMAT = "shardwright.sweep_job"

    cluster: Cluster
    rendezvous: str
    """The init_method of torch.distributed: `file://…` on one node, `tcp://HOST:PORT` on several."""
    time_budget_s: float
    min_bytes: int
    max_bytes: int
    out: str


class Progress(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One timed message size; rank 0 writes it as a line of JSON."""

    kind: str
    number: int
    """Which kind of message, from 0."""
    kinds: int
    message_bytes: int
    median_s: float
    repeats: int


def backend_of(cluster: Cluster) -> str:
    """The backend of torch.distributed: gloo among processors, nccl among GPUs; BadInput for a mixture."""
    on_cpu = {cluster.node_types[group.node_type].device == CPU for group in cluster.nodes}
    if len(on_cpu) > 1:
        raise BadInput("--cluster", "nodes with and without GPUs exchange no collectives", "describe them apart")
    return "gloo" if on_cpu.pop() else "nccl"
