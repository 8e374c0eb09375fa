"""Experts placed on ranks by their load change nothing but where rows go, and checkpoints keep them by number."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from forked_ranks import run_worker
from msgspec import UNSET
from msgspec.structs import replace
from placement_worker import Seen
from random_plans import random_plan
from tiny_models import tiny
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from shardwright.io import write_document
from shardwright.types import (
    DataParallel,
    ExpertStrategy,
    LayerStrategy,
    OptimizerName,
    Plan,
    Plans,
    Recompute,
    SequenceParallel,
    Strategy,
)
from shardwright_train.checkpoints.folders import complete_checkpoints
from shardwright_train.checkpoints.tensors import read_tensors

ZERO3, MEGATRON = DataParallel.ZERO3, SequenceParallel.MEGATRON


def plan_of(family: str, optimizer: OptimizerName, stages: int, experts: ExpertStrategy, **layer: object) -> Plan:
    """Four ranks that shard the experts of every layer with any alike; embedding and head are replicated."""
    model = tiny(family, **({"num_local_experts": 8} if family == "mixtral" else {}))
    drawn = random_plan(model, 0, 4, "float32", stages=stages)
    outer = Strategy(tp_size=1, dp_size=4 // stages)
    fields = {"tp_size": 1, "dp_size": 4 // stages} | layer
    layers = tuple(
        LayerStrategy(type=name, experts=experts if model.types[name].experts else UNSET, **fields)  # type: ignore[arg-type]
        for name in model.layers
    )
    name = f"{family} {optimizer}"
    return replace(drawn, name=name, optimizer=optimizer, embedding=outer, head=outer, layers=layers)


PLANS = (plan_of("deepseek_v3", "muon", 1, ExpertStrategy(ep_size=2, data_parallel=ZERO3), recompute=Recompute.FULL),)
MORE = (
    plan_of("qwen3_moe", "adamw", 2, ExpertStrategy(ep_size=2), recompute=Recompute.SELECTIVE),
    plan_of("mixtral", "adamw-8bit", 1, ExpertStrategy(ep_size=2, etp_size=2)),
    plan_of("gpt_oss", "sgd", 1, ExpertStrategy(ep_size=4), tp_size=2, dp_size=2, sequence_parallel=MEGATRON),
    plan_of("llama4_text", "adamw-bf16", 2, ExpertStrategy(ep_size=2)),
    plan_of("deepseek_v2", "lion", 1, ExpertStrategy(ep_size=2, data_parallel=DataParallel.ZERO2)),
)  # fmt: skip
ROUNDED = "gpt_oss"
"""Gradients of biases are products over all rows of a rank, whose order of sums placing changes."""


def seen_in(folder: Path, plans: tuple[Plan, ...]) -> dict[str, Seen]:
    write_document(folder / "plans.json", Plans(plans=plans))
    run_worker("placement_worker", [str(folder / "plans.json"), str(folder), str(folder / "seen.json")], 4)
    return {name: Seen(*one) for name, one in json.loads((folder / "seen.json").read_bytes()).items()}


def tensors_in(folder: Path) -> Mapping[str, Tensor]:
    """All tensors of a folder's checkpoint, whole."""
    (checkpoint,) = complete_checkpoints(folder)
    saved = HuggingFaceStorageReader(str(checkpoint)).read_metadata().state_dict_metadata
    found = {name: torch.zeros(one.size, dtype=one.properties.dtype) for name, one in saved.items()}  # type: ignore[union-attr]
    read_tensors(checkpoint, found)
    return found


def check(folder: Path, plans: tuple[Plan, ...]) -> None:
    """Ranks get the rows that the load predicts, the fullest fewer than before, and every bit is as without."""
    for name, seen in seen_in(folder, plans).items():
        assert seen.groups, f"{name}: nothing is placed"
        for layer in seen.groups:
            sums = [(seen.got_before[layer], seen.consecutive[layer]), (seen.got[layer], seen.predicted[layer])]
            for got, predicted in sums:  # to a factor: ranks of one expert's features, replays
                assert [n * sum(predicted) for n in got] == [n * sum(got) for n in predicted], (name, layer)
            assert max(seen.got[layer]) < max(seen.got_before[layer]), (name, layer)
        plain, placed, plain_after, placed_after = seen.outcomes
        assert placed == pytest.approx(plain, rel=1e-6)
        assert plain_after == pytest.approx(plain[2:], rel=1e-6) == placed_after
        pairs = (
            ("plain 1", "placed 1"),
            ("plain 2", "placed 2"),
            ("plain 2", "plain after"),
            ("plain 2", "placed after"),
        )
        for pair in pairs:
            one, other = (tensors_in(folder / name / each) for each in pair)
            assert one.keys() == other.keys()
            same = torch.allclose if name.startswith(ROUNDED) else torch.equal
            assert [n for n in one if not same(one[n], other[n])] == [], (name, pair)


def test_placed_experts_get_the_predicted_rows_and_runs_resume_from_one_placement_in_another(tmp_path: Path) -> None:
    check(tmp_path, PLANS)


@pytest.mark.long
def test_so_do_other_families_and_optimizers(tmp_path: Path) -> None:
    check(tmp_path, MORE)
