"""A run that a device lacks memory for ends in one line: what was held, what was predicted, which plan would fit."""

from pathlib import Path

import msgspec
import pytest
from faults import lack_memory_in_backward_2
from forked_command import Fault, forked_command
from random_plans import random_plan
from tiny_models import tiny

from shardwright_formats.io.json import write_document
from shardwright_formats.types.plan import Plan
from shardwright_formats.types.prediction import Estimate, Prediction, RunnerUp, StagePrediction
from shardwright_train.data.prepare import prepare
from shardwright_train.training.out_of_memory import _what_fits

GIB = 2**30


def estimate(*memory_gib: float) -> Estimate:
    terms = ("parameters", "gradients", "optimizer", "activations", "process")
    stages = tuple(
        StagePrediction(
            time_s=1.0,
            time_terms_s={},
            memory_bytes=int(gib * GIB),
            memory_terms_bytes=dict.fromkeys(terms, int(gib * GIB / 5)),
        )
        for gib in memory_gib
    )
    return Estimate(
        simulated_step_time_s=memory_gib[0],
        simulated_lower_bound_s=0.0,
        objective_s=1.0,
        samples_per_s=1.0,
        usd_per_step=None,
        stages=stages,
        timeline=(),
    )


def prediction(plan: Plan, own: Estimate, **others_gib: float) -> Prediction:
    """Of a plan and runners-up by name."""
    others = tuple(
        RunnerUp(plan=msgspec.structs.replace(plan, name=name), estimate=estimate(gib))
        for name, gib in others_gib.items()
    )
    return Prediction(
        plan_sha256=plan.sha256,
        memory_budget_bytes=None,
        estimate=own,
        proof=None,
        runners_up=others,
        warnings=(),
        inputs_sha256={},
    )


def plan_of(memory_gib: int, stages: int = 1) -> Plan:
    plan = random_plan(tiny("llama", vocab_size=260), 1, 2, "float32", stages=stages)
    (node,) = plan.cluster.node_types.values()
    node = msgspec.structs.replace(node, memory_bytes=memory_gib * GIB)
    return msgspec.structs.replace(plan, cluster=msgspec.structs.replace(plan.cluster, node_types={"cpu": node}))


@pytest.mark.parametrize(
    ("needed_gib", "named"),
    [
        (
            3,
            "runner-up 2 (b) of p.prediction.json fits: predicted 3.90 GiB, 3.9 s a step",
        ),  # predicted too high: as it is
        (5, "runner-up 3 (c) of p.prediction.json fits: predicted 3.10 GiB, 3.1 s a step"),  # a quarter too low
        (8, "none of its runners-up would fit: search with a lower memory_gib"),  # 3.1 would be 6.2
    ],
)
def test_the_best_runner_up_that_would_fit_were_it_as_wrong_is_named(needed_gib: int, named: str) -> None:
    plan = plan_of(4)
    found = prediction(plan, estimate(4.0), a=4.0, b=3.9, c=3.1)
    assert _what_fits(found, found.estimate.stages[0], needed_gib * GIB, plan, Path("p.json")) == named


@pytest.mark.parametrize(("stages", "where"), [(1, "in step "), (2, "while each pipeline stage is tried alone: ")])
def test_a_run_that_lacks_memory_says_what_was_held_and_predicted_and_what_fits(
    tmp_path: Path, stages: int, where: str
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    prepare(str(tmp_path / "text"), "*.txt", 260, 1.0, tmp_path / "data")
    plan = plan_of(4, stages)
    assert stages == 1 or plan.num_microbatches > 1
    write_document(tmp_path / "plan.json", plan)
    own = estimate(*(2.0 for _ in range(stages)))
    write_document(tmp_path / "plan.prediction.json", prediction(plan, own, large=3.0, small=1.0))
    folders = {"data": tmp_path / "data", "checkpoints": tmp_path / "kept", "out": tmp_path / "out", "steps": 9}
    options = [word for name, value in folders.items() for word in (f"--{name}", value)]
    options += ["--max-restarts", 3]  # it would come again
    run = forked_command(["run", tmp_path / "plan.json", *options], fault=Fault(1, lack_memory_in_backward_2))
    said = run.communicate(200)[1]
    last = said.rstrip("\n").rpartition("\n")[2]
    assert (run.wait(0), said.count("error: ")) == (4, 1), said
    assert last.startswith(f"error: rank 1: out of memory {where}") and ": 2.50 GiB asked for; held 0.00 GiB (" in last
    predicted = "predicted 2.00 GiB (parameters 0.40, gradients 0.40, optimizer 0.40, others 0.80)"
    assert f"{predicted}; runner-up 2 (small) of {tmp_path}/plan.prediction.json fits: predicted 1.00 GiB" in last
    assert not list((tmp_path / "kept").rglob("step-*"))
