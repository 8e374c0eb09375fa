"""The command `hardware`: checks its options and starts the ranks of this node; rank 0 writes the profile."""

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from shardwright.io import BadInput, read_document, write_document
from shardwright.io.versions import versions_text
from shardwright.launch.accelerator import COLLECTIVES, CPU, check_accelerator, device_type_of
from shardwright.launch.journal import journal_path
from shardwright.launch.lock import only_run, scratch_folder
from shardwright.launch.meeting import meeting_of
from shardwright.launch.nodes import Nodes, check_all_nodes
from shardwright.launch.ranks import launch
from shardwright.types import Cluster
from shardwright_profile.hardware.profile import JOURNAL, Progress, Remark, SweepIdentity, SweepJob
from shardwright_profile.options import HardwareOptions

_WORKER = "shardwright_profile.hardware.worker"
_HANG_S = 300.0
"""Seconds after which a repeat counts as hanging, because a rank is lost."""


def start_sweep(options: HardwareOptions) -> None:
    """Measure a cluster's collectives and devices with one process per device of this node.

    The measurements of a killed sweep with the same cluster and options are in a journal next to the output, and are
    kept. Raises BadInput before anything is started if cluster, options and this machine do not fit together, and
    RunFailed if a rank fails.
    """
    cluster = read_document(options.cluster, Cluster)
    nodes = options.nodes(os.environ)
    _check(options, cluster, nodes)
    identity = _identity(options, cluster)
    with (
        only_run(options.out.with_name(f"{options.out.name}.lock"), nodes),
        meeting_of(nodes, options.out.with_name(f"{options.out.name}.secret"), os.environ) as nodes,
        scratch_folder() as scratch,
    ):
        if nodes.rank == 0:
            JOURNAL.read(journal_path(options.out), identity)
        job = SweepJob(
            identity=identity,
            time_budget_s=options.time_budget,
            started_s=time.monotonic(),
            out=str(options.out.absolute()),
        )
        job_file = scratch / "job.json"
        write_document(job_file, job)
        command = [sys.executable, "-m", _WORKER, str(job_file)]
        with shown_progress() as on_line:
            ours = nodes.ranks_here(cluster)
            launch(command, ours, cluster.num_devices, nodes, hang_timeout_s=_HANG_S, on_line=on_line)


def _identity(options: HardwareOptions, cluster: Cluster) -> SweepIdentity:
    device_type = device_type_of(cluster, options.cluster)
    return SweepIdentity(
        cluster=cluster,
        backend=COLLECTIVES[device_type],
        min_bytes=options.min_bytes,
        max_bytes=options.max_bytes,
        max_repeats=options.max_repeats,
        versions=versions_text(("torch",), on_gpu=device_type != CPU),
    )


def _check(options: HardwareOptions, cluster: Cluster, nodes: Nodes) -> None:
    device_type_of(cluster, options.cluster)
    check_all_nodes(cluster, nodes, options.cluster)
    if options.max_bytes < options.min_bytes:
        raise BadInput("--max-bytes", f"{options.max_bytes} is below --min-bytes {options.min_bytes}", "raise it")
    memory_bytes = min(node_type.memory_bytes for node_type in cluster.node_types.values())
    if 2 * options.max_bytes > memory_bytes:
        raise BadInput(
            "--max-bytes",
            f"a message of {options.max_bytes} bytes and its result exceed a device's {memory_bytes} bytes",
            f"pass at most {memory_bytes // 2}",
        )
    check_accelerator(cluster, nodes.rank, options.cluster)
    if importlib.util.find_spec("torch") is None:
        raise BadInput("hardware", "torch is not installed here", "pip install 'shardwright[profile]'")


@contextmanager
def shown_progress() -> Iterator[Callable[[bytes], None]]:
    """Yield a function that shows rank 0's JSON lines as progress on standard error."""
    if not sys.stderr.isatty():
        yield _print_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting the ranks", total=None)

        def update(line: bytes) -> None:
            match _said(line):
                case Progress(step=step, steps=steps, text=text):
                    bar.update(task, description=text, total=steps, completed=step)
                case Remark(text=text):
                    bar.console.print(text, markup=False, highlight=False)

        yield update


def _print_line(line: bytes) -> None:
    said = _said(line)
    counted = f"{said.step + 1}/{said.steps} " if isinstance(said, Progress) else ""
    print(f"{counted}{said.text}", file=sys.stderr, flush=True)


def _said(line: bytes) -> Progress | Remark:
    return msgspec.json.decode(line, type=Progress | Remark)
