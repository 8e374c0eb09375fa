"""Memory of plans whose ranks share the positions of a sample out: what is predicted, against steps on fake tensors."""

from typing import Any

import pytest
from estimated_memory import CLUSTER, FLOAT32, MIXED, estimated_profiles, held_bytes
from rest_long import rest_long

from shardwright.models.description import model_of_config
from shardwright.types import (
    Attention,
    ContextParallel,
    DataParallel,
    LayerStrategy,
    PipelineStage,
    Plan,
    Precision,
    Recompute,
    Schedule,
    SequenceParallel,
    Strategy,
)
from shardwright_search.cost_model.profiles import Profiles
from shardwright_train.dry_run import simulate_step
from shardwright_train.models.base import family_named

LENGTH = 512
CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
"""Of twelve layers, since the buffers of one are counted beside all that it keeps, part of which is freed by then."""
MODEL, *SHORTER = (model_of_config(CONFIG, "m", LENGTH // parts, "config.json") for parts in (1, 2, 4))
RING: dict[str, Any] = {"context": ContextParallel.RING}
ULYSSES, MEGATRON = SequenceParallel.ULYSSES, SequenceParallel.MEGATRON
CASES: tuple[tuple[int, int, Precision, dict[str, Any]], ...] = (
    (4, 1, FLOAT32, {}),
    (2, 2, MIXED, {"sequence_parallel": MEGATRON, **RING}),
    (2, 1, FLOAT32, {"recompute": Recompute.SELECTIVE, **RING}),
    (1, 1, MIXED, {}),
    (2, 1, MIXED, {}),
    (2, 1, FLOAT32, RING),
    (4, 1, MIXED, RING),
    (2, 2, MIXED, {"sequence_parallel": MEGATRON}),
    (2, 2, FLOAT32, {"sequence_parallel": ULYSSES}),
    (2, 2, FLOAT32, {"sequence_parallel": ULYSSES, **RING}),
    (2, 1, MIXED, {"recompute": Recompute.FULL}),
    (4, 1, FLOAT32, {"recompute": Recompute.FULL, **RING}),
    (2, 1, MIXED, {"recompute": Recompute.SELECTIVE}),
    (2, 1, MIXED, {"data_parallel": DataParallel.ZERO3}),
)


def plan_of(cp_size: int, tp_size: int, precision: Precision, fields: dict[str, Any]) -> Plan:
    """Three microbatches of eight samples on four ranks."""
    sharding: dict[str, Any] = {"tp_size": tp_size, "cp_size": cp_size, "dp_size": 4 // tp_size // cp_size}
    layer = LayerStrategy(type="block", **sharding, **fields)
    kept = {name: fields[name] for name in ("sequence_parallel", "data_parallel") if name in fields}
    outer = Strategy(**sharding, **kept)
    return Plan(
        name="p", model=MODEL, cluster=CLUSTER, global_batch_size=24, num_microbatches=3,
        schedule=Schedule.ONE_F_ONE_B, precision=precision, attention=Attention.SDPA,
        stages=(PipelineStage(ranks=(0, 1, 2, 3), layers=((0, len(MODEL.layers)),)),), embedding=outer, head=outer,
        layers=(layer,) * len(MODEL.layers),
    )  # fmt: skip


@pytest.fixture(scope="module")
def profiles() -> dict[Precision, Profiles]:
    return {each: estimated_profiles(each, (2, 4, 8), MODEL, *SHORTER) for each in (MIXED, FLOAT32)}


@pytest.mark.parametrize(("cp_size", "tp_size", "precision", "fields"), rest_long(2, CASES))
def test_memory_of_shared_positions_is_predicted_within_four_percent(
    cp_size: int, tp_size: int, precision: Precision, fields: dict[str, Any], profiles: dict[Precision, Profiles]
) -> None:
    plan = plan_of(cp_size, tp_size, precision, fields)
    step = simulate_step(plan, 0, family_named("llama", "test"), "sdpa")
    assert held_bytes(plan, profiles[plan.precision]) == pytest.approx(step.peak_bytes, rel=0.04)
