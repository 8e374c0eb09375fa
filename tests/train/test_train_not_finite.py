"""A loss that is not a number stops all ranks together, says where it came from, and is saved nowhere."""

import json
from pathlib import Path

import msgspec
from faults import BAD_STEP, POISONED_LAYER, poison_a_layer
from forked_command import Fault, forked_command
from random_plans import random_plan
from tiny_models import tiny

from shardwright.io import write_document
from shardwright.types import DataParallel, LayerStrategy, Plan, Recompute, Strategy
from shardwright_train.checkpoints.folders import folder_of_run, latest_checkpoint
from shardwright_train.data.prepare import prepare


def replicated(plan: Plan) -> Plan:
    """Both ranks hold everything, so that only one of them is hit."""
    sharding = {"tp_size": 1, "dp_size": 2, "data_parallel": DataParallel.DDP}
    layers = tuple(LayerStrategy(type="block", recompute=Recompute.FULL, **sharding) for _ in plan.layers)
    return msgspec.structs.replace(plan, embedding=Strategy(**sharding), head=Strategy(**sharding), layers=layers)


def test_a_loss_that_is_no_number_stops_all_ranks_before_anything_is_saved(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    prepare(str(tmp_path / "text"), "*.txt", 260, 1.0, tmp_path / "data")
    plan = replicated(random_plan(tiny("llama", vocab_size=260), 1, 2, "float32", stages=1))
    write_document(tmp_path / "plan.json", plan)
    checkpoints = tmp_path / "checkpoints"
    command = ("run", tmp_path / "plan.json", "--data", tmp_path / "data", "--steps", 6, "--checkpoint-every", 1)
    options = ("--checkpoints", checkpoints, "--out", tmp_path / "out")
    run = forked_command((*command, *options), fault=Fault(1, poison_a_layer))
    said = run.communicate(170)[1]
    assert run.wait(0) == 4, said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    where = f"first in the output of layers[{POISONED_LAYER}] on rank 1, microbatch 0"
    assert errors == [f"error: step {BAD_STEP}: loss nan, gradient norm nan: {where}: nothing of this step was saved"]
    folder = folder_of_run(checkpoints, plan)
    latest = latest_checkpoint(folder)
    assert latest is not None and latest.name == f"step-{BAD_STEP - 1:08d}"
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, BAD_STEP))
    assert not (tmp_path / "out" / "DONE.json").exists()
