"""A run is evaluated as it is asked to be, keeps its best checkpoint, and trains as without that."""

import json
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_worker
from random_plans import random_plan
from tiny_models import tiny

from shardwright.io import BadInput, read_document, write_document
from shardwright.types import Plan, RunResult
from shardwright_train.checkpoints.folders import Best, complete_checkpoints, folder_of_run, prune
from shardwright_train.commands.ranks import start_run
from shardwright_train.data.prepare import prepare
from shardwright_train.options import RunOptions, encode_job
from shardwright_train.training.loop import better

STEPS, EVERY = 7, 3


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    text = folder / "text"
    text.mkdir()
    for number in range(50):
        (text / f"{number}.txt").write_text(f"the quick brown fox {number} jumps over the lazy dog\n" * 8)
    prepare(str(text), "*.txt", 260, 1.0, folder / "data")
    write_document(folder / "plan.json", random_plan(tiny("llama", vocab_size=260), 3, 2, "float32"))
    return folder


def job_of(work: Path, name: str, **changes: Any) -> RunOptions:
    settings: dict[str, Any] = {
        "plan": work / "plan.json",
        "data": work / "data",
        "steps": STEPS,
        "checkpoint_every": 100,
        "keep_checkpoints": 1,
        "checkpoints": work / name / "checkpoints",
        "out": work / name,
        "valid_fraction": 0.1,
        "learning_rate": 0.01,
    }
    return RunOptions(**(settings | changes))


def run(work: Path, name: str, **changes: Any) -> list[dict[str, Any]]:
    (work / "job.json").write_bytes(encode_job(job_of(work, name, **changes)))
    run_worker("run_worker", [str(work / "job.json")], 2)
    return [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def evaluated(work: Path) -> list[dict[str, Any]]:
    return run(work, "evaluated", eval_every=EVERY, keep_best=True, eval_samples=21)


def test_lines_of_evaluated_steps_say_what_came_of_it(evaluated: list[dict[str, Any]]) -> None:
    found = {line["step"]: line["evaluation"] for line in evaluated if line["evaluation"] is not None}
    assert list(found) == [3, 6, 7]
    sequence = 16
    for one in found.values():
        assert (one["samples"], one["labels"]) == (21, 21 * sequence)
        assert one["perplexity"] == pytest.approx(2.718281828459045 ** one["loss"])
    assert found[6]["loss"] < found[3]["loss"] < evaluated[0]["loss"]


def test_steps_are_to_the_bit_those_of_a_run_without_evaluations(work: Path, evaluated: list[dict[str, Any]]) -> None:
    plain = run(work, "plain")
    assert [line["evaluation"] is not None for line in plain] == [False] * (STEPS - 1) + [True]
    assert plain[-1]["evaluation"]["samples"] > 21
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in plain] == [line[name] for line in evaluated]


def test_t5_learns_and_is_evaluated_on_corrupted_spans_alike_under_two_plans(work: Path) -> None:
    """The rows of the model behind the tokenizer's are its sentinels."""
    found = []
    for number in (1, 4):
        write_document(work / "t5.json", random_plan(tiny("t5", vocab_size=300), number, 2, "float32"))
        found.append(run(work, f"t5-{number}", plan=work / "t5.json", eval_every=EVERY, eval_samples=21))
    losses = [[(line["loss"], (line["evaluation"] or {"loss": 0.0})["loss"]) for line in lines] for lines in found]
    assert losses[0] == [pytest.approx(pair, rel=1e-4) for pair in losses[1]]
    assert losses[0][-1] < losses[0][EVERY - 1]


def test_the_best_checkpoint_is_kept_and_named_and_outlives_a_resume(
    work: Path, evaluated: list[dict[str, Any]]
) -> None:
    done = read_document(work / "evaluated" / "DONE.json", RunResult)
    folder = folder_of_run(work / "evaluated" / "checkpoints", read_document(work / "plan.json", Plan))
    losses = {line["step"]: line["evaluation"]["loss"] for line in evaluated if line["evaluation"]}
    assert done.best is not None and done.best.loss == min(losses.values()) == losses[done.best.step]
    assert Path(done.best.checkpoint).is_dir()
    kept = {path.name for path in complete_checkpoints(folder)}
    assert kept == {Path(done.best.checkpoint).name, f"step-{STEPS:08d}"}
    # What is evaluated on is another thing now: the least loss of before says nothing of it.
    run(work, "evaluated", steps=STEPS + 1, eval_every=EVERY, keep_best=True, eval_samples=20)
    again = read_document(work / "evaluated" / "DONE.json", RunResult)
    assert again.best is not None and again.best.step == STEPS + 1


def test_of_equal_losses_the_first_is_the_best_and_the_worse_change_nothing() -> None:
    from shardwright.types import Evaluation
    from shardwright_train.training.loop import ValidationData

    class Anything:
        sha256 = "0" * 64

    data, identity = ValidationData(Anything(), 1), ValidationData(Anything(), 1).sha256  # type: ignore[arg-type]
    assert identity != ValidationData(Anything(), 2).sha256  # type: ignore[arg-type]
    best: Best | None = None
    for step, loss in enumerate((2.0, 1.0, 1.0, 3.0), start=1):
        found = Evaluation(loss=loss, perplexity=None, labels=1, samples=1, time_s=0.0)
        best = better(best, found, step, data)
    assert best == Best(step=2, loss=1.0, data_sha256=identity) == better(best, None, 9, data)


def test_the_best_checkpoint_is_not_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        (tmp_path / f"step-{step:08d}").mkdir()
        (tmp_path / f"step-{step:08d}" / "checkpoint.json").write_text("{}")
    prune(tmp_path, 1, 0, kept={2})
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000004", "step-00000002"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"valid_fraction": 0.0, "eval_every": 5}, "--eval-every: there is nothing to evaluate on"),
        ({"valid_fraction": 0.0, "keep_best": True}, "--keep-best: there is nothing to evaluate on"),
        ({"valid_data": Path("nowhere")}, "cannot be used together: pass only one"),
        ({"valid_data": Path("nowhere"), "valid_fraction": 0.0}, "nowhere: is not a folder"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_starts(
    work: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        start_run(job_of(work, "refused", **changes))
    assert not (work / "refused").exists()
