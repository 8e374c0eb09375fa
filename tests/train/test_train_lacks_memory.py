"""A run that a device lacks memory for ends in one line: what was held, what was predicted, which plan would fit."""

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from faults import lack_memory_in_backward_2
from forked_command import Fault, forked_command
from random_plans import random_plan
from tiny_models import LAYERS, SEQUENCE_LENGTH, tiny

from shardwright.io import write_document
from shardwright.types import Estimate, PipelineStage, Plan, Prediction, RunnerUp, Schedule, StagePrediction
from shardwright_train.data.prepare import prepare
from shardwright_train.models.base import family_named
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.runner import mask_bytes
from shardwright_train.training.stopping import _fitting_plan, mask_memory

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
    assert _fitting_plan(found, found.estimate.stages[0], needed_gib * GIB, plan, Path("p.json")) == named


def test_a_prediction_without_runners_up_says_how_to_have_some() -> None:
    plan = plan_of(4)
    found = prediction(plan, estimate(4.0))
    said = _fitting_plan(found, found.estimate.stages[0], 5 * GIB, plan, Path("p.json"))
    assert said == "search with --runners-up, which names plans that may fit, or with a lower memory_gib"


def context_of(plan: Plan, rank: int = 0) -> RankContext:
    family, cpu = family_named(plan.model.family, "test"), torch.device("cpu")
    return RankContext(
        plan=plan, family=family, rank=rank, groups=Groups("cpu"), attention="sdpa", device=cpu, seed=None
    )


@pytest.mark.parametrize(
    ("schedule", "microbatches"), [(Schedule.GPIPE, 6), (Schedule.ONE_F_ONE_B, 2), (Schedule.INTERLEAVED_1F1B, 4)]
)
def test_a_rank_holds_a_mask_of_each_microbatch_between_its_first_pass_and_its_last(
    schedule: Schedule, microbatches: int
) -> None:
    """Interleaved, the second group of two begins before the first one's last passes."""
    plan, samples = plan_of(1, stages=2), 2
    chunks = 2 if schedule is Schedule.INTERLEAVED_1F1B else 1
    cuts = range(0, LAYERS + 1, LAYERS // (2 * chunks))
    ranges = list(pairwise(cuts))
    plan = msgspec.structs.replace(
        plan,
        schedule=schedule,
        num_microbatches=6,
        global_batch_size=6 * samples,
        stages=tuple(PipelineStage(ranks=(rank,), layers=tuple(ranges[rank::2])) for rank in range(2)),
    )
    assert mask_bytes(context_of(plan)) == microbatches * samples * SEQUENCE_LENGTH**2 * 4
    # One for each window of its blocks: every second of Gemma 2's has one.
    model = tiny("gemma2")
    layers = (msgspec.structs.replace(x, type=kind) for x, kind in zip(plan.layers, model.layers, strict=True))
    windowed = context_of(msgspec.structs.replace(plan, model=model, layers=tuple(layers)))
    assert [window for window, _ in windowed.masks] == ([6] if chunks == 2 else [6, None])
    assert mask_bytes(windowed) == len(windowed.masks) * mask_bytes(context_of(plan))


@pytest.mark.parametrize(
    ("memory_gib", "said"),
    [
        (4, "2048.0 MiB with the 2048.0 predicted, of 4096.0 of its device"),
        (1, "2048.0 MiB with the 2048.0 predicted, 1024.0 more than the 1024.0 of its device"),
    ],
)
def test_masks_that_no_plan_counts_are_told_of(memory_gib: int, said: str) -> None:
    plan = plan_of(memory_gib)
    told = mask_memory(context_of(plan), prediction(plan, estimate(2.0)))
    assert told == f"--reset-attention-mask: masks take 0.0 MiB of rank 0, which its plan does not count: {said}"
    assert mask_memory(context_of(plan), None) == told.partition(": 2048")[0]


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
    options += ["--max-restarts", 3, "--reset-attention-mask"]  # it would come again
    run = forked_command(["run", tmp_path / "plan.json", *options], fault=Fault(1, lack_memory_in_backward_2))
    said = run.communicate(200)[1]
    last = said.rstrip("\n").rpartition("\n")[2]
    assert (run.wait(0), said.count("error: ")) == (4, 1), said
    assert said.count("warning: --reset-attention-mask: masks take ") == 1, "once on all ranks"
    assert last.startswith(f"error: rank 1: out of memory {where}") and ": 2.50 GiB requested; held 0.00 GiB (" in last
    predicted = "predicted 2.00 GiB (parameters 0.40, gradients 0.40, optimizer 0.40, others 0.80)"
    assert f"{predicted}; runner-up 2 (small) of {tmp_path}/plan.prediction.json fits: predicted 1.00 GiB" in last
    assert not list((tmp_path / "kept").rglob("step-*"))
