"""One rank of a hardware sweep: `RANK=0 LOCAL_RANK=0 python -m shardwright_profile.hardware.worker JOB.json`.

The launcher starts it and holds its standard input open; when that closes, the launcher is gone and the rank ends too.
"""

import os
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright_formats.io.errors import BadInput, one_line_errors
from shardwright_formats.io.json import canonical_json, read_document
from shardwright_formats.types.hardware_profile import write_hardware_profile
from shardwright_profile.hardware.assemble import profile_of
from shardwright_profile.hardware.entries import Entry, StartEntry
from shardwright_profile.hardware.job import CPU, Progress, Remark, SweepJob
from shardwright_profile.hardware.journal import Journal, Kept, journal_path, read_journal
from shardwright_profile.hardware.process_groups import ProcessGroups
from shardwright_profile.hardware.session import Session
from shardwright_profile.hardware.sweep import sweep
from shardwright_profile.hardware.timing import agreed

__all__ = ["main"]

_HANG_S = 300
"""A collective that takes longer has lost a rank."""


def main() -> None:
    """Take part in the sweep of the job named on the command line; rank 0 writes its profile."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    with one_line_errors():
        job = read_document(Path(sys.argv[1]), SweepJob)
        cluster, rank = job.identity.cluster, int(os.environ["RANK"])
        device = _device(cluster.node_types[cluster.node_type_of_rank[rank]].device)
        dist.init_process_group(
            job.identity.backend,
            init_method=job.rendezvous,
            rank=rank,
            world_size=cluster.num_devices,
            timeout=timedelta(seconds=_HANG_S),
            device_id=device if device.type == "cuda" else None,
        )
        dist.barrier()
        startup_s = agreed(time.monotonic() - job.started_s, device)
        journal = _journal(job, rank)
        started = journal.find("start") or StartEntry(time_s=startup_s)
        journal.add([started])
        say = _say if rank == 0 else _say_nothing
        entries = [started, *sweep(Session(job, device, journal, ProcessGroups()), say)]
        if rank == 0:
            _write(job, entries)
            journal.remove()
        dist.barrier()
        dist.destroy_process_group()


def _journal(job: SweepJob, rank: int) -> Journal:
    """What an earlier sweep left, as rank 0 finds it: only its node need have the file."""
    path = journal_path(Path(job.out)) if rank == 0 else None
    kept = read_journal(path, job.identity) if path is not None else Kept((), 0)
    shared: list[Kept] = [kept]
    dist.broadcast_object_list(shared, src=0)
    return Journal(path, job.identity, shared[0])


def _write(job: SweepJob, entries: list[Entry]) -> None:
    profile = profile_of(job.identity, entries, datetime.now(UTC).date().isoformat())
    write_hardware_profile(Path(job.out), profile)
    for sentence in profile.provenance.notes.splitlines():
        _say(Remark(words=f"note: {sentence}"))


def _device(name: str) -> torch.device:
    """The device of this rank, which must be the one that the cluster names."""
    if name == CPU:
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    if (found := torch.cuda.device_count()) <= local_rank:
        raise BadInput(
            "--cluster", f"it has a device {local_rank} ({name}), this node {found} CUDA devices", "correct it"
        )
    if (here := torch.cuda.get_device_name(local_rank)) != name:
        raise BadInput(
            "--cluster", f"device {local_rank} of this node is {here!r}, not {name!r}", "correct the device name"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _say(said: Progress | Remark) -> None:
    print(canonical_json(said).decode(), flush=True)


def _say_nothing(_: Progress | Remark) -> None:
    pass


def _end_with_launcher() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    main()
