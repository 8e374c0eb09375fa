"""Models with experts in Megatron-LM's arguments: norms, biases, positions and how experts are chosen.

Where megatron-core 0.16.1 is installed, its own routing gives what the stock routers of transformers give.
"""

import importlib
from pathlib import Path

import pytest
from megatron_parser import megatron
from systems_parsers import asked_of_megatron

from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.models.registry import read_presets
from shardwright.types import DataParallel, GradientReduction, Plan
from shardwright_search.options import UniformRequest
from shardwright_search.systems.megatron import megatron_arguments
from shardwright_search.systems.megatron_bridge import bridge_recipe
from shardwright_search.uniform_plan import uniform_plan

PLAN = Path("plan.json")
YARN = {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1}
PRESETS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2")


def _plan(make, name: str, precision: str = "bfloat16", **changes: object) -> Plan:
    preset = read_presets()[name]
    model = model_of_config({**preset.config, **changes}, name, 4096, name)
    request = UniformRequest(
        global_batch_size=32,
        data_parallel=DataParallel.ZERO2,
        gradient_reduction=GradientReduction.DEFERRED,
        precision_compute=precision,
    )
    return uniform_plan(name, request, model, make.cluster(8))


@pytest.mark.parametrize(
    ("name", "routed"),
    [
        ("mixtral-8x7b", ("softmax", False, None, None, None, False)),
        ("qwen3-30b-a3b", ("softmax", False, None, None, None, False)),
        ("deepseek-v2-lite", ("softmax", True, None, None, None, False)),
        ("deepseek-v2", ("softmax", True, 16.0, 8, 3, False)),
        ("deepseek-v3", ("sigmoid", False, 2.5, 8, 4, True)),
        ("kimi-k2", ("sigmoid", False, 2.827, None, None, True)),
    ],
)
def test_megatron_is_told_how_experts_are_chosen_and_all_else_of_the_model(make, name, routed):
    given = megatron(_plan(make, name))
    assert routed == (
        given.moe_router_score_function,
        given.moe_router_pre_softmax,
        given.moe_router_topk_scaling_factor,
        given.moe_router_num_groups,
        given.moe_router_group_topk,
        given.moe_router_enable_expert_bias,
    )
    assert given.disable_bias_linear and given.swiglu and given.normalization == "RMSNorm"
    assert (given.attention_dropout, given.hidden_dropout) == (0.0, 0.0)
    assert given.qk_layernorm == (name != "mixtral-8x7b")
    assert given.rope_type == ("rope" if given.multi_latent_attention else None)
    notes = megatron_arguments(_plan(make, name), PLAN).notes
    assert not any("give only the sizes" in note for note in notes)
    assert any("by the sum of their 2 best, the model by 1" in note for note in notes) == (name == "deepseek-v2")
    assert any("--moe-router-bias-update-rate" in note for note in notes) == routed[-1]


def test_weights_that_are_not_divided_by_their_sum_have_their_softmax_first(make):
    assert megatron(_plan(make, "qwen3-30b-a3b", norm_topk_prob=False)).moe_router_pre_softmax


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("deepseek-v3", {"norm_topk_prob": False}, "sigmoid scores that are not divided by their sum"),
        ("mixtral-8x7b", {"num_experts_per_tok": 1}, "one expert of each position, weighted by 1: choose two"),
    ],
)
def test_routers_that_megatron_has_not_are_refused(make, name, changes, words):
    with pytest.raises(BadInput, match=words):
        megatron_arguments(_plan(make, name, **changes), PLAN)


def test_rotary_embeddings_of_latents_are_scaled_as_the_model_says(make):
    plan = _plan(make, "deepseek-v2-lite", rope_scaling={**YARN, "original_max_position_embeddings": 4096})
    given = megatron(plan)
    assert (given.rope_type, given.rotary_scaling_factor, given.mscale, given.mscale_all_dim) == (
        "yarn",
        40,
        0.707,
        0.707,
    )
    assert not any("rotary" in note for note in megatron_arguments(plan, PLAN).notes)
    other = _plan(make, "deepseek-v2-lite", rope_scaling={**YARN, "original_max_position_embeddings": 8192})
    (note,) = (note for note in megatron_arguments(other, PLAN).notes if "rotary" in note)
    assert "no options for original_max_position_embeddings 8192 of rotary embeddings" in note
    implied = _plan(make, "deepseek-v2-lite", rope_scaling=YARN)  # of as many positions as the model has
    (note,) = (note for note in megatron_arguments(implied, PLAN).notes if "rotary" in note)
    assert "original_max_position_embeddings 163840" in note


@pytest.mark.parametrize("name", PRESETS)
def test_megatron_core_itself_takes_the_model(make, name):
    pytest.importorskip("megatron.core", reason="megatron-core is absent")
    asked_of_megatron(megatron_arguments(_plan(make, name), PLAN).text)


@pytest.mark.parametrize(
    ("name", "changes", "router"),
    [
        ("mixtral-8x7b", {}, "mixtral.modeling_mixtral:MixtralTopKRouter"),
        ("qwen3-30b-a3b", {}, "qwen3_moe.modeling_qwen3_moe:Qwen3MoeTopKRouter"),
        ("qwen3-30b-a3b", {"norm_topk_prob": False}, "qwen3_moe.modeling_qwen3_moe:Qwen3MoeTopKRouter"),
        ("deepseek-v2-lite", {}, "deepseek_v2.modeling_deepseek_v2:DeepseekV2TopkRouter"),
        ("deepseek-v3", {}, "deepseek_v3.modeling_deepseek_v3:DeepseekV3TopkRouter"),
    ],
)
def test_megatron_core_routes_as_the_stock_router_does(make, name, changes, router):
    routing = pytest.importorskip("megatron.core.transformer.moe.moe_utils", reason="megatron-core is absent")
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    module, _, kind = router.partition(":")
    preset = {**read_presets()[name].config, **changes}
    config = transformers.AutoConfig.for_model(**preset)
    stock = getattr(importlib.import_module(f"transformers.models.{module}"), kind)(config)
    given = megatron(_plan(make, name, **changes))
    torch.manual_seed(7)
    torch.nn.init.normal_(stock.weight)
    correction = getattr(stock, "e_score_correction_bias", None)
    if correction is not None:
        torch.nn.init.normal_(correction, std=0.1)
    with torch.no_grad():
        scores, weights, chosen = stock(torch.randn(64, config.hidden_size) / config.hidden_size**0.5)
        sparse, _ = routing.topk_routing_with_score_function(
            scores.float(),
            given.moe_router_topk,
            use_pre_softmax=given.moe_router_pre_softmax,
            num_groups=given.moe_router_num_groups,
            group_topk=given.moe_router_group_topk,
            scaling_factor=given.moe_router_topk_scaling_factor,
            score_function=given.moe_router_score_function,
            expert_bias=correction if given.moe_router_enable_expert_bias else None,
        )
    expected = torch.zeros_like(sparse).scatter(1, chosen, weights.to(sparse.dtype))
    torch.testing.assert_close(sparse, expected, rtol=1e-5, atol=1e-7)


def test_a_family_without_a_bridge_is_refused(make):
    with pytest.raises(BadInput, match=r"a mixtral model: choose .*deepseek_v3, llama"):
        bridge_recipe(_plan(make, "mixtral-8x7b"), PLAN)
