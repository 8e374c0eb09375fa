"""Plans with context parallelism are priced; what cannot express them says so in one line."""

from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import msgspec
import pytest
from made_up import make_request
from msgspec.structs import replace

from shardwright.devices.table import read_devices
from shardwright.display.plan_words import strategy_words
from shardwright.estimate.machines import Efficiencies, rates_of
from shardwright.estimate.profile import hardware_profile, model_profile
from shardwright.estimate.settings import ProfileSettings
from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.types import (
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
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import Profiles, index_profiles
from shardwright_search.options import System
from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.space.choices import shardings
from shardwright_search.space.configurations import narrowed
from shardwright_search.space.request import OuterSpace, left_out, runnable
from shardwright_search.systems.registry import SYSTEMS

FILE = Path("s.json")

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
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


def profiles_of(plan: Plan, *lengths: int, config: Mapping[str, object] = CONFIG) -> Profiles:
    """Estimates at some lengths."""
    models = [(Path(str(n)), model_of_config(config, "m", n, "config.json")) for n in lengths]
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
    said = "assumed: samples of one document each"
    assert len([line for line in priced.warnings if line.startswith(said)]) == 1
    ring = "assumed: sends of a ring overlap with nothing: h.h5 has no overlap of sends"
    assert ring in priced.warnings
    gathered = replace(plan, layers=(plan.layers[0], replace(plan.layers[1], context=ContextParallel.GATHER)))
    assert ring not in evaluate(gathered, profiles_of(plan, 16, 8)).warnings
    whole = replace(plan, layers=(plan.layers[0], plan.layers[0]))
    assert not any(line.startswith(said) for line in evaluate(whole, profiles_of(plan, 16)).warnings)


def test_estimates_of_one_length_do_not_price_it(plan: Plan) -> None:
    with pytest.raises(BadInput, match=r"no curve over lengths of block .*: profile the model at two sequence_lengths"):
        evaluate(plan, profiles_of(plan, 16))


@pytest.mark.parametrize(
    ("target", "refused"),
    [
        ("deepspeed", r"DeepSpeed cannot express layers\[1\]: cp_size above 1"),
        ("galvatron", None),
        ("megatron", r"Megatron-LM cannot express layers\[1\]: cp_size 2, where layers\[0\] has 1"),
        ("torchtitan", r"torchtitan cannot express layers\[1\]: cp_size 2, where layers\[0\] has 1"),
        ("accelerate", r"accelerate cannot express layers\[1\]: cp_size 2, where layers\[0\] has 1"),
    ],
)
def test_degrees_of_each_layer_are_exported_to_galvatron_alone(plan: Plan, target: System, refused: str | None) -> None:
    if refused is None:
        assert '"cp_sizes_enc": "1,2"' in SYSTEMS[target].export(plan, "plan.json").text
        return
    with pytest.raises(BadInput, match=refused):
        SYSTEMS[target].export(plan, "plan.json")


def test_context_parallelism_is_told_in_words(plan: Plan) -> None:
    assert strategy_words(plan.layers[1]) == "tp1 x cp2 x dp2 ddp context ring"


ASKED = {
    "global_batch_size": 2, "num_microbatches": [1], "pp_sizes": [1], "recompute": ["none"], "tp_sizes": [1],
    "data_parallel": ["zero3"], "cp_sizes": [1, 2, 4],
}  # fmt: skip


def searched(plan: Plan, profiles: Profiles, **asked: object) -> SearchAnswer:
    request = make_request(**ASKED | {"precision": {"compute": "bfloat16"}} | asked)
    answer = find_best(request, plan.model, plan.cluster, profiles, FILE, lambda line: None)
    assert isinstance(answer, SearchAnswer)
    return answer


def test_strategies_are_those_of_all_degrees_that_divide_a_stage(plan: Plan) -> None:
    request = make_request(**ASKED | {"tp_sizes": [1, 2], "sequence_parallel": ["none", "ulysses"]})
    layers = shardings(request, plan.model, "block", 4)
    degrees = Counter((s.tp_size, s.cp_size, s.dp_size, s.sequence_parallel.value, s.context.value) for s in layers)
    assert set(degrees.values()) == {1}
    assert {each[:3] for each in degrees} == {(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1)}
    assert {each[1:] for each in degrees if each[1] == 1} == {(1, 4, "none", "gather"), (1, 2, "none", "gather"),
                                                             (1, 2, "ulysses", "gather")}  # fmt: skip
    assert degrees[1, 4, 1, "none", "gather"] == degrees[1, 4, 1, "none", "ring"] == 1
    outer = shardings(replace(request, head=OuterSpace(cp_sizes=(2,))), plan.model, "head", 4)
    assert {strategy.cp_size for strategy in outer} == {2}


def test_long_samples_of_fewer_than_there_are_ranks_are_shared_out(plan: Plan) -> None:
    """Two samples keep two of four ranks busy, but for context parallelism."""
    profiles = profiles_of(plan, 16, 8, 4)
    with pytest.raises(BadInput, match="no strategy divides the batch, the model and the devices"):
        searched(plan, profiles, cp_sizes=[1])
    answer = searched(plan, profiles)
    assert {layer.cp_size for layer in answer.chosen.plan.layers} <= {2, 4}
    every = [
        evaluate(
            replace(answer.chosen.plan, embedding=first, layers=tuple(layers), head=last), profiles, timeline=False
        )
        for first, *layers, last in product(
            *(
                [s for s in shardings(make_request(**ASKED), plan.model, name, 4) if s.cp_size > 1]
                for name in ("embedding", *plan.model.layers, "head")
            )
        )
    ]
    assert len(every) > 50
    assert answer.optimum_s == pytest.approx(min(each.objective_ps for each in every) / 1e12, rel=1e-12)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"cp_sizes": [2, 3]}, "2 does not divide 3"),
        ({"cp_sizes": [2], "head": {"cp_sizes": [3]}}, "2 does not divide 3"),
    ],
)
def test_degrees_that_one_plan_cannot_have_are_refused(asked: dict[str, object], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        make_request(**ASKED | asked)


def test_degrees_that_no_stage_has_and_spaces_without_any_are_told(plan: Plan) -> None:
    with pytest.raises(BadInput, match="cp_sizes: 3 does not divide the number of devices, 4"):
        searched(plan, profiles_of(plan, 16), cp_sizes=[3])
    request = narrowed(make_request(**ASKED | {"disable": ["context_parallel"]}), plan.cluster)
    assert request.cp_sizes == (1,)


BERT = {
    "model_type": "bert", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 8, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def lines_without(plan: Plan, **asked: object) -> list[str]:
    """What a request asks for in vain."""
    return list(left_out(make_request(**ASKED | asked), plan.model, plan.cluster))


def of_heads(plan: Plan, features: int, device: str) -> Plan:
    """The plan of a Llama with heads of so many features, on a device."""
    heads = {"hidden_size": 64, "num_attention_heads": 64 // features, "num_key_value_heads": 64 // features}
    (node,) = plan.cluster.node_types.values()
    cluster = replace(plan.cluster, node_types={"n": replace(node, device=device)})
    return replace(plan, model=model_of_config(CONFIG | heads, "m", 16, "config.json"), cluster=cluster)


def of_bert(plan: Plan, **changes: object) -> Plan:
    """The plan of a BERT of as many layers, whose positions all stay together."""
    model = model_of_config(BERT | changes, "m", 16, "config.json")
    return replace(plan, model=model, layers=(plan.layers[0], plan.layers[0]))


def test_no_ring_is_searched_for_a_family_that_adds_masks(plan: Plan) -> None:
    bert = of_bert(plan)
    asked = runnable(make_request(**ASKED), bert.model, bert.cluster, FILE)
    assert (asked.cp_sizes, asked.context) == ((1, 2, 4), (ContextParallel.GATHER,))
    ring = "no context ring: context ring adds no padding to scores, as bert models do"
    assert lines_without(bert) == [ring]
    assert lines_without(bert, cp_sizes=[1]) == lines_without(bert, context=["gather"]) == []
    assert runnable(make_request(**ASKED), plan.model, plan.cluster, FILE) == make_request(**ASKED)
    alone = make_request(**ASKED | {"context": ["ring"]})
    assert runnable(alone, bert.model, bert.cluster, FILE).cp_sizes == (1,)


def test_no_cp_size_is_searched_beside_what_attention_drops_and_compilation(plan: Plan) -> None:
    dropping = of_bert(plan, attention_probs_dropout_prob=0.1)
    drops = "cp_size above 1 drops nothing inside attention, for which attention_probs_dropout_prob has a rate"
    assert lines_without(dropping) == [f"no cp_size above 1: {drops}"]
    for request, model in (
        (make_request(**ASKED | {"head": {"cp_sizes": [1, 2]}}), dropping.model),
        (make_request(**ASKED | {"compile": True}), plan.model),
        (make_request(**ASKED | {"attention": "flash_attention_2"}), plan.model),
    ):
        asked = runnable(request, model, plan.cluster, FILE)
        assert (asked.cp_sizes, asked.head.cp_sizes) == ((1,), None)
    with pytest.raises(BadInput, match=r"^s\.json: cp_sizes: cp_size above 1 drops nothing .*: list 1, or describe"):
        runnable(make_request(**ASKED | {"cp_sizes": [2]}), dropping.model, dropping.cluster, FILE)


def test_no_cp_size_is_searched_for_heads_that_a_gpus_kernels_do_not_take(plan: Plan) -> None:
    """In 16 bits the features of a head are a multiple of 8, in float32 one of 4; on the processor any will do."""
    shares = {}
    for heads, precision, device in product((4, 8, 16), ("bfloat16", "float32"), ("cpu", "NVIDIA H200")):
        other = of_heads(plan, 64 // heads, device)
        asked = make_request(**ASKED | {"precision": {"compute": precision}})
        shares[64 // heads, precision, device] = runnable(asked, other.model, other.cluster, FILE).cp_sizes != (1,)
    on_gpu = {key[:2]: found for key, found in shares.items() if key[2] != "cpu"}
    assert on_gpu == {
        (16, "bfloat16"): True, (8, "bfloat16"): True, (4, "bfloat16"): False,
        (16, "float32"): True, (8, "float32"): True, (4, "float32"): True,
    }  # fmt: skip
    assert all(found for key, found in shares.items() if key[2] == "cpu")
    odd = of_heads(plan, 4, "NVIDIA H200")
    words = "cp_size above 1 attends in bfloat16 on a GPU with heads of a multiple of 8 features, the model's have 4"
    assert lines_without(odd, precision={"compute": "bfloat16"}) == [f"no cp_size above 1: {words}"]
    assert not any(words in line for line in lines_without(odd, precision={"compute": "bfloat16"}, attention="eager"))


def test_a_search_finds_only_what_runs_and_a_prediction_says_what_does_not(plan: Plan) -> None:
    bert = of_bert(plan)
    profiles = profiles_of(plan, 16, 8, 4, config=BERT)
    found = searched(bert, profiles, cp_sizes=[1, 2, 4])
    assert {layer.context for layer in found.chosen.plan.layers} == {ContextParallel.GATHER}
    assert max(layer.cp_size for layer in found.chosen.plan.layers) > 1
    ring = replace(bert, layers=tuple(replace(plan.layers[1], type="block") for _ in range(2)))
    warned = [line for line in evaluate(ring, profiles).warnings if line.startswith("plan_only")]
    assert warned == ["plan_only: context ring adds no padding to scores, as bert models do"]
