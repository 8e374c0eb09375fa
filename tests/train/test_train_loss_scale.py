"""Float16: the loss is scaled so that gradients fit, and steps in which they do not are skipped."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forked_ranks import run_worker
from random_plans import random_plan
from tiny_models import tiny

from shardwright.io import read_document, write_document
from shardwright.types import Plan, Precision, RunResult
from shardwright_train.checkpoints.folders import folder_of_run, latest_checkpoint
from shardwright_train.data.prepare import prepare
from shardwright_train.engine.learning_rate import LearningRateSchedule
from shardwright_train.options import RunOptions, encode_job
from shardwright_train.training.stopping import LossScale

START = 2.0**25
STEPS, STOP = 18, 13
FLOAT16 = Precision(parameters="float32", compute="float16", reduce="float32")


def test_the_scale_halves_after_an_overflow() -> None:
    scale = LossScale.for_compute("float16")
    assert scale == LossScale(2.0**16, fixed=False, steps_without_overflow=0)
    scale = scale.after(overflowed=False)
    assert scale == LossScale(2.0**16, fixed=False, steps_without_overflow=1)
    assert scale.after(overflowed=True) == LossScale(2.0**15, fixed=False, steps_without_overflow=0)


def test_the_scale_doubles_after_2000_steps_without_an_overflow() -> None:
    scale = LossScale(8.0, fixed=False).after(overflowed=True)
    for _ in range(1999):
        scale = scale.after(overflowed=False)
    assert scale.value == 4.0
    assert scale.after(overflowed=False) == LossScale(8.0, fixed=False, steps_without_overflow=0)
    assert scale.after(overflowed=True).value == 2.0


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_other_formats_have_no_scale(dtype: str) -> None:
    scale = LossScale.for_compute(dtype)
    assert (scale.value, scale.can_fall) == (1.0, False)
    for overflowed in (True, False) * 1001:
        scale = scale.after(overflowed)
    assert scale == LossScale.for_compute(dtype)


def test_an_overflow_without_scaling_comes_from_the_model() -> None:
    assert LossScale(2.0, fixed=False).can_fall
    assert not LossScale(1.0, fixed=False).can_fall


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Jobs on two ranks: one unbroken, one that is stopped and then resumed, and one that overflows at every scale."""
    folder = tmp_path_factory.mktemp("float16")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    prepare(str(folder / "text"), "*.txt", 260, 1.0, folder / "data")
    plan = msgspec.structs.replace(random_plan(tiny("llama", vocab_size=260), 3, 2, "float32"), precision=FLOAT16)
    write_document(folder / "plan.json", plan)
    jobs = {"unbroken": STEPS, "broken": STOP, "resumed": STEPS, "endless": 40}
    for name, steps in jobs.items():
        (folder / f"{name}.json").write_bytes(encode_job(_job(folder, "broken" if name == "resumed" else name, steps)))
    run_worker("loss_scale_worker", [str(START), *(str(folder / f"{name}.json") for name in jobs)], 2)
    return folder


def _job(folder: Path, name: str, steps: int) -> RunOptions:
    return RunOptions(
        plan=folder / "plan.json",
        data=folder / "data",
        out=folder / name,
        checkpoints=folder / name / "checkpoints",
        steps=steps,
        checkpoint_every=100,
        keep_checkpoints=1,
        learning_rate=0.01,
        learning_rate_schedule=LearningRateSchedule.CONSTANT,
        warmup_steps=0,
        final_fraction=1.0,
        decay_fraction=0.0,
        weight_decay=0.1,
        clip_norm=1.0,
        seed=0,
        hang_timeout_s=120.0,
    )


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _progress(runs: Path, name: str) -> dict[str, Any]:
    folder = folder_of_run(runs / name / "checkpoints", read_document(runs / "plan.json", Plan))
    latest = latest_checkpoint(folder)
    assert latest is not None
    found: dict[str, Any] = json.loads((latest / "checkpoint.json").read_bytes())["progress"]
    return found


def test_steps_that_overflow_are_skipped_and_then_the_model_trains(runs: Path) -> None:
    steps = _metrics(runs / "unbroken")
    skipped = [step["grad_norm"] is None for step in steps]
    overflows = skipped.index(False)
    assert 5 < overflows < STOP - 2 and not any(skipped[overflows:])
    losses = [step["loss"] for step in steps]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[overflows] - 0.1
    progress = _progress(runs, "unbroken")
    assert progress["loss_scale"] == START / 2**overflows
    assert progress["steps_without_overflow"] == progress["updates"] == STEPS - overflows


def test_a_resumed_run_keeps_scale_and_optimizer_as_they_were(runs: Path) -> None:
    kept = ("step", "loss", "grad_norm", "learning_rate")
    unbroken, broken = ([[step[k] for k in kept] for step in _metrics(runs / n)] for n in ("unbroken", "broken"))
    assert len(unbroken) == STEPS and unbroken == broken
    for field in ("loss_scale", "steps_without_overflow", "updates", "step"):
        assert _progress(runs, "broken")[field] == _progress(runs, "unbroken")[field]


def test_a_model_that_overflows_at_every_scale_ends_the_run(runs: Path) -> None:
    assert [file.name for file in runs.glob("*.error")] == ["endless.error"]
    assert (runs / "endless.error").read_text().startswith("step 26: loss ")


def test_a_run_says_which_attention_it_took(runs: Path) -> None:
    assert read_document(runs / "unbroken" / "DONE.json", RunResult).attention == "sdpa"
