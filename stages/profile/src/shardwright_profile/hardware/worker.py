"""A rank of a hardware sweep: `python -m shardwright_profile.hardware.worker JOB.json`, started by the launcher."""

import os
import signal
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.io import BadInput, canonical_json, read_document
from shardwright.launch.accelerator import CPU, GPU
from shardwright.launch.backend import device_name, on_accelerator, take_device
from shardwright.launch.heartbeat import START_UP_S, Heartbeat, end_quietly, start_rank
from shardwright.launch.journal import Journal, Kept, journal_path
from shardwright.launch.store import rank_store
from shardwright.types.hardware_profile import write_hardware_profile
from shardwright_profile.hardware.profile import (
    JOURNAL,
    Entry,
    Progress,
    Remark,
    StartEntry,
    SweepIdentity,
    SweepJob,
    profile_of,
)
from shardwright_profile.hardware.session import ProcessGroups, Session, Stopwatch
from shardwright_profile.hardware.sweep import sweep


def main(job_file: str) -> None:
    """Take part in the sweep of a job; rank 0 writes its profile."""
    start_rank()
    job = read_document(Path(job_file), SweepJob)
    heartbeat = Heartbeat.of_environment()
    with end_quietly(), ExitStack() as stack:
        stack.push(heartbeat.note)
        device = _device(job.identity)
        # The launcher, which shows the stacks of a hang, is to speak before the process group does.
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
    # What is left takes a moment: no rank may be stopped once rank 0 writes, for then the profile is there.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stopwatch.align()
    if rank == 0:
        _write(job, entries)
        journal.remove()
    stopwatch.align()


def _journal(job: SweepJob, rank: int, stopwatch: Stopwatch) -> Journal[SweepIdentity, Entry]:
    """Return the journal of an earlier measurement, as rank 0 reads it: only its node needs the file."""
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


if __name__ == "__main__":
    main(sys.argv[1])
