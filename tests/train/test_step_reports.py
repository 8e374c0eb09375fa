"""Steps are written down while the next ones run, in order, and all of them before a checkpoint says so."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from random_plans import random_plan
from tiny_models import tiny

from shardwright_train.engine.optimizer import StepOutcome
from shardwright_train.parallel.world import World
from shardwright_train.training.loggers import Loggers
from shardwright_train.training.metrics import METRICS, Metrics
from shardwright_train.training.reports import StepReports

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
    return StepReports(metrics, Loggers(None, {"slow": logger}))


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
