"""What the parent does for `run` and `measure`: check, start the ranks, put their results together."""

import fcntl
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from shardwright_formats.io.errors import BadInput, RunFailed
from shardwright_formats.io.json import Document, read_any_document, read_document, write_document
from shardwright_formats.types.measurement import Measurement
from shardwright_formats.types.plan import Attention, Plan, Plans
from shardwright_formats.types.prediction import Prediction
from shardwright_train.jobs import MeasureJob, RunJob
from shardwright_train.launch import Nodes, launch
from shardwright_train.support import check_installed, check_supported
from shardwright_train.training.checkpoint_names import folder_of_plan
from shardwright_train.watch import HANG_TIMEOUT_S

__all__ = ["start_measure", "start_run"]


def start_run(job: RunJob, nodes: Nodes) -> None:
    """Train on this node's share of the ranks."""
    plan = read_document(Path(job.plan), Plan)
    check_supported(plan, job.plan)
    check_installed(plan, job.plan)
    with _only_one(folder_of_plan(Path(job.checkpoints), plan.sha256)):
        _start(job, plan, job.plan, nodes)


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

    What is finished is kept beside it until it is whole: started again after an end, only the rest is measured. Each
    rank writes its traces into the folder `trace`, if there is one.
    """
    parts = out.with_name(f"{out.name}.parts")
    plans = [(file, plan) for file in files for plan in _plans_of(file)]
    for file, plan in plans:
        check_supported(plan, file)
        check_installed(plan, file)
    if trace is not None and trace.exists() and not trace.is_dir():
        raise BadInput(trace, "is no folder", "name another for the traces")
    results: dict[str, Measurement] = {}
    with tempfile.TemporaryDirectory() as scratch:
        sized = sorted(plans, key=lambda pair: pair[1].world_size)
        for size, group in groupby(sized, key=lambda pair: pair[1].world_size):
            batch = list(group)
            together, result = Path(scratch) / f"plans{size}.json", Path(scratch) / f"result{size}.json"
            write_document(together, Plans(plans=tuple(plan for _, plan in batch)))
            job = MeasureJob(
                plans=str(together),
                out=str(result),
                steps=steps,
                parts=str(parts.absolute()),
                warmup_steps=warmup_steps,
                min_time_s=min_time_s,
                hang_timeout_s=hang_timeout_s,
                trace=None if trace is None else str(trace),
            )
            _start(job, batch[0][1], batch[0][0], nodes)
            if nodes.rank == 0:
                measurement = read_document(result, Measurement)
                results |= {m.plan.sha256: measurement for m in measurement.plans}
    if nodes.rank == 0:
        write_document(out, _in_order([plan for _, plan in plans], results))
        shutil.rmtree(parts, ignore_errors=True)


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


def _start(job: RunJob | MeasureJob, plan: Plan, file: object, nodes: Nodes) -> None:
    on_node = [rank for rank, node in enumerate(plan.cluster.node_of_rank) if node == nodes.rank]
    if nodes.count != plan.cluster.node_of_rank[-1] + 1:
        there = plan.cluster.node_of_rank[-1] + 1
        raise BadInput(file, f"the plan is for {there} nodes, --nnodes is {nodes.count}", "start it on all of them")
    devices = {plan.cluster.node_types[name].device for name in plan.cluster.node_type_of_rank}
    if "cpu" in devices and len(devices) > 1:
        raise BadInput(file, "cpu and other devices in one cluster", "plan for one or the other")
    device_type = "cpu" if devices == {"cpu"} else "cuda"
    with tempfile.TemporaryDirectory() as scratch:
        job_file = Path(scratch) / "job.json"
        write_document(job_file, job)
        command = [sys.executable, "-m", "shardwright_train.worker", str(job_file), device_type]
        launch(command, len(on_node), on_node[0], plan.world_size, nodes, job.hang_timeout_s)


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold a folder's lock; BadInput when another run holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "LOCK").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(folder, "another run of this plan is using it", "wait for it or stop it") from None
        yield
