"""S7: checkpoints of the dense model: a save for which steps wait, one during steps, and resuming from a save."""

import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from gpu_kit.fast import dense_plan
from gpu_kit.loops import SETTINGS, wait
from gpu_kit.rows import Row, Values, scaled
from gpu_kit.setting import Setting
from gpu_kit.workbench import DrawnOnDevice, batch_of, engine_of, step_of
from gpu_kit.worlds import lone_world
from harness import table

from shardwright.types import Plan
from shardwright_train.checkpoints.tensors import HostBuffer, parts_to_save, read_tensors, total_bytes, write_tensors
from shardwright_train.engine.engine import Engine
from shardwright_train.measurement.profiles import record_memory
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World


class _Run(NamedTuple):
    """An engine that trains, and the folder of its checkpoints."""

    engine: Engine
    plan: Plan
    world: World
    folder: Path

    def step(self, number: int) -> float:
        """Train a step; return its loss."""
        batch = batch_of(self.plan.model, self.plan.global_batch_size, seed=number)
        return float(self.engine.train_step(step_of(self.engine, batch, number)).loss)

    def timed_step(self, number: int) -> float:
        """Train a step; return its seconds."""
        wait(self.world.device)
        began = time.perf_counter()
        self.step(number)
        wait(self.world.device)
        return time.perf_counter() - began


def rows(setting: Setting, stack: ExitStack) -> list[Row]:
    """Return the rows, in an order in which each needs only earlier ones."""
    world, groups = lone_world(setting, stack), cache(lambda: Groups(setting.device_type))
    folder = setting.work / "checkpoints"

    @cache
    def run() -> _Run:
        plan = dense_plan(setting)
        engine = engine_of(plan, world(), groups(), "sdpa", SETTINGS, DrawnOnDevice())
        found = _Run(engine, plan, world(), folder)
        found.step(1)
        stack.callback(shutil.rmtree, folder, True)
        return found

    return [
        Row("synchronous", lambda: _synchronous(run())),
        Row("asynchronous", lambda: _asynchronous(run())),
        Row("resumed", lambda: _resumed(run())),
        Row("memory of a step", lambda: _memory(setting, run())),
    ]


def _synchronous(run: _Run) -> Values:
    """Write the whole checkpoint while nothing else is done."""
    tensors = run.engine.tensors()
    target = _emptied(run.folder / "synchronous")
    began = time.perf_counter()
    write_tensors(target, parts_to_save(tensors), 0)
    return {"bytes": total_bytes(tensors), "took_s": time.perf_counter() - began}


def _asynchronous(run: _Run) -> Values:
    """Pin a buffer, copy into it, and write it while steps run, as an asynchronous save does."""
    from concurrent.futures import ThreadPoolExecutor

    before = [run.timed_step(number) for number in (2, 3)]
    parts, target = parts_to_save(run.engine.tensors()), _emptied(run.folder / "asynchronous")
    began = time.perf_counter()
    buffer = HostBuffer(parts)
    pinned = time.perf_counter()
    copied = buffer.copied(parts)
    stalled = time.perf_counter()
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write_tensors, target, copied, 0)
        beside = [run.timed_step(number) for number in (4, 5)]
        writing.result()
    ended = time.perf_counter()
    again = time.perf_counter()
    buffer.copied(parts)
    copied_again_s = time.perf_counter() - again
    buffer.close()
    return {
        "bytes": buffer_bytes(parts),
        "pinned_s": pinned - began,
        "copied_s": stalled - pinned,
        "copied_again_s": copied_again_s,
        "written_s": ended - stalled,
        "step_s": min(before),
        "step_beside_s": max(beside),
    }


def buffer_bytes(parts: tuple[Any, ...]) -> int:
    """Return the bytes of the parts of a checkpoint."""
    return sum(part.local.nbytes for part in parts)


def _resumed(run: _Run) -> Values:
    """Save, train a step, read the save back, and train that step once more."""
    target = _emptied(run.folder / "resumed")
    write_tensors(target, parts_to_save(run.engine.tensors()), 0)
    first = run.step(6)
    began = time.perf_counter()
    read_tensors(target, run.engine.tensors())
    wait(run.world.device)
    took_s = time.perf_counter() - began
    second = run.step(6)
    return {"took_s": took_s, "losses": (first, second), "same": first == second}


def _memory(setting: Setting, run: _Run) -> Values:
    """Return the memory peaks of a step and, on a GPU, what was allocated at the peak by PyTorch's own snapshot."""
    with record_memory(run.world.device) as record:
        record.hook("start")
        batch = batch_of(run.plan.model, run.plan.global_batch_size, seed=7)
        run.engine.train_step(step_of(run.engine, batch, 7), hook=record.hook)
    largest = sorted(record.intervals, key=lambda interval: -interval.peak_bytes)[:5]
    found: Values = {"peaks": {f"{one.name} {one.at or ''}".strip(): one.peak_bytes for one in largest}}
    if setting.on_cuda and not setting.null:
        torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
        run.step(8)
        wait(run.world.device)
        (events, *_) = torch.cuda.memory._snapshot()["device_traces"]
        torch.cuda.memory._record_memory_history(enabled=None)
        found |= {"at_the_peak": at_the_peak(events)}
    return found


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def lines(rows: Mapping[str, Any]) -> list[str]:
    """Return the tables and sentences of this step's report."""
    told = []
    if (row := rows.get("synchronous")) is not None:
        told.append(["synchronous write", scaled(row["took_s"], 1), scaled(row["bytes"] / row["took_s"], 1e9)])
    if (row := rows.get("asynchronous")) is not None:
        rate = {
            name: scaled(row["bytes"] / max(row[name], 1e-9), 1e9) for name in ("pinned_s", "copied_s", "written_s")
        }
        told.append(["pinning, once", scaled(row["pinned_s"], 1), rate["pinned_s"]])
        told.append(["copy to the host: the steps' stall", scaled(row["copied_s"], 1), rate["copied_s"]])
        told.append(["write beside steps", scaled(row["written_s"], 1), rate["written_s"]])
        told.append(["step without a save", scaled(row["step_s"], 1, ".3f"), "-"])
        told.append(["step beside the write", scaled(row["step_beside_s"], 1, ".3f"), "-"])
    said = []
    if (row := rows.get("resumed")) is not None:
        told.append(["read back", scaled(row["took_s"], 1), "-"])
        said = ["", f"The step behind it has {'the same' if row['same'] else '**another**'} loss: {row['losses']}."]
    if (row := rows.get("memory of a step")) is not None:
        peaks = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in row["peaks"].items())
        said += ["", f"Peaks of a step: {peaks}."]
        held = [[place, scaled(size, 2**30)] for place, size in row.get("at_the_peak", {}).items()]
        said += ["", *table("allocated in the step and resident at its peak|GiB", held)]
    return [*table("what|s|GB/s", told), *said]


# Where the memory at the peak of a step was allocated, by the history of PyTorch's allocator.


_OWN = ("shardwright_train", "transformers")
_LARGEST = 15


def at_the_peak(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the bytes resident at the peak by the innermost line of a model or of this project, the largest first.

    `events`: the events of one device, in order, from `torch.cuda.memory._snapshot`.
    """
    live: dict[int, Mapping[str, Any]] = {}
    held = most = 0
    peak: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            held += event["size"]
            sizes[_place(event)] += event["size"]
            if held > most:
                most, peak = held, sizes.copy()
        elif event["action"] == "free_completed" and (gone := live.pop(event["addr"], None)) is not None:
            held -= gone["size"]
            sizes[_place(gone)] -= gone["size"]
    return {place: size for place, size in peak.most_common(_LARGEST) if size > 0}


def _place(event: Mapping[str, Any]) -> str:
    for frame in event.get("frames", ()):
        if any(name in frame["filename"] for name in _OWN):
            return f"{PurePath(frame['filename']).name}:{frame['line']} {frame['name']}"
    return "elsewhere"
