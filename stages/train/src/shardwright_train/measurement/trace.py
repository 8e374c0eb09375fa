"""A step as a Chrome trace: PyTorch's profile of it, with the passes named."""

import gzip
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shardwright_formats.io import write_bytes
from shardwright_formats.types import Plan
from shardwright_launch.scratch import scratch_folder
from shardwright_train.pipeline.runner import MicrobatchChunk, StepHook

_RANKS, _FLOWS = 1 << 20, 1 << 32
"""Strides of the numbers of ranks and of one rank's flows, so that numbers of two ranks never collide."""
_NAMES_OF_PROCESSES = ("process_name", "process_labels", "process_sort_index")


def trace_file(folder: Path, plan: Plan, rank: int) -> Path:
    """Return the file of a rank's trace of a plan; plans of one name are told apart by their hash."""
    name = re.sub(r"[^\w.-]+", "-", plan.name, flags=re.ASCII)[:80]
    return folder / f"{name}-{plan.sha256[:8]}.rank{rank}.json.gz"


@contextmanager
def traced(device: torch.device, rank: int, file: Path) -> Iterator[StepHook]:
    """Profile a step that sets the events it is given, and write its trace.

    Each pass and the wait before it is a span of its own, `forward microbatch 0 chunk 0` and so on. The processes of
    the trace are named by the rank, and nothing in it means something else in another rank's.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    spans = _Spans()
    with profile(activities=activities) as profiler:
        yield spans.hook
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with scratch_folder() as scratch:
        raw = scratch / "trace.json"
        profiler.export_chrome_trace(str(raw))
        trace = json.loads(raw.read_bytes())
    # No time in the header: the same trace gives the same bytes.
    write_bytes(file, gzip.compress(json.dumps(_of_rank(trace, rank)).encode(), compresslevel=4, mtime=0))


class _Spans:
    """A hook that opens and closes named spans at the events of a step."""

    def __init__(self) -> None:
        self._open: record_function | None = None

    def hook(self, name: str, at: MicrobatchChunk | None = None) -> None:
        kind, _, point = name.partition(".")
        which = "" if at is None else f" microbatch {at[0]} chunk {at[1]}"
        match point or name:
            case "begin":
                self._change(f"wait for {kind}{which}")
            case "wait":
                self._change(f"{kind}{which}")
            case "end":
                self._change("between passes")
            case "start":
                self._change("step")
            case "reduced":
                self._change("optimizer")
            case "optimizer":
                self._change(None)

    def _change(self, name: str | None) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = None if name is None else record_function(name)
        if self._open is not None:
            self._open.__enter__()


def _of_rank(trace: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the trace with processes and flows numbered apart from all other ranks', and processes named by the rank.

    The rank's process on the host gets the number of the rank. The profiler's own spans, whose process is no number,
    are left out.
    """
    host = os.getpid()
    happened = {e["pid"] for e in trace["traceEvents"] if e["ph"] != "M" and isinstance(e.get("pid"), int)}
    numbers = {
        pid: rank + _RANKS * number for number, pid in enumerate(sorted(happened, key=lambda pid: (pid != host, pid)))
    }
    events = []
    for event in trace["traceEvents"]:
        if event.get("pid") not in numbers or event["name"] in _NAMES_OF_PROCESSES:
            continue
        apart = {"pid": numbers[event["pid"]]}
        if "id" in event:
            apart["id"] = rank * _FLOWS + event["id"]
        events.append(event | apart)
    for pid, number in numbers.items():
        name = f"rank {rank}" if pid == host else f"rank {rank}, device {pid}"
        order = rank * len(numbers) + number // _RANKS
        for kind, arguments in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": order})):
            events.append({"name": kind, "ph": "M", "pid": number, "tid": 0, "args": arguments})
    return trace | {"traceEvents": events, "traceName": f"rank {rank}"}
