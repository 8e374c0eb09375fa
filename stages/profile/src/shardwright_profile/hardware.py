"""One rank of a hardware sweep: `RANK=0 LOCAL_RANK=0 python -m shardwright_profile.hardware JOB.json`.

The launcher starts it and holds its standard input open; when that closes, the launcher is gone and the rank ends too.
"""

import os
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from shardwright_formats.errors import BadInput, one_line_errors
from shardwright_formats.files import canonical_json, read_document
from shardwright_formats.hardware_profile import HardwareProfile, write_hardware_profile
from shardwright_formats.tables import Provenance
from shardwright_formats.versions import versions_text
from shardwright_profile.device_rates import device_rates
from shardwright_profile.message_kinds import message_kinds
from shardwright_profile.sweep import TimedMessage, sweep
from shardwright_profile.sweep_job import CPU, Progress, SweepJob, backend_of

__all__ = ["main"]

_HANG_S = 300
"""A collective that takes longer has lost a rank."""


def main() -> None:
    """Take part in the sweep of the job named on the command line; rank 0 writes its profile."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    with one_line_errors():
        job = read_document(Path(sys.argv[1]), SweepJob)
        rank = int(os.environ["RANK"])
        device = _device(job.cluster.node_types[job.cluster.node_type_of_rank[rank]].device)
        dist.init_process_group(
            backend_of(job.cluster),
            init_method=job.rendezvous,
            rank=rank,
            world_size=job.cluster.num_devices,
            timeout=timedelta(seconds=_HANG_S),
            device_id=device if device.type == "cuda" else None,
        )
        profile = _measure(job, device, _tell if rank == 0 else _say_nothing)
        if rank == 0:
            write_hardware_profile(Path(job.out), profile)
        dist.barrier()
        dist.destroy_process_group()


def _measure(job: SweepJob, device: torch.device, report: Callable[[Progress], None]) -> HardwareProfile:
    rates = device_rates(device)
    timed = sweep(message_kinds(job.cluster), job.min_bytes, job.max_bytes, job.time_budget_s, device, report)
    devices = sorted({job.cluster.node_types[group.node_type].device for group in job.cluster.nodes})
    return _profile(job.cluster.name, " + ".join(devices), backend_of(job.cluster), timed, rates)


def _profile(
    cluster: str, device: str, backend: str, timed: list[TimedMessage], rates: dict[str, float]
) -> HardwareProfile:
    keys = [message.kind.key for message in timed]
    repeats = [len(message.times_s) for message in timed]
    return HardwareProfile(
        cluster=cluster,
        device=device,
        backend=backend,
        provenance=Provenance(
            datetime.now(UTC).date().isoformat(), versions_text(("torch",), on_gpu=backend == "nccl")
        ),
        points={
            "collective": np.array([key.collective.encode() for key in keys], dtype="S16"),
            "group_size": np.array([key.group_size for key in keys], dtype=np.int64),
            "consecutive": np.array([key.consecutive for key in keys], dtype=np.int8),
            "across_nodes": np.array([key.across_nodes for key in keys], dtype=np.int8),
            "message_bytes": np.array([message.message_bytes for message in timed], dtype=np.int64),
            "interval": np.zeros(len(timed)),
            "source": np.array([b"measured"] * len(timed), dtype="S8"),
        },
        repeats={
            "point": np.repeat(np.arange(len(timed), dtype=np.int64), repeats),
            "time_s": np.concatenate([np.zeros(0), *(message.times_s for message in timed)]),
            "outlier": np.zeros(sum(repeats), dtype=np.int8),
        },
        rates={
            "name": np.array([name.encode() for name in rates], dtype="S32"),
            "value": np.array(list(rates.values()), dtype=np.float64),
            "source": np.array([b"measured"] * len(rates), dtype="S8"),
        },
    )


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


def _tell(progress: Progress) -> None:
    print(canonical_json(progress).decode(), flush=True)


def _say_nothing(_: Progress) -> None:
    pass


def _end_with_launcher() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    main()
