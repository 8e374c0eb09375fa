"""Plans that share experts out, for and from other systems: what is written says the same read back, or is refused."""

import json
import shlex
import tomllib
from types import SimpleNamespace

import pytest
from megatron_parser import parser
from msgspec import UNSET
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.types import DataParallel, ExpertStrategy, GradientReduction, Precision, Recompute, SequenceParallel
from shardwright_search.options import System
from shardwright_search.space.uniform import with_experts
from shardwright_search.systems.entry import Setting
from shardwright_search.systems.registry import SYSTEMS

CONFIG = {
    "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 4, "router_aux_loss_coef": 0.02,
}  # fmt: skip
LATENTS = {
    "model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 8, "q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "num_key_value_heads": 8,
}  # fmt: skip
"""A model whose first layer has no experts."""
GRIDS = ((4, 2), (2, 1), (2, 2), (1, 2), (4, 1))
"""Degrees of experts and of their features, beside two tensor-parallel ranks in stages of eight."""
MIXED = Precision(compute="bfloat16")


@pytest.fixture
def setting(make) -> Setting:
    model = model_of_config(CONFIG, "m", 16, "config.json")
    return Setting(model, make.cluster(16, 2), global_batch_size=32, precision=MIXED)


def _shared(setting, ep_size, etp_size, kind=DataParallel.ZERO2, **changes):
    """A plan of two stages, or of one, whose ranks shard experts."""
    settings = {"pp_size": 2, "tp_size": 2, "data_parallel": kind, "sequence_parallel": SequenceParallel.MEGATRON}
    choice = setting.uniform("mine", micro_batch_size=2, **settings | changes)
    return setting.plan(with_experts("mine", setting.model, choice, ep_size, etp_size), "mine")


def _read_back(system, plan, setting):
    target = SYSTEMS[system]
    return replace(target.read(target.export(plan, "plan.json").text, target.file_name, setting).plan, name="mine")


@pytest.mark.parametrize(("ep_size", "etp_size"), GRIDS)
@pytest.mark.parametrize("system", [System.MEGATRON, System.GALVATRON, System.TORCHTITAN])
def test_a_sharing_of_experts_says_the_same_read_back(setting, system, ep_size, etp_size):
    plan = _shared(setting, ep_size, etp_size)
    assert _read_back(system, plan, setting) == plan


def test_megatron_is_told_degrees_and_experts_and_a_balance_loss_of_equal_strength(setting):
    """Its loss of sequences is divided by the experts of a position and added up over layers."""
    text = SYSTEMS[System.MEGATRON].export(_shared(setting, 4, 1, recompute=Recompute.MLP), "plan.json").text
    given = parser().parse_args(shlex.split(text))
    assert (given.expert_model_parallel_size, given.expert_tensor_parallel_size) == (4, 1)
    assert (given.num_experts, given.moe_router_topk, given.moe_ffn_hidden_size) == (4, 2, 24)
    assert (given.moe_router_load_balancing_type, given.moe_aux_loss_coeff) == ("seq_aux_loss", 0.02 * 2 / 4)
    assert given.recompute_modules == ["moe"] and given.moe_token_dispatcher_type == "alltoall"


def _with_latents(setting, **changes) -> Setting:
    return setting._replace(model=model_of_config(LATENTS | changes, "m", 16, "config.json"))


def test_megatron_is_told_of_latents_and_of_layers_without_experts(setting):
    setting = _with_latents(setting)
    plan = _shared(setting, 4, 1, recompute=Recompute.MLP)
    given = parser().parse_args(shlex.split(SYSTEMS[System.MEGATRON].export(plan, "plan.json").text))
    assert given.multi_latent_attention and given.moe_layer_freq == [0, 1, 1, 1]
    assert (given.q_lora_rank, given.kv_lora_rank, given.v_head_dim) == (10, 12, 8)
    assert (given.qk_head_dim, given.qk_pos_emb_head_dim) == (6, 4) and given.kv_channels is None
    assert (given.num_experts, given.moe_ffn_hidden_size, given.moe_shared_expert_intermediate_size) == (8, 16, 16)
    assert given.ffn_hidden_size == 48 and given.recompute_modules == ["mlp", "moe"]
    assert _read_back(System.MEGATRON, plan, setting) == plan


@pytest.mark.parametrize("changes", [{}, {"model_type": "deepseek_v2", "n_group": None, "topk_group": None}])
def test_torchtitan_has_dense_layers_beside_experts_in_models_that_it_registers(setting, changes):
    setting = _with_latents(setting, q_lora_rank=None, **changes)
    plan = _shared(setting, 4, 1)
    text = SYSTEMS[System.TORCHTITAN].export(plan, "plan.json").text
    assert tomllib.loads(text)["model"] == {"name": "deepseek_v3"}
    assert _read_back(System.TORCHTITAN, plan, setting) == plan


@pytest.mark.parametrize(("ep_size", "etp_size"), GRIDS)
def test_a_recipe_of_the_bridge_says_the_degrees_of_experts(setting, ep_size, etp_size):
    setting = _with_latents(setting)
    plan = _shared(setting, ep_size, etp_size)
    text = SYSTEMS[System.MEGATRON_BRIDGE].export(plan, "plan.json").text
    whole = (ep_size, etp_size) == (1, plan.layers[0].tp_size)
    assert (f"cfg.model.expert_model_parallel_size = {ep_size}" in text) != whole
    assert _read_back(System.MEGATRON_BRIDGE, plan, setting) == plan


def test_megatron_is_told_of_no_latent_of_queries_where_there_is_none(setting):
    setting = _with_latents(setting, q_lora_rank=None)
    text = SYSTEMS[System.MEGATRON].export(_shared(setting, 2, 2), "plan.json").text
    assert "--q-lora-rank" not in text and "--expert-model-parallel-size 2" in text


def test_galvatron_is_told_of_experts_layer_by_layer(setting):
    plan = _shared(setting, 4, 1)
    whole = replace(plan.layers[0], experts=UNSET)
    other = ExpertStrategy(ep_size=2, etp_size=4, data_parallel=DataParallel.DDP)
    plan = replace(plan, layers=(whole, replace(plan.layers[1], experts=other), *plan.layers[2:]))
    given = json.loads(SYSTEMS[System.GALVATRON].export(plan, "plan.json").text)
    assert (given["ep_sizes_enc"], given["tp_of_ep_sizes_enc"]) == ("1,2,4,4", "2,4,1,1")
    assert _read_back(System.GALVATRON, plan, setting) == plan


def test_torchtitan_is_told_degrees_of_experts(setting):
    text = SYSTEMS[System.TORCHTITAN].export(_shared(setting, 4, 1), "plan.json").text
    given = tomllib.loads(text)["parallelism"]
    assert (given["expert_parallel_degree"], given["expert_tensor_parallel_degree"]) == (4, 1)


@pytest.mark.parametrize(
    ("system", "made", "problem"),
    [
        (
            System.MEGATRON,
            {"ep_size": 2, "etp_size": 1, "experts_kind": DataParallel.DDP},
            "experts ddp, where",
        ),
        (
            System.GALVATRON,
            {"ep_size": 2, "etp_size": 1, "experts_kind": DataParallel.ZERO3},
            "experts zero3, where",
        ),
        (System.TORCHTITAN, {"ep_size": 2, "etp_size": 4}, "ep_size 2 x etp_size 4 beside tp_size 2"),
        (System.TORCHTITAN, {"ep_size": 1, "etp_size": 1}, "ep_size 1 x etp_size 1 beside tp_size 2"),
        (System.DEEPSPEED, {"ep_size": 2, "etp_size": 1}, "whose ranks shard experts: leave out its experts"),
        (System.MEGATRON, {"shard_size": 2, "ep_size": 2, "etp_size": 1}, "experts with states sharded in groups"),
    ],
)
def test_a_sharing_that_a_system_does_not_have_is_refused(setting, system, made, problem):
    kind = made.pop("experts_kind", None)
    plan = _shared(setting, made.pop("ep_size"), made.pop("etp_size"), **made)
    if kind is not None:
        changed = replace(plan.layers[0].experts, data_parallel=kind)
        plan = replace(plan, layers=tuple(replace(layer, experts=changed) for layer in plan.layers))
    with pytest.raises(BadInput, match=problem):
        SYSTEMS[system].export(plan, "plan.json")


def test_experts_beside_whole_sequences_are_not_for_megatron(setting):
    choice = setting.uniform("mine", 2, 2, GradientReduction.DEFERRED, tp_size=2)
    with pytest.raises(BadInput, match="experts with tensor parallelism but without sequence parallelism"):
        SYSTEMS[System.MEGATRON].export(setting.plan(choice, "mine"), "plan.json")


@pytest.mark.parametrize(
    ("system", "ep_size", "etp_size", "kind", "runs"),
    [
        (System.MEGATRON, 2, 4, DataParallel.ZERO2, True),
        (System.MEGATRON, 2, 4, DataParallel.DDP, False),
        (System.TORCHTITAN, 2, 4, DataParallel.ZERO2, False),
        (System.TORCHTITAN, 2, 2, DataParallel.ZERO2, True),
        (System.TORCHTITAN, 4, 1, DataParallel.ZERO2, True),
        (System.TORCHTITAN, 4, 1, DataParallel.ZERO3, False),
    ],
)
def test_a_search_within_a_system_has_the_grids_that_it_exports(setting, system, ep_size, etp_size, kind, runs):
    (layer, *_) = _shared(setting, ep_size, etp_size).layers
    experts = ExpertStrategy(ep_size=ep_size, etp_size=etp_size, data_parallel=kind)
    layer = replace(layer, dp_size=8, experts=experts)
    configuration = SimpleNamespace(layers=layer, num_chunks=1, num_microbatches=2, pp_size=1)
    first = SYSTEMS[system].limits(setting.model, MIXED)[0]
    assert first.expert_grids and (system is System.TORCHTITAN or SequenceParallel.NONE not in first.sequence_parallel)
    assert first.demands.allows(configuration) is runs
