"""The command `hardware`: validate, start the ranks of this node, and let rank 0 write the profile."""

import importlib.util
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from shardwright_formats.io.errors import BadInput, RunFailed
from shardwright_formats.io.json import read_document, write_document
from shardwright_formats.io.versions import versions_text
from shardwright_formats.types.cluster import Cluster
from shardwright_profile.hardware.job import CPU, SweepIdentity, SweepJob, backend_of
from shardwright_profile.hardware.journal import journal_path, read_journal
from shardwright_profile.hardware.launch import run_ranks
from shardwright_profile.hardware.progress import shown_progress
from shardwright_profile.hardware.slurm import rendezvous_of_step

__all__ = ["SweepRequest", "start_sweep"]

_WORKER = "shardwright_profile.hardware.worker"


class SweepRequest(NamedTuple):
    """What is asked of a sweep, as on the command line."""

    cluster: Path
    time_budget_s: float
    min_bytes: int
    max_bytes: int
    nnodes: int
    node_rank: int
    rendezvous: str | None
    """HOST:PORT where the nodes meet; None on one node, and where Slurm says it."""
    out: Path
    max_repeats: int = 100


def start_sweep(request: SweepRequest) -> None:
    """Measure a cluster's messages and devices with one process per device of this node.

    What a killed sweep of the same cluster and options has measured lies in a journal beside the output and is kept.
    Raises BadInput before anything is started where cluster, options and this machine do not go together, and
    RunFailed when a rank ends; the ranks' logs are kept then.
    """
    cluster = read_document(request.cluster, Cluster)
    if request.nnodes > 1 and request.rendezvous is None:
        request = request._replace(rendezvous=rendezvous_of_step(os.environ))
    _check(request, cluster)
    identity = _identity(request, cluster)
    if request.node_rank == 0:
        read_journal(journal_path(request.out), identity)
    ranks = [rank for rank, node in enumerate(cluster.node_of_rank) if node == request.node_rank]
    folder = Path(tempfile.mkdtemp(prefix="shardwright-hardware-"))
    keep = False
    try:
        job = SweepJob(
            identity=identity,
            rendezvous=f"tcp://{request.rendezvous}" if request.rendezvous else f"file://{folder}/rendezvous",
            time_budget_s=request.time_budget_s,
            started_s=time.monotonic(),
            out=str(request.out.absolute()),
        )
        write_document(folder / "job.json", job)
        with shown_progress() as on_line:
            run_ranks(_WORKER, folder / "job.json", ranks, _environment(request, cluster), folder, on_line)
    except RunFailed:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(folder)


def _identity(request: SweepRequest, cluster: Cluster) -> SweepIdentity:
    backend = backend_of(cluster)
    return SweepIdentity(
        cluster=cluster,
        backend=backend,
        min_bytes=request.min_bytes,
        max_bytes=request.max_bytes,
        max_repeats=request.max_repeats,
        versions=versions_text(("torch",), on_gpu=backend == "nccl"),
    )


def _check(request: SweepRequest, cluster: Cluster) -> None:
    backend_of(cluster)
    if (nodes := len(set(cluster.node_of_rank))) != request.nnodes:
        raise BadInput(
            request.cluster,
            f"has {nodes} nodes, the sweep is started on {request.nnodes}",
            f"start it on every node with --nnodes {nodes}, --node-rank and --rendezvous",
        )
    if not 0 <= request.node_rank < nodes:
        raise BadInput("--node-rank", f"{request.node_rank} is no node of {nodes}", f"pass 0 to {nodes - 1}")
    if nodes > 1 and request.rendezvous is None:
        raise BadInput("--rendezvous", f"{nodes} nodes need a place to meet", "pass HOST:PORT of node 0 on every node")
    if request.max_bytes < request.min_bytes:
        raise BadInput("--max-bytes", f"{request.max_bytes} is below --min-bytes {request.min_bytes}", "raise it")
    least = min(node_type.memory_bytes for node_type in cluster.node_types.values())
    if 2 * request.max_bytes > least:
        raise BadInput(
            "--max-bytes",
            f"a message of {request.max_bytes} bytes and its result exceed a device's {least} bytes",
            f"pass at most {least // 2}",
        )
    if importlib.util.find_spec("torch") is None:
        raise BadInput("hardware", "torch is not installed here", "install shardwright-profile[hardware]")


def _environment(request: SweepRequest, cluster: Cluster) -> dict[str, str]:
    """What the ranks get beside this process's own environment, which wins."""
    added = {}
    if cluster.node_types[cluster.nodes[0].node_type].device == CPU:
        # Ranks that share a node's cores: one thread each, as when they train.
        added["OMP_NUM_THREADS"] = "1"
    if request.rendezvous is None:
        added["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: value for name, value in added.items() if name not in os.environ}
