"""A checkpoint holds every parameter and moment once, whatever the plan, and any other plan goes on from it."""

from pathlib import Path

import msgspec
import pytest
from forked_ranks import run_worker
from random_plans import random_plan
from run_resumes import TOLERANCE, resumed, saved
from tiny_models import tiny

from shardwright.types import DataParallel, LayerStrategy, Plan, SequenceParallel, Strategy


def plan_of(name: str, **sharding: object) -> Plan:
    """One strategy for all layers, embedding and head of a model on four ranks."""
    plan = random_plan(tiny("llama", vocab_size=66), 0, 4, stages=1)
    outer = Strategy(**sharding)  # type: ignore[arg-type]
    layers = tuple(LayerStrategy(type="block", **sharding) for _ in plan.layers)  # type: ignore[arg-type]
    return msgspec.structs.replace(plan, name=name, embedding=outer, head=outer, layers=layers)


PLANS = (
    plan_of("groups", tp_size=1, dp_size=4, data_parallel=DataParallel.ZERO3, shard_size=2),
    plan_of("all ranks", tp_size=1, dp_size=4, data_parallel=DataParallel.ZERO3),
    plan_of("replicas", tp_size=2, dp_size=2, sequence_parallel=SequenceParallel.MEGATRON),
    plan_of(
        "other groups",
        tp_size=2,
        dp_size=2,
        data_parallel=DataParallel.ZERO2,
        shard_size=2,
        sequence_parallel=SequenceParallel.ULYSSES,
    ),
    plan_of("positions", tp_size=1, cp_size=4, dp_size=1, data_parallel=DataParallel.ZERO3),
    plan_of("positions and heads", tp_size=2, cp_size=2, dp_size=1, sequence_parallel=SequenceParallel.ULYSSES),
    plan_of("padded vocabulary", tp_size=4, dp_size=1, sequence_parallel=SequenceParallel.MEGATRON),
    plan_of("padded and sharded", tp_size=4, dp_size=1, data_parallel=DataParallel.ZERO3),
)
"""66 tokens are not the same on four ranks each."""


@pytest.mark.long
def test_replicas_of_shards_are_saved_once_and_other_plans_go_on_from_them(tmp_path: Path) -> None:
    told = saved(tmp_path, run_worker, [*PLANS[:2], PLANS[4]])
    assert max(one.error for one in resumed(tmp_path, run_worker, PLANS[1:], told)) < TOLERANCE
    # Halves, each once, take no more than quarters do.
    groups, alone = (sum(f.stat().st_size for f in (tmp_path / plan.name).rglob("*.safetensors")) for plan in PLANS[:2])
    assert groups < alone
