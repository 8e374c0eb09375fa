"""Plans with context parallelism are priced; what cannot express them says so in one line."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from shardwright_estimate.devices import Efficiencies, rates_of, read_devices
from shardwright_estimate.profile import hardware_profile, model_profile
from shardwright_estimate.settings import ProfileSettings
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
    Recompute,
    Schedule,
    SequenceParallel,
    Strategy,
)
from shardwright_models.description import model_of_config
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import Profiles, index_profiles
from shardwright_search.interop.registry import TARGETS

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
SETTINGS = ProfileSettings(
    tp_sizes=(1, 2), sequence_parallel=tuple(SequenceParallel), recompute=tuple(Recompute), micro_batch_sizes=(1, 2, 4)
)


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


def profiles_of(plan: Plan, *lengths: int) -> Profiles:
    """Estimates at some lengths."""
    models = [(Path(str(n)), model_of_config(CONFIG, "m", n, "config.json")) for n in lengths]
    table, device = read_devices(), plan.cluster.node_types["n"].device
    rates, settings = rates_of(table, device), replace(SETTINGS, precision=plan.precision)
    made = model_profile(models, settings, rates, Efficiencies(), table.revised).profile
    hardware = hardware_profile(plan.cluster, [rates], Efficiencies(), None, table.revised)
    return index_profiles(hardware, Path("h.h5"), made, Path("m.h5"))


def test_a_plan_with_context_parallelism_is_priced_by_estimates_of_two_lengths(plan: Plan) -> None:
    priced = evaluate(plan, profiles_of(plan, 16, 8))
    assert [line for line in priced.warnings if line.startswith("derived")] == [
        "derived: block of cp_size 2: from points of sequence_length 8"
    ]
    assert priced.estimate.simulated_step_time_s > 0


def test_estimates_of_one_length_do_not_price_it(plan: Plan) -> None:
    with pytest.raises(BadInput, match=r"no curve over lengths of block .*: profile the model at two lengths"):
        evaluate(plan, profiles_of(plan, 16))


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_no_system_is_told_of_context_parallelism(plan: Plan, target: str) -> None:
    with pytest.raises(BadInput, match=r"cannot express layers\[1\]: cp_size above 1"):
        TARGETS[target].export(plan, "plan.json")


def test_context_parallelism_is_told_in_words(plan: Plan) -> None:
    assert strategy_words(plan.layers[1]) == "tp1 x cp2 x dp2 ddp context ring"
