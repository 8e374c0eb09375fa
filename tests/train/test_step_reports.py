"""Steps are written down while the next ones run, in order, and all of them before a checkpoint says so."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from faults import write_steps_late
from forked_command import Fault, forked_command
from random_plans import random_plan
from tiny_models import tiny

from shardwright.io import write_document
from shardwright_train.data.prepare import prepare
from shardwright_train.engine.optimizer import StepOutcome
from shardwright_train.parallel.world import World
from shardwright_train.training.loggers import Loggers
from shardwright_train.training.metrics import METRICS, LoadLog, Metrics, StepReports

OUTCOME = StepOutcome(1.0, 1.0, 1e-3, False, False, (1,))


class Slow:
    """A logger that writes when it is let."""

    faults = (OSError,)

    def __init__(self) -> None:
        self.let, self.steps, self.closed = threading.Event(), list[int](), False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        assert self.let.wait(60)
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def reports_of(folder: Path, world: World, logger: Slow) -> StepReports:
    metrics = Metrics(folder / METRICS, random_plan(tiny("llama"), 0, 2), world, 4)
    return StepReports(metrics, Loggers(None, {"slow": logger}), LoadLog(metrics.plan.model))


def test_a_step_is_written_down_while_the_next_one_runs_and_before_a_checkpoint(
    tmp_path: Path, one_rank: World
) -> None:
    logger = Slow()
    reports = reports_of(tmp_path, one_rank, logger)
    reports.write(1, OUTCOME, 1.0)
    assert logger.steps == [], "the next step begins"
    logger.let.set()
    reports.write(2, OUTCOME, 1.0)
    assert logger.steps[0] == 1
    reports.finish()
    assert logger.steps == [1, 2]
    reports.write(3, OUTCOME, 1.0)
    reports.close()
    assert logger.steps == [1, 2, 3] and logger.closed
    lines = (tmp_path / METRICS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_a_step_that_cannot_be_written_down_ends_the_run_at_the_next(tmp_path: Path, one_rank: World) -> None:
    logger = Slow()
    reports = reports_of(tmp_path / "missing", one_rank, logger)
    reports.write(1, OUTCOME, 1.0)
    with pytest.raises(FileNotFoundError):
        reports.write(2, OUTCOME, 1.0)
    reports.close()
    assert logger.closed


def test_a_run_goes_on_while_a_step_is_written_and_saves_it_afterwards(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    prepare(str(tmp_path), "a.txt", 260, 1.0, tmp_path / "data")
    write_document(tmp_path / "plan.json", random_plan(tiny("llama", vocab_size=260), 0, 1, "float32"))
    files = ("--data", tmp_path / "data", "--checkpoints", tmp_path / "kept", "--out", tmp_path)
    run = forked_command(("run", tmp_path / "plan.json", "--steps", 2, *files), fault=Fault(0, write_steps_late))
    _, error = run.communicate(timeout=300)
    assert run.returncode == 0, error
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()] == [1, 2]
