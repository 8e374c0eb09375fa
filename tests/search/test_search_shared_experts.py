"""Plans whose ranks share experts out: what cannot price or express them says so in one line."""

import pytest
from msgspec.structs import replace

from shardwright_formats.display.plan_words import strategy_words
from shardwright_formats.io import BadInput
from shardwright_formats.types import (
    Cluster,
    DataParallel,
    ExpertStrategy,
    LayerStrategy,
    NodeGroup,
    NodeType,
    PipelineStage,
    Plan,
    Schedule,
    Strategy,
)
from shardwright_models.description import model_of_config
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.interop.registry import TARGETS

CONFIG = {
    "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 4,
}  # fmt: skip
EXPERTS = ExpertStrategy(ep_size=2, data_parallel=DataParallel.ZERO3)


@pytest.fixture
def plan() -> Plan:
    """Two layers on four ranks, of which the second has its experts shared out by twos."""
    model = model_of_config(CONFIG, "m", 16, "config.json")
    node = NodeType(device="NVIDIA H100 80GB HBM3", devices_per_node=4, memory_bytes=1 << 34)
    cluster = Cluster(name="c", nodes=(NodeGroup(node_type="n", count=1),), node_types={"n": node})
    sharding = {"tp_size": 1, "dp_size": 4, "data_parallel": DataParallel.ZERO2}
    layer = LayerStrategy(type="sparse", **sharding)  # type: ignore[arg-type]
    shared = LayerStrategy(type="sparse", **sharding, experts=EXPERTS)  # type: ignore[arg-type]
    outer = Strategy(**sharding)  # type: ignore[arg-type]
    return Plan(
        name="p", model=model, cluster=cluster, global_batch_size=8, num_microbatches=1, schedule=Schedule.ONE_F_ONE_B,
        stages=(PipelineStage(ranks=(0, 1, 2, 3), layers=((0, 2),)),), embedding=outer, head=outer,
        layers=(layer, shared),
    )  # fmt: skip


def test_a_plan_that_shares_experts_out_has_no_price_yet(plan: Plan) -> None:
    with pytest.raises(BadInput, match=r"plan p: layers\[1\] shares experts out among ranks, which has no price yet"):
        evaluate(plan, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_no_system_is_told_of_experts_that_ranks_share_out(plan: Plan, target: str) -> None:
    with pytest.raises(BadInput, match=r"cannot express (layers\[1\], whose ranks share experts out|a mixtral model)"):
        TARGETS[target].export(plan, "plan.json")


def test_a_sharing_of_experts_is_told_in_words(plan: Plan) -> None:
    assert strategy_words(plan.layers[1]) == "tp1 x dp4 zero2 experts ep2 zero3"
    both = replace(plan.layers[1], experts=replace(EXPERTS, etp_size=2))
    assert strategy_words(both) == "tp1 x dp4 zero2 experts ep2 etp2"
