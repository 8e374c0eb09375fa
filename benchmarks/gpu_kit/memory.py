"""S5: memory of plans of eight devices: the first and the last rank are run on one device, without the others."""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from gpu_kit.loops import wait
from gpu_kit.prepare import PREDICTIONS
from gpu_kit.rows import Row, Values, ratio, scaled
from gpu_kit.setting import Setting
from gpu_kit.workbench import DrawnOnDevice, batch_of, engine_of, step_of
from gpu_kit.worlds import fake_world
from harness import table

from shardwright.io import read_document
from shardwright.types import Plan
from shardwright_train.measurement.profiles import record_memory
from shardwright_train.parallel.process_groups import Groups

_DEVICES = 8


def rows(setting: Setting, stack: ExitStack) -> list[Row]:
    """Return a row for each plan and its first and last rank."""
    predicted = json.loads((setting.carried / PREDICTIONS).read_bytes())["plans"]
    names = [name for name, one in predicted.items() if one["devices"] == "eight"]
    # A null device does not count the positions of experts, so ranks would send none.
    names = [name for name in names if not (setting.null and name.startswith("experts"))]
    return [
        Row(f"{name}, rank {rank}", partial(_taken, setting, predicted[name], rank))
        for name in names
        for rank in (0, _DEVICES - 1)
    ]


def _taken(setting: Setting, predicted: Mapping[str, Any], rank: int) -> Values:
    """Return the memory peak of a step, after a first one, and the predictions for the rank."""
    plan = read_document(setting.carried / "plans" / predicted["file"], Plan)
    with fake_world(setting, rank, _DEVICES) as world:
        groups = Groups(setting.device_type)
        with record_memory(world.device) as record:
            record.hook("start")
            engine = engine_of(plan, world, groups, "sdpa", weights=DrawnOnDevice())
            assert engine.optimizer
            record.hook("built")
        step = step_of(engine, batch_of(plan.model, plan.global_batch_size, seed=0))
        standing = record.intervals[-1].after_bytes
        engine.train_step(step)
        wait(world.device)
        began = time.perf_counter()
        with record_memory(world.device, standing) as record:
            engine.train_step(step, hook=record.hook)
        wait(world.device)
        step_s = time.perf_counter() - began
        peak = max(interval.peak_bytes for interval in record.intervals)
    return {
        "peak_bytes": peak,
        "check_bytes": predicted["check_bytes"][str(rank)],
        "analytic_bytes": predicted["analytic_bytes"][plan.stage_of_rank(rank)],
        "step_s": step_s,
    }


def lines(rows: Mapping[str, Any]) -> list[str]:
    """Return the table of this step's report."""
    told = [
        [
            name,
            scaled(row["peak_bytes"], 2**30, ".3f"),
            ratio(row["check_bytes"], row["peak_bytes"]),
            ratio(row["analytic_bytes"], row["peak_bytes"]),
            scaled(row["step_s"], 1e-3, ".0f"),
        ]
        for name, row in rows.items()
    ]
    said = "Nothing is sent. The search's figure holds CUDA's context and the allocator's slack, too."
    return [said, "", *table("plan and rank|peak, GiB|check over it|search over it|step, ms", told)]
