"""What a run wrote of its steps is kept up to the checkpoint it goes on from, whatever became of the file."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from random_plans import random_plan
from tiny_models import tiny

from shardwright.display.units import TimeLeft
from shardwright.types import StepMetrics
from shardwright_train.engine.optimizer import StepOutcome
from shardwright_train.parallel.world import World
from shardwright_train.training.metrics import METRICS, Metrics


def line(step: int) -> bytes:
    metrics = StepMetrics(
        step=step,
        loss=1.0 / step,
        step_time_s=0.1,
        tokens_per_s=1.0,
        mfu=None,
        grad_norm=1.0,
        learning_rate=1e-3,
        peak_memory_bytes=(1,),
        time_utc="2026-11-22T00:00:00.000+00:00",
    )
    return msgspec.json.encode(metrics) + b"\n"


@pytest.fixture
def metrics(tmp_path: Path, one_rank: World) -> Metrics:
    return Metrics(tmp_path / METRICS, random_plan(tiny("llama"), 0, 2), one_rank, 4)


@pytest.mark.parametrize("auxiliary", [None, 0.25])
def test_an_auxiliary_loss_is_in_a_line_only_if_there_is_one(metrics: Metrics, auxiliary: float | None) -> None:
    outcome = StepOutcome(1.0, 1.0, 1e-3, False, False, (1,), auxiliary)
    written = metrics.write(2, outcome, 0.1)
    assert msgspec.json.decode(metrics.file.read_bytes(), type=StepMetrics) == written
    assert msgspec.json.decode(metrics.file.read_bytes()).get("auxiliary_loss", "absent") == (auxiliary or "absent")


def test_a_printed_step_tells_how_long_the_rest_takes(metrics: Metrics, capsys: pytest.CaptureFixture[str]) -> None:
    """By the steps behind the first one of this process, which compiles: 90 s each."""
    now_s = iter([1000.0, 1090.0, 1180.0, 1270.0])
    metrics = replace(metrics, time_left=TimeLeft(lambda: next(now_s)))
    for step in range(1, 5):
        metrics.write(step, StepOutcome(1.0, 1.0, 1e-3, False, False, (1,)), 0.5)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" tokens/s")[2] for line in lines] == ["", ", about 3 min left", ", about 90 s left", ""]


@pytest.mark.parametrize("garbage", [b"\x00\xff\xfe\n", b"[]\n", b'{"step": 1}\n', b"\n", b"1" * 10_000 + b"\n"])
def test_lines_that_are_none_are_dropped_and_said(
    metrics: Metrics, garbage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics.file.write_bytes(line(1) + garbage + line(2) + line(3) + line(4)[:-20])
    metrics.keep_until(2, None)
    assert metrics.file.read_bytes() == line(1) + line(2)
    assert "are not metrics of a step: dropped" in capsys.readouterr().err


def test_a_last_line_that_was_cut_off_is_dropped_without_a_word(
    metrics: Metrics, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics.file.write_bytes(line(1) + line(2)[:-20])
    metrics.keep_until(1, None)
    assert metrics.file.read_bytes() == line(1) and not capsys.readouterr().err


def test_a_branch_begins_with_the_lines_of_its_parent(metrics: Metrics, tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    (parent / METRICS).write_bytes(line(1) + line(2) + line(3))
    metrics.keep_until(2, parent)
    assert metrics.file.read_bytes() == line(1) + line(2)
    metrics.keep_until(1, parent)
    assert metrics.file.read_bytes() == line(1)
