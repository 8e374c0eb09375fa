"""The command trains a family of images on a folder of them, and goes on from a checkpoint bit for bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_command import forked_command
from random_plans import random_plan
from tiny_models import tiny

from shardwright.io import read_document, write_document
from shardwright.types import Plan, SequenceParallel
from shardwright_train.checkpoints.folders import folder_of_run

STEPS, MIDDLE = 8, 4


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan that splits heads and positions, and noisy images whose brightness is their class."""
    folder = tmp_path_factory.mktemp("images")
    plan = random_plan(tiny("vit"), 8, 2, "float32")
    assert {layer.sequence_parallel for layer in plan.layers if layer.tp_size == 2} >= {
        SequenceParallel.MEGATRON,
        SequenceParallel.ULYSSES,
    }
    write_document(folder / "plan.json", plan)
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 5, 50)
    pixels = 50 * labels[:, None, None, None] + draw.integers(0, 50, (50, 3, 12, 20))
    np.save(folder / "images.npy", pixels.astype(np.uint8))
    np.save(folder / "labels.npy", labels)
    return folder


def run(work: Path, *more: str) -> tuple[int, str]:
    asked = ["run", work / "plan.json", "--data", work, "--steps", STEPS, "--checkpoint-every", MIDDLE]
    asked += ["--learning-rate", 0.01, "--checkpoints", work / "checkpoints", "--out", work / "out", *more]
    command = forked_command(asked)
    error = command.communicate(300)[1]
    return command.wait(0), error


def metrics(work: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work / "out" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_on_images_learns_and_resumes_bit_for_bit(work: Path) -> None:
    status, err = run(work)
    assert status == 0, err
    unbroken = metrics(work)
    losses = [line["loss"] for line in unbroken]
    assert len(losses) == STEPS
    assert losses[-1] < 0.9 * losses[0]
    plan = read_document(work / "plan.json", Plan)
    middle = folder_of_run(work / "checkpoints", plan) / f"step-{MIDDLE:08d}"
    status, err = run(work, "--resume-from", str(middle))
    assert status == 0, err
    resumed = metrics(work)
    assert resumed[:MIDDLE] == unbroken[:MIDDLE]
    assert all(resumed[i]["time_utc"] > unbroken[-1]["time_utc"] for i in range(MIDDLE, STEPS))
    assert [line["loss"] for line in resumed] == losses
