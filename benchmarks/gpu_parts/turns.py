"""Two plans measured in turns, built at once over the same ranks, and a run that goes on from a checkpoint."""

import json
import math
import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

from accuracy_parts.commands import run
from gpu_parts.parity import configuration
from gpu_parts.parts import Part, several
from gpu_parts.setting import Setting
from gpu_parts.smoke import REFERENCE, plans_of
from gpu_parts.workbench import MIXED, described

from shardwright_formats.io import RunFailed, read_document, write_document
from shardwright_formats.types import Measurement, Plan, Plans, Schedule

STEPS = 6
_VOCABULARY = 512
_BEFORE = 2
"""Steps before the checkpoint that the second run goes on from."""


def of_commands(setting: Setting, part: Part) -> dict[str, Any]:
    """Measure two plans in turns; then train the second, and once more from its first checkpoint."""
    deadline_s = time.monotonic() + part.limit_s
    folder = setting.work / setting.slug / part.name
    folder.mkdir(parents=True, exist_ok=True)
    plans = _plans(setting)
    write_document(folder / "plans.json", Plans(plans=plans, in_turns=((0, 1),)))
    write_document(folder / "plan.json", plans[1])

    def command(*words: object) -> None:
        run(*words, threads=None, timeout_s=deadline_s - time.monotonic())

    command("shardwright-train", "measure", folder / "plans.json", "--steps", 3, "--min-time-s", 0,
            "--out", folder / "measured.json")  # fmt: skip
    found = read_document(folder / "measured.json", Measurement)
    _write_text(folder / "text")
    command("shardwright-train", "prepare", "--text", folder / "text", "--vocab-size", _VOCABULARY,
            "--out", folder / "data")  # fmt: skip
    whole, rest = folder / "whole", folder / "rest"
    command(*_training(folder, whole))
    _keep_first(whole, rest)
    command(*_training(folder, rest))
    unbroken, resumed = _losses(whole), _losses(rest)
    if len(unbroken) != STEPS or not all(map(math.isfinite, unbroken)):
        raise RunFailed(f"losses of {STEPS} steps: {unbroken}")
    return {
        "plans": {one.plan.name: median(one.step_times_s) for one in found.plans},
        "in_turns": all(one.in_turns for one in found.plans),
        "difference": max(abs(a - b) for a, b in zip(unbroken, resumed, strict=True)),
    }


def _plans(setting: Setting) -> tuple[Plan, Plan]:
    """Data parallelism, and a pipeline of two stages with as many microbatches as its batch has samples a rank."""
    width, layers, length = setting.size((512, 8, 256), (32, 4, 16))
    model = described(configuration("llama", width, layers, _VOCABULARY, length), "turns", length)
    every = plans_of(setting, model, several(setting), precision=MIXED, attention="sdpa")
    piped = next(p for p in every.values() if p.schedule is Schedule.ONE_F_ONE_B and len(p.stages) == 2)
    return every[REFERENCE], piped


def _training(folder: Path, out: Path) -> list[object]:
    return [
        *("shardwright-train", "run", folder / "plan.json", "--data", folder / "data", "--steps", STEPS),
        *("--checkpoint-every", _BEFORE, "--keep-every", _BEFORE, "--checkpoints", out / "kept", "--out", out),
    ]


def _write_text(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    words = "the quick brown fox jumps over the lazy dog"
    (folder / "a.txt").write_text("".join(f"{i} {words} {i * i}\n" for i in range(20_000)))


def _keep_first(whole: Path, rest: Path) -> None:
    """Copy what a run has kept, but for the checkpoints after its first: as if it had been stopped there."""
    shutil.rmtree(rest, ignore_errors=True)
    shutil.copytree(whole / "kept", rest / "kept")
    _first, *later = sorted(rest.glob("kept/*/step-*"))
    for checkpoint in later:
        shutil.rmtree(checkpoint)


def _losses(out: Path) -> list[float]:
    """Of every step."""
    (metrics,) = out.glob("kept/*/metrics.jsonl")
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def lines(result: dict[str, Any]) -> list[str]:
    """Times, and how far the run that was stopped is from the other."""
    times = [f"{name}: {time_s * 1000:.1f} ms a step" for name, time_s in result["plans"].items()]
    return [
        f"Measured {'in turns' if result['in_turns'] else '**one by one**'}: {'; '.join(times)}.",
        f"A run that goes on from step {_BEFORE} of {STEPS}: its losses differ from those of the run before by "
        f"{result['difference']:.1e} at most.",
    ]
