"""The parts, and how each is run: as ranks that the launcher starts, or as commands of this project."""

import json
import os
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from gpu_parts.setting import Setting

from shardwright_formats.io import RunFailed
from shardwright_launch.ranks import launch

Result = dict[str, Any]


class Part(NamedTuple):
    """A piece of work with a result of its own."""

    name: str
    purpose: str
    module: str
    """Of `gpu_parts`: `of_rank(setting, world)` or `of_commands(setting, part)`, and `lines(result)` for the page."""
    limit_s: float
    """It is ended when it takes longer."""
    ranks: Callable[[Setting], int] | None = None
    """On how many ranks; None where it calls commands."""
    argument: str = ""
    least_devices: int = 1


def _one(setting: Setting) -> int:
    return 1


def several(setting: Setting) -> int:
    """4 devices where there are so many, else 2."""
    return 4 if setting.devices >= 4 else 2


PARTS = {
    part.name: part
    for part in (
        Part("parity", "five families in bf16 and float32 beside stock transformers", "parity", 240, _one),
        Part("nccl", "schedules and kinds of parallelism over NCCL", "smoke", 240, several, least_devices=2),
        Part("shared-groups", "two plans measured in turns, and a run that goes on", "turns", 240, least_devices=2),
        Part("hang", "what a hang says that is made on purpose", "hang", 60, least_devices=2),
        Part("hardware", "a profile of the devices and their links", "profiles", 120, argument="hardware"),
        Part("profile-llama-7b", "a profile of Llama-7B's layers", "profiles", 360, argument="llama-7b"),
        Part("profile-gpt2-xl", "a profile of GPT-2 XL's layers", "profiles", 240, argument="gpt2-xl"),
        Part("profile-bert-large", "a profile of BERT-large's layers", "profiles", 180, argument="bert-large"),
        Part("predictions", "12 plans of one device, predicted and measured", "predictions", 420),
        Part("throughput", "a Llama of 1 B parameters beside a plain loop, compiled and not", "throughput", 420, _one),
        Part("synchronisations", "host-device synchronisations of a step", "synchronisations", 120, _one),
    )
}


_PATIENCE = 5
"""A rehearsal ends by itself or shows where it hangs: how fast a shared processor is, is not what it is for."""


def part_named(name: str, setting: Setting) -> Part:
    """A part, with the time that it may take in this setting."""
    part = PARTS[name]
    return part._replace(limit_s=part.limit_s * setting.size(1, _PATIENCE))


def run_part(part: Part, setting: Setting) -> Result:
    """Run a part to its end; RunFailed where it has none."""
    folder = setting.work / setting.slug
    folder.mkdir(parents=True, exist_ok=True)
    job, out = folder / f"{part.name}.job", folder / f"{part.name}.out"
    try:
        if part.ranks is None:
            found: Result = import_module(f"gpu_parts.{part.module}").of_commands(setting, part)
            return found
        job.write_bytes(msgspec.json.encode(setting, enc_hook=str))
        ranks = part.ranks(setting)
        command = [sys.executable, str(Path(__file__).parents[1] / "gpu.py"), "--rank", part.name, str(job), str(out)]
        launch(command, range(ranks), ranks, hang_timeout_s=part.limit_s)
        result: Result = json.loads(out.read_bytes())
        return result
    except SystemExit as ended:
        if ended.code in _STOPPED:
            raise
        raise RunFailed(f"it ended with {ended.code}") from None
    finally:
        job.unlink(missing_ok=True)
        out.unlink(missing_ok=True)


_STOPPED = (75, 130, 143)
"""Ends that the user asked for."""


def run_rank(arguments: list[str]) -> None:
    """One rank of a part."""
    from shardwright_launch.heartbeat import end_quietly, start_rank
    from shardwright_train.parallel.world import joined_world

    name, job, out = arguments
    start_rank()
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    setting = msgspec.json.decode(Path(job).read_bytes(), type=Setting, dec_hook=lambda kind, value: kind(value))
    part = part_named(name, setting)
    work = import_module(f"gpu_parts.{part.module}").of_rank
    with end_quietly(), joined_world(setting.device_type, timeout_s=2 * part.limit_s) as world:
        result = work(setting, world)
        if world.rank == 0:
            Path(out).write_text(json.dumps(result, allow_nan=False), encoding="utf-8")
