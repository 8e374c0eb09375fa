"""S9: two plans stepped alternately, both built on the same ranks; a run that resumes; an artificial hang."""

import json
import math
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from gpu_kit.configurations import configuration
from gpu_kit.prepare import TOKENS, VOCABULARY
from gpu_kit.rows import Row, Values
from gpu_kit.setting import Setting
from gpu_kit.several import REFERENCE, plans_of, ranks_of
from gpu_kit.steps import rank_command
from gpu_kit.workbench import MIXED, described
from harness import run

from shardwright.io import RunFailed, read_document, write_document
from shardwright.launch.collectives import collectives_of
from shardwright.launch.ranks import launch
from shardwright.plan.process_groups import Purpose
from shardwright.types import Measurement, Plan, Plans, Schedule
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World
from shardwright_train.torch_private import flight_recorder_trace

STEPS = 6
_BEFORE = 2
"""Number of steps before the checkpoint from which the second run resumes."""
_AT_MOST_S = 240


def rows(setting: Setting, stack: ExitStack) -> list[Row]:
    """Return the three rows of this step."""
    return [
        Row("in turns", partial(_in_turns, setting)),
        Row("resumed", partial(_resumed, setting)),
        Row("hang", partial(hung, setting)),
    ]


def _command(setting: Setting, *words: object) -> None:
    run(*words, threads=None, timeout_s=setting.size(_AT_MOST_S, 3 * _AT_MOST_S))


def _in_turns(setting: Setting) -> Values:
    folder = setting.work / "turns"
    folder.mkdir(parents=True, exist_ok=True)
    write_document(folder / "plans.json", Plans(plans=_plans(setting), in_turns=((0, 1),)))
    _command(setting, "shardwright", "train", "measure", folder / "plans.json", "--steps", 3, "--min-time-s", 0,
             "--out", folder / "measured.json")  # fmt: skip
    found = read_document(folder / "measured.json", Measurement)
    return {
        "plans": {one.plan.name: median(one.step_times_s) for one in found.plans},
        "in_turns": all(one.in_turns for one in found.plans),
    }


def _resumed(setting: Setting) -> Values:
    """Train a plan, then again from its first checkpoint; return the losses and their largest difference."""
    folder = setting.work / "resumed"
    folder.mkdir(parents=True, exist_ok=True)
    write_document(folder / "plan.json", _plans(setting)[1])
    whole, rest = folder / "whole", folder / "rest"
    _command(setting, *_training(setting, folder, whole))
    _keep_first(whole, rest)
    _command(setting, *_training(setting, folder, rest))
    unbroken, resumed = _losses(whole), _losses(rest)
    if len(unbroken) != STEPS or not all(map(math.isfinite, unbroken)):
        raise RunFailed(f"losses of {STEPS} steps: {unbroken}")
    return {"difference": max(abs(a - b) for a, b in zip(unbroken, resumed, strict=True)), "losses": unbroken}


def _plans(setting: Setting) -> tuple[Plan, Plan]:
    """Return a plan with data parallelism, and one with a 1F1B pipeline of two stages."""
    width, layers, length = setting.size((512, 8, 256), (32, 4, 16))
    model = described(configuration("llama", width, layers, VOCABULARY, length), "turns", length)
    every = plans_of(setting, model, ranks_of(setting), precision=MIXED, attention="sdpa")
    piped = next(p for p in every.values() if p.schedule is Schedule.ONE_F_ONE_B and len(p.stages) == 2)
    return every[REFERENCE], piped


def _training(setting: Setting, folder: Path, out: Path) -> list[object]:
    return [
        *("shardwright", "train", "run", folder / "plan.json", "--data", setting.carried / TOKENS, "--steps", STEPS),
        *("--checkpoint-every", _BEFORE, "--keep-every", _BEFORE, "--checkpoints", out / "kept", "--out", out),
    ]


def _keep_first(whole: Path, rest: Path) -> None:
    """Copy a run's checkpoints except those after the first, as if the run had been stopped there."""
    shutil.rmtree(rest, ignore_errors=True)
    shutil.copytree(whole / "kept", rest / "kept")
    _first, *later = sorted(rest.glob("kept/*/step-*"))
    for checkpoint in later:
        shutil.rmtree(checkpoint)


def _losses(out: Path) -> list[float]:
    """Return the loss of every step."""
    (metrics,) = out.glob("kept/*/metrics.jsonl")
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def lines(rows: Mapping[str, Any]) -> list[str]:
    """Return the sentences of this step's report."""
    said = []
    if (turns := rows.get("in turns")) is not None:
        times = [f"{name}: {time_s * 1000:.1f} ms a step" for name, time_s in turns["plans"].items()]
        said.append(f"Measured {'in turns' if turns['in_turns'] else '**one by one**'}: {'; '.join(times)}.")
    if (resumed := rows.get("resumed")) is not None:
        said.append(
            f"A run that resumes from step {_BEFORE} of {STEPS}: its losses differ from those of the unbroken run by "
            f"{resumed['difference']:.1e} at most."
        )
    if (made := rows.get("hang")) is not None:
        said.append(f"A hang ended with: `{made['said']}`. Groups in the ranks' traces: {made['groups']}.")
    return said


# An artificial hang: rank 1 sleeps while the others enter a collective, and the launcher must name it.


RANKS = 2
HANG_S = 5.0
SAID = r"rank 1 has not entered all_reduce \d+ of data parallelism of ranks 0 1, in which rank 0 waits"


def hung(setting: Setting) -> Values:
    """Start the ranks, and check that the launcher's message names the rank and the collective of the hang."""
    folder = setting.work / "hang"
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job"
    job.write_bytes(msgspec.json.encode(setting, enc_hook=str))
    command = rank_command("turns", job, folder / "none")
    try:
        launch(command, range(RANKS), RANKS, hang_timeout_s=HANG_S, log_folder=folder)
    except RunFailed as error:
        said = str(error)
    else:
        raise RunFailed("the ranks ended, though one of them sleeps")
    traces = [folder / f"rank-{rank}-collectives.json" for rank in range(RANKS)]
    entered = [len(collectives_of(trace.read_bytes()).groups) for trace in traces if trace.exists()]
    if re.search(SAID, said) is None:
        raise RunFailed(f"the collective that rank 1 has not entered is not named: {said}")
    return {"said": said, "groups": entered}


def of_rank(setting: Setting, world: World) -> Values:
    """Hang: rank 1 does not enter the all_reduce that rank 0 waits in."""
    world.heartbeat.answer(partial(flight_recorder_trace, world.backend))
    plan, groups = _plan(setting), Groups(setting.device_type)
    groups.prepare(plan)
    world.heartbeat.begin("in a hang that is made")
    if world.rank == 1:
        time.sleep(10 * HANG_S)
    group = groups.among(Purpose.DATA_PARALLEL, range(RANKS))
    dist.all_reduce(torch.zeros(1, device=world.device), group=group)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    time.sleep(10 * HANG_S)
    return {}


def _plan(setting: Setting) -> Plan:
    model = described(configuration("llama", 32, 4, 61, 16), "hang", 16)
    return plans_of(setting, model, RANKS)[REFERENCE]
