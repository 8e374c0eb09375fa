"""S1: a step with states or activations in host memory beside the same without: bits, time, and the device's memory."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from gpu_kit.configurations import configuration
from gpu_kit.page import table
from gpu_kit.rows import Row, Values
from gpu_kit.setting import Setting
from gpu_kit.workbench import MIXED, batch_of, described, engine_of, one_device_plan, step_of
from msgspec.structs import replace

from shardwright.types import MIB, Offload, Plan, Recompute
from shardwright_train.engine.engine import Engine
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World

_STEPS = 4
_CASES = (
    (Offload.OPTIMIZER, Recompute.NONE),
    (Offload.UPDATE, Recompute.NONE),
    (Offload.ACTIVATIONS, Recompute.NONE),
    (Offload.ACTIVATIONS, Recompute.FULL),
)


def rows(setting: Setting, world: Callable[[], World], groups: Callable[[], Groups]) -> list[Row]:
    """A row for each kind of offload, of all blocks."""
    return [
        Row(f"host: {offload}, recompute {recompute}", partial(_beside, setting, world, groups, offload, recompute))
        for offload, recompute in _CASES
    ]


def _beside(
    setting: Setting,
    world: Callable[[], World],
    groups: Callable[[], Groups],
    offload: Offload,
    recompute: Recompute,
) -> Values:
    width, layers, vocabulary, length, samples = setting.size((2048, 8, 8192, 4096, 4), (32, 2, 61, 16, 2))
    model = described(configuration("llama", width, layers, vocabulary, length), "host", length)
    plan = one_device_plan(setting, model, "host", samples, precision=MIXED, attention="sdpa", num_microbatches=2)
    plain = replace(plan, layers=tuple(replace(layer, recompute=recompute) for layer in plan.layers))
    moved = replace(plain, layers=tuple(replace(layer, offload=offload) for layer in plain.layers))
    on, off = (_trained(setting, each, world(), groups()) for each in (moved, plain))
    unlike = [name for name, x in on.pop("tensors").items() if not torch.equal(x, off["tensors"][name])]
    off.pop("tensors")
    return {"same": not unlike, "unlike": len(unlike), "first_unlike": unlike[:3], "on": on, "off": off}


def _trained(setting: Setting, plan: Plan, world: World, groups: Groups) -> dict[str, Any]:
    """Some steps: the parameters after them, the fastest step's time, and the most that the device's tensors took."""
    engine: Engine = engine_of(plan, world, groups, "sdpa")
    times_s = []
    for number in range(1, _STEPS + 1):
        step = step_of(engine, batch_of(plan.model, plan.global_batch_size, seed=number), number)
        if setting.on_cuda:
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
        began_s = time.perf_counter()
        engine.train_step(step)
        if setting.on_cuda:
            torch.accelerator.synchronize()
        times_s.append(time.perf_counter() - began_s)
    most = torch.accelerator.max_memory_allocated() if setting.on_cuda else 0
    engine.late.flush()
    tensors = {name: x.detach().to("cpu", copy=True) for name, x in engine.optimizer.parameters.items()}
    return {"step_s": min(times_s), "peak_mib": most / MIB, "tensors": tensors}


def lines(rows: Mapping[str, Any]) -> list[str]:
    """The table."""
    told = [
        [
            name.removeprefix("host: "),
            "yes" if row["same"] else f"no, {row['unlike']} differ",
            *(f"{row[which]['step_s'] * 1e3:.1f}" for which in ("on", "off")),
            *(f"{row[which]['peak_mib']:.0f}" for which in ("on", "off")),
        ]
        for name, row in rows.items()
        if name.startswith("host: ")
    ]
    return table("in host memory|same bits|ms|ms without|MiB|MiB without", told)
