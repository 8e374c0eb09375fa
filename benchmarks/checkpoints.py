"""What saving costs a run: windows of ten steps that begin with a save, beside windows without, in turns.

    python benchmarks/checkpoints.py [--pairs 5] [--out FILE.json]

Two processes, the Llama of `benchmarks/runtime.py` under ZeRO-3 with a larger batch, so that a step takes half a second
or more. A window with a save ends when its last step is done and the checkpoint is complete; the ratio is the median of
the pairs'. Saved is beside the steps, as `run` does, and at once (`--checkpoint-sync`). Then, of the same Llama on two
replicas (DDP), the host memory that the first save beside the steps takes of each rank.
"""

import json
import tempfile
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from runtime import CONFIG, LENGTH, Ours, compare, medians, ratio, the_plan

from shardwright.types import DataParallel, Plan
from shardwright_train.checkpoints.folders import Identity, Progress
from shardwright_train.checkpoints.saver import Saver
from shardwright_train.checkpoints.tensors import total_bytes
from shardwright_train.measurement.profiles import record_memory
from shardwright_train.options import RunOptions
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World, joined_world

STEPS, BATCH = 10, 16
JOB = RunOptions(plan=Path(), data=Path(), out=Path(), checkpoints=Path(), steps=1)


def _window(ours: Ours, saver: Saver | None, number: int) -> tuple[float, float]:
    """Seconds of ten steps and, with a saver, of a checkpoint; those of the processor in this process."""
    generator = torch.Generator().manual_seed(number)
    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    if saver is not None:
        progress = msgspec.structs.replace(Progress.begin(1.0), step=number + 1, samples=BATCH * (number + 1))
        saver.save(ours.engine.tensors(), progress)
    for _ in range(STEPS):
        ours.step(torch.randint(0, CONFIG["vocab_size"], (BATCH, LENGTH + 1), generator=generator))
    if saver is not None:
        saver.finish()
    dist.barrier()
    return time.perf_counter() - began, time.process_time() - worked


def worker(result: str, pairs: int) -> None:
    """One rank: windows with and without a save, in turns."""
    plan = msgspec.structs.replace(the_plan(DataParallel.ZERO3, compiled=False), global_batch_size=BATCH)
    found: dict[str, list[tuple[float, float]]] = {}
    with joined_world("cpu") as world, tempfile.TemporaryDirectory() as scratch:
        folder = Path(world.first_says(lambda: scratch, str))
        ours, group = Ours(plan, world, Groups("cpu")), dist.new_group(backend="gloo")
        found["host memory, MiB"] = _host_memory(world, folder, group)
        _window(ours, None, 0)
        for name, asynchronous in (("beside the steps", True), ("at once", False)):
            saver = _saver(folder, plan, ours, group, asynchronous)
            both = [_pair(ours, saver, 2 * pairs * asynchronous + number) for number in range(pairs)]
            found[name], found[f"{name}, processor"] = [wall for wall, _ in both], [cpu for _, cpu in both]
            saver.close()
            if world.rank == 0:
                print(f"{name}, {saver.bytes_in_all >> 20} MiB: {_summary(found[name])}", flush=True)
                print(f"  of rank 0's processor: {_summary(found[f'{name}, processor'])}", flush=True)
        if world.rank == 0:
            Path(result).write_text(json.dumps(found))


def _saver(folder: Path, plan: Plan, ours: Ours, group: dist.ProcessGroup, asynchronous: bool) -> Saver:
    return Saver(
        folder=folder,
        identity=Identity.of_run(JOB, plan, data_sha256="0" * 64),
        parent=None,
        keep_last=1,
        keep_every=0,
        asynchronous=asynchronous,
        group=group,
        bytes_in_all=total_bytes(ours.engine.tensors()),
    )


def _host_memory(world: World, folder: Path, group: dist.ProcessGroup) -> list[tuple[float, float]]:
    """MiB that the first save beside the steps takes of each rank's host, and those of its parameters and moments."""
    plan = the_plan(DataParallel.DDP, compiled=False)
    ours = Ours(plan, world, Groups("cpu"))
    ours.step(torch.zeros(BATCH, LENGTH + 1, dtype=torch.int64))
    tensors = ours.engine.tensors()
    saver = _saver(folder, plan, ours, group, asynchronous=True)
    with record_memory(world.device) as record:
        record.hook("start")
        saver.save(tensors, msgspec.structs.replace(Progress.begin(1.0), step=1))
        record.hook("copied")
    added, held = record.intervals[-1].peak_bytes / 2**20, sum(local_tensor(x).nbytes for x in tensors.values()) / 2**20
    saver.finish()
    saver.close()
    every = torch.zeros(world.size, 2, dtype=torch.float64)
    every[world.rank] = torch.tensor([added, held])
    dist.all_reduce(every)
    if world.rank == 0:
        for rank, (each, states) in enumerate(every.tolist()):
            print(
                f"replica {rank}: a save beside the steps copies {each:.1f} MiB, of {states:.1f} MiB held", flush=True
            )
    return [(each, states) for each, states in every.tolist()]


def _pair(ours: Ours, saver: Saver, number: int) -> list[tuple[float, float]]:
    """Seconds of a window with a save and of one without, which of them first by number; then the processor's."""
    times = {each is saver: _window(ours, each, number) for each in ((saver, None) if number % 2 else (None, saver))}
    return list(zip(times[True], times[False], strict=True))


def _summary(times: list[tuple[float, float]]) -> str:
    saving, plain = medians(times)
    seen = f"{STEPS} steps and a save {saving:.2f} s, {STEPS} steps {plain:.2f} s, {ratio(times)}"
    return f"{seen}: a save every {STEPS} steps adds {saving / plain - 1:+.1%}"


if __name__ == "__main__":
    compare(__file__, __doc__, worker, 5)
