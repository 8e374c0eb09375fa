"""Detection of accelerators on a node without importing torch."""

import shutil
from pathlib import Path

from shardwright_formats.io import BadInput
from shardwright_formats.types import Cluster

CPU = "cpu"
"""PyTorch's name of the device type of a node's processors."""
DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/nvgpu", "/dev/dxg", "/dev/kfd")
"""Files that GPU drivers make: NVIDIA's on Linux, on Jetson and on WSL, and AMD's."""


def device_type_of(cluster: Cluster, file: object) -> str:
    """Return PyTorch's name of a cluster's device type, `cpu` or `cuda`.

    Raises BadInput for a mixture, whose ranks exchange no collectives.
    """
    if cluster.obstacle is not None:
        raise BadInput(file, cluster.obstacle, "describe them apart")
    return CPU if cluster.of_rank(0).on_cpu else "cuda"


def check_accelerator(cluster: Cluster, node_rank: int, file: object) -> None:
    """Raise BadInput where a node of the cluster has accelerators and this machine has no driver of a GPU."""
    node_type = cluster.of_rank(cluster.node_of_rank.index(node_rank))
    if node_type.on_cpu or any(Path(driver).exists() for driver in DRIVERS) or shutil.which("nvidia-smi"):
        return
    raise BadInput(
        file, f"is for {node_type.device}, this machine has no driver of a GPU", "start it on the cluster's own nodes"
    )
