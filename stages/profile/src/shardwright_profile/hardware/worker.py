"""A rank of a hardware sweep: `python -m shardwright_profile.hardware.worker JOB.json`, started by the launcher.

The rank joins its process group and measures rates, collectives, links and overlap within a time budget.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from shardwright.io import BadInput, canonical_json, read_document
from shardwright.launch.accelerator import CPU, GPU
from shardwright.launch.backend import device_name, on_accelerator, take_device
from shardwright.launch.heartbeat import START_UP_S, Heartbeat, end_quietly, start_rank
from shardwright.launch.journal import Journal, Kept, journal_path
from shardwright.launch.store import rank_store
from shardwright.plan.sweep_plan import CollectiveKind, SweepPlan
from shardwright.types.hardware_profile import Collective, write_hardware_profile
from shardwright_profile.hardware.measurements import collective_call, pair_tasks, point_tasks, rate_tasks
from shardwright_profile.hardware.overlap import CASE_MESSAGES, overlap_tasks, pipeline_tasks
from shardwright_profile.hardware.profile import (
    JOURNAL,
    Entry,
    OverlapEntry,
    PairEntry,
    Progress,
    Remark,
    StartEntry,
    SweepIdentity,
    SweepJob,
    overlap_key,
    profile_of,
)
from shardwright_profile.hardware.session import WARM_UP_REPEATS, Budget, ProcessGroups, Session, Stopwatch, Task, timed


def main(job_file: str) -> None:
    """Take part in the sweep of a job; rank 0 writes its profile."""
    start_rank()
    job = read_document(Path(job_file), SweepJob)
    heartbeat = Heartbeat.of_environment()
    with end_quietly(), ExitStack() as stack:
        stack.push(heartbeat.note)
        device = _device(job.identity)
        # The process group's timeout must be later than the launcher's, which shows the stacks of a hang.
        timeout = timedelta(seconds=2 * START_UP_S)
        device_id = device if on_accelerator(device) else None
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = rank_store(dist.FileStore, dist.Store, size, timeout)  # type: ignore[attr-defined]
        dist.init_process_group(
            job.identity.backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device_id
        )
        stack.callback(dist.destroy_process_group)
        stack.push(heartbeat.note)  # before its peers can see that this rank is gone
        _measure(job, Stopwatch(device, heartbeat))


def _measure(job: SweepJob, stopwatch: Stopwatch) -> None:
    stopwatch.align()
    startup_s = stopwatch.agreed(time.monotonic() - job.started_s)
    rank = dist.get_rank()
    journal = _journal(job, rank, stopwatch)
    started = journal.find("start") or StartEntry(time_s=startup_s)
    journal.add([started])
    session = Session(job.identity, stopwatch, journal, ProcessGroups(stopwatch.device))
    entries = [started, *sweep(session, job.time_budget_s, _say if rank == 0 else lambda _: None)]
    # Only a moment is left: no rank may be stopped after rank 0 begins to write, as the profile then exists.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stopwatch.align()
    if rank == 0:
        _write(job, entries)
        journal.remove()
    stopwatch.align()


def _journal(job: SweepJob, rank: int, stopwatch: Stopwatch) -> Journal[SweepIdentity, Entry]:
    """Return the journal of the sweep, with the entries that rank 0 reads from its file; other nodes need no file."""
    path = journal_path(Path(job.out)) if rank == 0 else None
    kept: Kept[Entry] = JOURNAL.read(path, job.identity) if path is not None else Kept()
    return Journal(path, JOURNAL, job.identity, stopwatch.of_first(kept, Kept[Entry]))


def _write(job: SweepJob, entries: list[Entry]) -> None:
    profile = profile_of(job.identity, entries, datetime.now(UTC).date().isoformat())
    write_hardware_profile(Path(job.out), profile)
    for sentence in profile.provenance.notes.splitlines():
        _say(Remark(text=f"note: {sentence}"))


def _device(identity: SweepIdentity) -> torch.device:
    """Return the device of this rank; raise BadInput if it is not the one that the cluster names."""
    cluster, local_rank = identity.cluster, int(os.environ["LOCAL_RANK"])
    wanted = cluster.of_rank(int(os.environ["RANK"]))
    if wanted.on_cpu:
        return torch.device(CPU)
    name = wanted.device
    if (device_count := torch.accelerator.device_count()) <= local_rank:
        problem = f"it lists device {local_rank} ({name}), but this node has {device_count} CUDA devices"
        raise BadInput("--cluster", problem, "correct it")
    if (here := device_name(torch.device(GPU, local_rank))) != name:
        problem = f"device {local_rank} of this node is {here!r}, not {name!r}"
        raise BadInput("--cluster", problem, "correct the device name")
    return take_device(local_rank)


def _say(said: Progress | Remark) -> None:
    print(canonical_json(said).decode(), flush=True)


# The sweep: rates, collectives, links and overlap within a time budget.


_POINTS_SHARE = 0.7
"""Share of the time left after the rates that goes to collectives; the larger messages take most of it."""
_PAIRS_SHARE = 1 / 3
"""Share of the time left after the collectives that goes to pairs; overlap gets the rest."""

Say = Callable[[Progress | Remark], None]


class Line(NamedTuple):
    """A collective's time as a constant and a time per byte."""

    constant_s: float
    s_per_byte: float

    def sum_s(self, sizes: Sequence[int]) -> float:
        """Return the sum of the seconds of one collective of each size in bytes."""
        return sum(self.constant_s + self.s_per_byte * size for size in sizes)


def line_through(small: tuple[int, float], large: tuple[int, float]) -> Line:
    """Return the line through two points of bytes and seconds; it is flat if the larger message was not slower."""
    (small_bytes, small_s), (large_bytes, large_s) = small, large
    slope = max(0.0, large_s - small_s) / (large_bytes - small_bytes) if large_bytes > small_bytes else 0.0
    return Line(small_s - slope * small_bytes, slope)


class Workload(NamedTuple):
    """The sizes in bytes of the messages that are timed whatever the budget, and are not in the journal yet."""

    points: Sequence[int]
    pairs: Sequence[int]
    """Message size of each round in bytes: the pairs of a round are timed at once."""
    overlap: Sequence[int]
    case_messages: float
    """Time of one repeat of an overlap at all ratios, as a multiple of its collective's time."""
    min_repeats: int
    warm_up_repeats: int

    def min_s(self, line: Line) -> float:
        """Return the seconds of the minimum number of repeats of everything, if collectives take the line's time."""
        once_s = line.sum_s(self.points) + line.sum_s(self.pairs) + self.case_messages * line.sum_s(self.overlap)
        return (self.warm_up_repeats + self.min_repeats) * once_s

    def estimate(self, kept: int, needed_s: float, given_s: float) -> str:
        """Return the text to print before the measurement; `kept`: the number of measurements in the journal."""
        counts = f"{len(self.points)} points, {len(self.pairs)} rounds of pairs, {len(self.overlap)} overlaps"
        resumed = f"; {kept} measurements of a killed sweep are kept" if kept else ""
        longer = ": the small sizes are timed all the same" if needed_s > given_s else ""
        return (
            f"hardware: {counts}, at least {self.min_repeats} repeats each: about {needed_s:.2g} s needed, "
            f"{given_s:.4g} s given{longer}{resumed}"
        )


def sweep(session: Session, time_budget_s: float, say: Say) -> list[Entry]:
    """Measure everything; all ranks call this and get the same entries, in the same order.

    Each entry is in the journal before the next is measured; what is already in the journal is not measured again.
    """
    plan = SweepPlan.for_cluster(session.identity.cluster, session.identity.sizes, session.stopwatch.device.type)
    measured: list[Entry] = []
    step, budget = 0, session.stopwatch.budget(time_budget_s)
    for series, share in _parts(session, plan, budget, say):
        for number, task, entries in timed(session, series, share * budget.left_s()):
            if session.journal.add(entries):
                text = f"{task.subject}: {max(entries, key=_slowness)}"
                say(Progress(step=step + number, steps=plan.steps, text=text))
            measured.extend(entries)
        step += len(series)
    return measured


def _parts(
    session: Session, plan: SweepPlan, budget: Budget, say: Say
) -> Iterator[tuple[Sequence[Iterable[Task]], float]]:
    """Yield the series of tasks for rates, collectives, links and overlap, each with its share of the time left."""
    in_pipeline = pipeline_tasks(session)
    if not in_pipeline:
        say(Remark(text="layers in a pipeline are left out: one device has no second stage"))
    yield [[*rate_tasks(session), *in_pipeline]], 1.0
    work = _workload(session, plan)
    line = _calibrated(session, plan) if plan.kinds else Line(0.0, 0.0)
    needed_s = budget.time_s - budget.left_s() + work.min_s(line)
    say(Remark(text=work.estimate(session.journal.kept_count, needed_s, budget.time_s)))
    yield point_tasks(session, plan.kinds), _POINTS_SHARE
    yield pair_tasks(session, plan.rounds), _PAIRS_SHARE
    yield overlap_tasks(session, plan.overlapped), 1.0


def _workload(session: Session, plan: SweepPlan) -> Workload:
    """Return the messages that are timed however short the budget is, except for those in the journal."""
    sizes, find = session.identity.sizes, session.journal.find

    def always(kind: CollectiveKind) -> tuple[int, ...]:
        return sizes.always(kind.key.group_size)

    return Workload(
        points=[size for kind in plan.kinds for size in always(kind) if not find("point", kind.key, size)],
        pairs=[r.message_bytes for r in plan.rounds if not find("pair", *r.pairs[0], r.message_bytes)],
        overlap=[
            size
            for kind in plan.overlapped
            for size in sizes.overlapped(kind.key.group_size)
            if size in always(kind) and not find(*overlap_key(kind.key, size, 1.0))
        ],
        case_messages=CASE_MESSAGES,
        min_repeats=session.min_repeats,
        warm_up_repeats=WARM_UP_REPEATS,
    )


def _calibrated(session: Session, plan: SweepPlan) -> Line:
    """Return the time of a collective by size, measured with one kind of all_reduce at two sizes up to 1 MiB."""
    kind = next(kind for kind in plan.overlapped if kind.key.collective is Collective.ALL_REDUCE)
    sizes = session.identity.sizes.always(kind.key.group_size)
    points = []
    for size in (sizes[0], sizes[-1]):
        call = collective_call(kind, size, session.process_groups.group_for(kind), session.stopwatch.device)
        session.stopwatch.slowest_s(call, WARM_UP_REPEATS)
        points.append((size, float(np.median(session.stopwatch.slowest_s(call, WARM_UP_REPEATS)))))
    return line_through(*points)


def _slowness(entry: Entry) -> float:
    """Return a number that is largest for the entry to show, among those of one task: its time, or its slowdown."""
    match entry:
        case PairEntry():
            return entry.time_s
        case OverlapEntry():
            return entry.compute_slowdown
        case _:
            return 0.0


if __name__ == "__main__":
    main(sys.argv[1])
