"""Starting the ranks of a plan on this node, and the checks of plan and folders before it."""

import sys
from pathlib import Path

from shardwright_formats.io import BadInput
from shardwright_formats.types import Plan
from shardwright_launch.accelerator import check_accelerator, device_type_of
from shardwright_launch.nodes import Nodes, check_all_nodes
from shardwright_launch.ranks import launch
from shardwright_launch.scratch import scratch_folder
from shardwright_train.models.support import check_installed, check_supported
from shardwright_train.options import MeasureJob, RunJob, encode_job


def check_plan(plan: Plan, file: object, nodes: Nodes) -> None:
    """Raise BadInput where these nodes cannot run a plan, before anything is started."""
    check_supported(plan, file)
    check_all_nodes(plan.cluster, nodes, file)
    device_type_of(plan.cluster, file)
    check_installed(plan, file)
    check_accelerator(plan.cluster, nodes.rank, file)


def check_folder(folder: Path) -> None:
    """Raise BadInput where a folder's name is that of a file."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(folder, "is no folder", "name another")


def start_ranks(job: RunJob | MeasureJob, plan: Plan, nodes: Nodes, name: str = "", start: int = 0) -> None:
    """Start this node's ranks of a plan, and wait until they have done a job."""
    with scratch_folder() as scratch:
        job_file = scratch / "job.json"
        job_file.write_bytes(encode_job(job))
        device_type = device_type_of(plan.cluster, job_file)
        command = [sys.executable, "-m", "shardwright_train.worker", str(job_file), device_type]
        launch(
            command,
            nodes.ranks_here(plan.cluster),
            plan.world_size,
            nodes,
            hang_timeout_s=job.hang_timeout_s,
            log_folder=job.log_dir,
            name=name,
            start=start,
        )
