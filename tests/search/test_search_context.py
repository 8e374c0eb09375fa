"""Plans with context parallelism: what cannot price or express them says so in one line."""

import pytest
from msgspec.structs import replace

from shardwright_formats.display.plan_words import strategy_words
from shardwright_formats.io import BadInput
from shardwright_formats.types import (
    Cluster,
    ContextParallel,
    LayerStrategy,
    NodeGroup,
    NodeType,
    PipelineStage,
    Plan,
    Precision,
    Schedule,
    Strategy,
)
from shardwright_models.description import model_of_config
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.interop.registry import TARGETS

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip


@pytest.fixture
def plan() -> Plan:
    """Two layers on four ranks, which share out the positions of the second by twos."""
    model = model_of_config(CONFIG, "m", 16, "config.json")
    node = NodeType(device="NVIDIA H100 80GB HBM3", devices_per_node=4, memory_bytes=1 << 34)
    cluster = Cluster(name="c", nodes=(NodeGroup(node_type="n", count=1),), node_types={"n": node})
    outer, layer = Strategy(tp_size=1, dp_size=4), LayerStrategy(type="block", tp_size=1, dp_size=4)
    return Plan(
        name="p", model=model, cluster=cluster, global_batch_size=8, num_microbatches=1, schedule=Schedule.ONE_F_ONE_B,
        precision=Precision(compute="bfloat16"), stages=(PipelineStage(ranks=(0, 1, 2, 3), layers=((0, 2),)),),
        embedding=outer, head=outer,
        layers=(layer, replace(layer, cp_size=2, dp_size=2, context=ContextParallel.RING)),
    )  # fmt: skip


def test_a_plan_with_context_parallelism_has_no_price_yet(plan: Plan) -> None:
    with pytest.raises(BadInput, match=r"plan p: layers\[1\] has cp_size 2, which has no price yet"):
        evaluate(plan, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_no_system_is_told_of_context_parallelism(plan: Plan, target: str) -> None:
    with pytest.raises(BadInput, match=r"cannot express layers\[1\]: cp_size above 1"):
        TARGETS[target].export(plan, "plan.json")


def test_context_parallelism_is_told_in_words(plan: Plan) -> None:
    assert strategy_words(plan.layers[1]) == "tp1 x cp2 x dp2 ddp context ring"
