"""How often a step makes the host wait for the device, by PyTorch's profiler, for few and for many microbatches.

A step that never waits in between has the same small number whatever its microbatches.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from gpu_kit.page import table
from gpu_kit.rows import Values
from gpu_kit.workbench import DrawnOnDevice, batch_of, engine_of, step_of
from torch.profiler import ProfilerActivity, profile

from shardwright.types import Plan
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World

CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpyAsync")
"""CUDA's own calls. All but the last wait; of the last, copies to pageable memory of the host do."""
ASKED = ("aten::_local_scalar_dense", "aten::nonzero")
"""Operations whose result the host needs at once; all that a processor shows."""


def counted(plan: Plan, world: World, groups: Groups) -> Values:
    """The calls of one step, after two others."""
    engine = engine_of(plan, world, groups, "sdpa", weights=DrawnOnDevice())
    steps = [step_of(engine, batch_of(plan.model, plan.global_batch_size, seed), seed + 1) for seed in range(3)]
    for step in steps[:-1]:
        engine.train_step(step)
    activities = [ProfilerActivity.CPU]
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        engine.train_step(steps[-1])
    counts = Counter(event.name for event in profiler.events())
    waiting = CALLS[:-1] if world.device.type == "cuda" else ASKED
    return {"calls": {name: counts[name] for name in (*CALLS, *ASKED)}, "waits": sum(counts[n] for n in waiting)}


def lines(rows: Mapping[str, Any]) -> list[str]:
    """The table."""
    names = (*CALLS, *ASKED)
    told = [
        [name.removeprefix("waits: "), row["waits"], *(row["calls"][each] for each in names)]
        for name, row in rows.items()
        if name.startswith("waits: ")
    ]
    said = "Waits of the host in one step; they must not grow with the microbatches."
    return [said, "", *table("|".join(["model", "waits", *(f"`{name}`" for name in names)]), told)]
