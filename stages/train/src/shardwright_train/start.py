"""What the parent does for `run` and `measure`: check, start the ranks, put their results together."""

import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from shardwright_formats.io.errors import BadInput, RunFailed
from shardwright_formats.io.json import Document, read_any_document, read_document, write_document
from shardwright_formats.types.measurement import Measurement
from shardwright_formats.types.plan import Attention, Plan, Plans
from shardwright_formats.types.prediction import Prediction
from shardwright_launch.accelerator import check_accelerator, device_type_of
from shardwright_launch.heartbeat import HANG_TIMEOUT_S
from shardwright_launch.journal import journal_path
from shardwright_launch.lock import only_run
from shardwright_launch.nodes import Nodes
from shardwright_launch.ranks import launch
from shardwright_train.jobs import MeasureJob, RunJob
from shardwright_train.support import check_installed, check_supported
from shardwright_train.training.checkpoint_names import folder_of_plan

__all__ = ["start_measure", "start_run"]


def start_run(job: RunJob, nodes: Nodes) -> None:
    """Train on this node's share of the ranks."""
    plan = read_document(Path(job.plan), Plan)
    _check(plan, job.plan, nodes)
    with only_run(folder_of_plan(Path(job.checkpoints), plan.sha256) / "LOCK", nodes):
        _start(job, plan, nodes)


def start_measure(
    files: Sequence[Path],
    out: Path,
    steps: int,
    warmup_steps: int,
    nodes: Nodes,
    hang_timeout_s: float = HANG_TIMEOUT_S,
    trace: Path | None = None,
    min_time_s: float = 0.0,
) -> None:
    """Measure every plan of the files, in one launch per world size, and write one measurement.

    What is finished is kept in a journal beside it until it is whole: started again after an end, only the rest is
    measured. Each rank writes its traces into the folder `trace`, if there is one.
    """
    journal = journal_path(out)
    plans = [(file, plan) for file in files for plan in _plans_of(file)]
    for file, plan in plans:
        _check(plan, file, nodes)
    if trace is not None and trace.exists() and not trace.is_dir():
        raise BadInput(trace, "is no folder", "name another for the traces")
    results: dict[str, Measurement] = {}
    with only_run(out.with_name(f"{out.name}.lock"), nodes), tempfile.TemporaryDirectory() as scratch:
        sized = sorted((plan for _, plan in plans), key=lambda plan: plan.world_size)
        for size, group in groupby(sized, key=lambda plan: plan.world_size):
            batch = tuple(group)
            together, result = Path(scratch) / f"plans{size}.json", Path(scratch) / f"result{size}.json"
            write_document(together, Plans(plans=batch))
            job = MeasureJob(
                plans=str(together),
                out=str(result),
                steps=steps,
                journal=str(journal.absolute()),
                warmup_steps=warmup_steps,
                min_time_s=min_time_s,
                hang_timeout_s=hang_timeout_s,
                trace=None if trace is None else str(trace),
            )
            _start(job, batch[0], nodes)
            if nodes.rank == 0:
                measurement = read_document(result, Measurement)
                results |= {m.plan.sha256: measurement for m in measurement.plans}
        if nodes.rank == 0:
            write_document(out, _in_order([plan for _, plan in plans], results))
            journal.unlink(missing_ok=True)


def _in_order(plans: Sequence[Plan], results: dict[str, Measurement]) -> Measurement:
    found = [next(m for m in results[plan.sha256].plans if m.plan.sha256 == plan.sha256) for plan in plans]
    taken = {results[plan.sha256].attention for plan in plans if plan.attention is Attention.AUTO}
    if len(taken) > 1:
        raise RunFailed(f"auto took {' and '.join(sorted(taken))}: measure in two commands, or name one in the plans")
    first = results[plans[0].sha256]
    return Measurement(
        device=first.device,
        backend=first.backend,
        date=max(results[plan.sha256].date for plan in plans),
        versions=first.versions,
        attention=taken.pop() if taken else first.attention,
        plans=tuple(found),
    )


def _plans_of(file: Path) -> tuple[Plan, ...]:
    document: Document = read_any_document(file, Plan, Plans, Prediction)
    match document:
        case Plan():
            return (document,)
        case Plans():
            return document.plans
        case Prediction():
            return tuple(runner_up.plan for runner_up in document.runners_up)
    raise AssertionError(type(document))


def _check(plan: Plan, file: object, nodes: Nodes) -> None:
    """BadInput where these nodes cannot run a plan, before anything is started."""
    check_supported(plan, file)
    count = plan.cluster.node_of_rank[-1] + 1
    if nodes.count != count:
        raise BadInput(file, f"the plan is for {count} nodes, --nnodes is {nodes.count}", "start it on all of them")
    device_type_of(plan.cluster, file)
    check_accelerator(plan.cluster, nodes.rank, file)
    check_installed(plan, file)


def _start(job: RunJob | MeasureJob, plan: Plan, nodes: Nodes) -> None:
    on_node = [rank for rank, node in enumerate(plan.cluster.node_of_rank) if node == nodes.rank]
    with tempfile.TemporaryDirectory() as scratch:
        job_file = Path(scratch) / "job.json"
        write_document(job_file, job)
        command = [
            sys.executable,
            "-m",
            "shardwright_train.worker",
            str(job_file),
            device_type_of(plan.cluster, job_file),
        ]
        ranks = range(on_node[0], on_node[-1] + 1)
        launch(command, ranks, plan.world_size, nodes, hang_timeout_s=job.hang_timeout_s)
