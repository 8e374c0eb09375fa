"""load.json: what share of positions each expert got in a run, over all steps, whatever was stopped and resumed."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from forked_command import forked_command
from msgspec import UNSET
from msgspec.structs import replace
from random_plans import random_plan
from shared_experts import with_shared_experts
from tiny_models import tiny

from shardwright.io import BadInput, read_document, write_document
from shardwright.types import ExpertLoad
from shardwright_train.training.metrics import LOAD, LoadLog, expert_imbalance

MODEL = tiny("mixtral", num_local_experts=4, num_hidden_layers=2)
FIRST, SECOND = (4.0, 2.0, 0.0, 2.0), (1.0, 1.0, 1.0, 1.0)


def logged(*steps: tuple[float, ...]) -> LoadLog:
    log = LoadLog(MODEL)
    for step, assignments in enumerate(steps, start=1):
        log.add(step, assignments)
    return log


def test_a_load_has_the_mean_shares_and_the_mean_of_each_steps_fullest_group(tmp_path: Path) -> None:
    logged(FIRST + SECOND, SECOND + SECOND).write(tmp_path)
    load = read_document(tmp_path / LOAD, ExpertLoad)
    assert (load.model, load.first_step, load.last_step) == (MODEL.name, 1, 2)
    first, second = load.layers
    assert (first.layer, first.shares) == (0, (0.375, 0.25, 0.125, 0.25))
    assert (first.imbalance(2), first.imbalance(4)) == ((1.5 + 1) / 2, (2 + 1) / 2)
    assert (second.shares, second.imbalance(4)) == ((0.25,) * 4, 1.0)


def test_a_peak_that_moves_from_step_to_step_shows_in_groups_alone(tmp_path: Path) -> None:
    logged(*((*(8.0 * (expert == hot) for expert in range(4)), *SECOND) for hot in range(4))).write(tmp_path)
    (moving, _) = read_document(tmp_path / LOAD, ExpertLoad).layers
    assert (moving.shares, moving.imbalance(2), moving.imbalance(4)) == ((0.25,) * 4, 2.0, 4.0)


def test_a_resumed_run_counts_on_where_its_checkpoint_was(tmp_path: Path) -> None:
    logged(FIRST + SECOND).write(tmp_path)
    for step, first in ((1, 1), (2, 3)):
        log = LoadLog(MODEL)
        log.resume((tmp_path / "none", tmp_path), step)
        log.add(step + 1, SECOND + SECOND)
        (tmp_path / f"{step}").mkdir()
        log.write(tmp_path / f"{step}")
        load = read_document(tmp_path / f"{step}" / LOAD, ExpertLoad)
        assert (load.first_step, load.last_step) == (first, step + 1)
        assert load.layers[0].shares[0] == (0.375 if step == 1 else 0.25)
    (tmp_path / LOAD).write_text("{}")
    with pytest.raises(BadInput, match=LOAD):
        LoadLog(MODEL).resume((tmp_path,), 1)


@pytest.mark.parametrize(
    ("of_model", "changes", "problem"),
    [
        ({"num_hidden_layers": 3}, {}, "layer 2 of tiny-mixtral has no experts"),
        ({"num_local_experts": 8}, {}, "layer 0 of tiny-mixtral has 4 experts, not 8"),
        ({"num_hidden_layers": 1}, {}, "it has no groups of layer 1, which a run logs"),
        ({}, {"groups": ()}, "it has no groups of layer 0, which a run logs"),
    ],
)
def test_a_load_of_another_model_is_refused_in_one_line(
    of_model: dict[str, int], changes: dict[str, object], problem: str, tmp_path: Path
) -> None:
    model = tiny("mixtral", **{"num_local_experts": 4, "num_hidden_layers": 2} | of_model)
    log = LoadLog(model)
    log.add(1, [1.0] * sum(kind.experts.number for name in model.layers if (kind := model.types[name]).experts))
    log.write(tmp_path)
    load = read_document(tmp_path / LOAD, ExpertLoad)
    write_document(tmp_path / LOAD, replace(load, layers=tuple(replace(one, **changes) for one in load.layers)))
    with pytest.raises(BadInput, match=problem):
        LoadLog(MODEL).resume((tmp_path,), 1)


def test_models_without_experts_have_no_load(tmp_path: Path) -> None:
    log = LoadLog(tiny("llama"))
    log.add(1, ())
    log.write(tmp_path)
    assert list(tmp_path.iterdir()) == [] and expert_imbalance(tiny("llama"), ()) is UNSET


def test_a_run_logs_the_load_of_all_its_steps(tmp_path: Path) -> None:
    """It is stopped before the last, if it takes a second; its mean imbalance is that of the lines of its metrics."""
    write_document(tmp_path / "plan.json", with_shared_experts(random_plan(MODEL, 3, 2, "float32"), 3))
    command = ["run", str(tmp_path / "plan.json"), "--data", "random", "--steps", "20", "--out", str(tmp_path / "out")]
    command += ["--checkpoints", str(tmp_path / "checkpoints"), "--learning-rate", "0.05"]
    for more, status in ((["--max-time-s", "1"], (0, 75)), ([], (0,))):
        ended = forked_command([*command, *more])
        _, err = ended.communicate(timeout=300)
        assert ended.returncode in status, err
    load = read_document(tmp_path / "out" / LOAD, ExpertLoad)
    assert (load.first_step, load.last_step, [one.layer for one in load.layers]) == (1, 20, [0, 1])
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    mean = fmean(one.imbalance(4) for one in load.layers)
    assert mean == pytest.approx(fmean(line["expert_imbalance"] for line in lines)) and 1 < mean < 4
