"""How often a step makes the host wait for the device, by PyTorch's profiler, for 2 and for 8 microbatches.

A step that never waits in between has the same small number whatever its microbatches.
"""

from collections import Counter
from typing import Any

import torch
from gpu_parts.parity import configuration
from gpu_parts.setting import Setting
from gpu_parts.workbench import batch_of, described, engine_of, memory_given_back, one_device_plan, step_of
from torch.profiler import ProfilerActivity, profile

from shardwright_formats.types import Plan
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World

MICROBATCHES = (2, 8)
CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpyAsync")
"""CUDA's own calls. All but the last wait; of the last, copies to pageable memory of the host do."""
ASKED = ("aten::_local_scalar_dense", "aten::nonzero")
"""Operations whose result the host needs at once; all that a processor shows."""


def of_rank(setting: Setting, world: World) -> dict[str, Any]:
    """The calls of one step, after two others."""
    width, layers, vocabulary, length, samples = setting.size((1024, 8, 8192, 512, 8), (32, 2, 61, 16, 8))
    model = described(configuration("llama", width, layers, vocabulary, length), "synchronisations", length)
    groups, rows = Groups(setting.device_type), []
    for microbatches in MICROBATCHES:
        plan = one_device_plan(setting, model, f"{microbatches} microbatches", samples, num_microbatches=microbatches)
        with memory_given_back(world.device):
            counts = _counted(plan, world, groups)
        rows.append({"microbatches": microbatches, "calls": {name: counts[name] for name in (*CALLS, *ASKED)}})
    counted = ASKED if setting.rehearsal else CALLS[:-1]
    waits = [sum(row["calls"][name] for name in counted) for row in rows]
    return {"rows": rows, "waits": waits, "constant": len(set(waits)) == 1}


def _counted(plan: Plan, world: World, groups: Groups) -> Counter[str]:
    world.heartbeat.begin(f"in {plan.name}")
    engine = engine_of(plan, world, groups, "sdpa")
    steps = [step_of(engine, batch_of(plan.model, plan.global_batch_size, seed), seed + 1) for seed in range(3)]
    for step in steps[:-1]:
        engine.train_step(step)
    activities = [ProfilerActivity.CPU]
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        engine.train_step(steps[-1])
    return Counter(event.name for event in profiler.events())


def lines(result: dict[str, Any]) -> list[str]:
    """The table of the page."""
    names = (*CALLS, *ASKED)
    head = [
        "Calls in one step. All but `cudaMemcpyAsync` make the host wait; those must not grow with the microbatches: "
        f"{'they do not' if result['constant'] else '**they do**'}.",
        "",
        f"| microbatches | {' | '.join(f'`{name}`' for name in names)} |",
        f"| {' | '.join(['---'] * (len(names) + 1))} |",
    ]
    rows = [
        f"| {row['microbatches']} | {' | '.join(str(row['calls'][name]) for name in names)} |" for row in result["rows"]
    ]
    return [*head, *rows]
