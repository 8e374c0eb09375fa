"""Detection of accelerators on a node without importing torch."""

import shutil
from pathlib import Path

from shardwright.io import BadInput
from shardwright.types import Cluster

CPU = "cpu"
"""PyTorch's name of the device type of a node's CPUs."""
GPU = "cuda"
"""PyTorch's name of the device type of GPUs, including AMD's."""
COLLECTIVES = {CPU: "gloo", GPU: "nccl"}
"""Library of collectives by device type; on AMD's GPUs `nccl` is RCCL."""
DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/nvgpu", "/dev/dxg", "/dev/kfd")
"""Files that GPU drivers create: NVIDIA's on Linux, on Jetson and on WSL, and AMD's."""


def device_type_of(cluster: Cluster, file: object) -> str:
    """Return PyTorch's name of a cluster's device type, such as `cuda`.

    Raises BadInput if CPU nodes and other nodes are mixed, because their ranks cannot exchange collectives.
    """
    if cluster.obstacle is not None:
        raise BadInput(file, cluster.obstacle, "describe each in a cluster file")
    return CPU if cluster.of_rank(0).on_cpu else GPU


def check_accelerator(cluster: Cluster, node_rank: int, file: object) -> None:
    """Raise BadInput if the cluster's node has accelerators but this machine has no GPU driver."""
    node_type = cluster.of_rank(cluster.node_of_rank.index(node_rank))
    if node_type.on_cpu or any(Path(driver).exists() for driver in DRIVERS) or shutil.which("nvidia-smi"):
        return
    raise BadInput(
        file, f"is for {node_type.device}, but this machine has no GPU driver", "start it on the cluster's nodes"
    )
