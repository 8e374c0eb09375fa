"""Exports of published models start where they say: sizes for Megatron-LM, registered flavors for torchtitan.

Where megatron-core (0.16.1) or torchtitan (0.2.2) is installed, their own classes read what is written.
"""

import tomllib
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
from megatron_parser import megatron

from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.models.registry import read_presets
from shardwright.types import DataParallel, GradientReduction, Plan
from shardwright_search.options import UniformRequest
from shardwright_search.systems.megatron import megatron_arguments
from shardwright_search.systems.torchtitan import torchtitan_toml
from shardwright_search.uniform_plan import uniform_plan

PLAN = Path("plan.json")
RANKS = UniformRequest(
    global_batch_size=32, num_microbatches=8, pp_size=4, data_parallel=DataParallel.ZERO2, precision_compute="bfloat16"
)
# By the option of Megatron-LM: the field of megatron-core's TransformerConfig, and what False means there.
FIELDS = {
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups",
    "normalization", "add_qkv_bias", "qk_layernorm", "attention_dropout", "hidden_dropout", "sequence_parallel",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "bf16", "fp16", "recompute_granularity",
    "recompute_method", "recompute_num_layers", "pipeline_model_parallel_layout",
}  # fmt: skip
# Of torchtitan 0.2.2's config/job_config.py, the keys that an export may write.
KEYS = {
    "model": {"name", "flavor"},
    "optimizer": {"name"},
    "training": {
        "local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param", "mixed_precision_reduce",
    },
    "parallelism": {
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree",
        "pipeline_parallel_degree", "context_parallel_degree", "fsdp_reshard_after_forward",
        "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size", "module_fqns_per_model_part",
    },
    "activation_checkpoint": {"mode", "selective_ac_option"},
}  # fmt: skip


def _plan(make, name: str, **changes: object) -> Plan:
    preset = read_presets()[name]
    config = {**preset.config, **{key: value for key, value in changes.items() if key not in RANKS.__struct_fields__}}
    request = {key: value for key, value in changes.items() if key in RANKS.__struct_fields__}
    model = model_of_config(config, name, preset.sequence_length, name)
    return uniform_plan(name, msgspec.structs.replace(RANKS, **request), model, make.cluster(8))


def _uneven(plan: Plan) -> Plan:
    """The first stage with two layers less, the third with two more."""
    cuts = [low for stage in plan.stages for low, _ in stage.layers] + [len(plan.layers)]
    cuts = [cuts[0], cuts[1] - 2, cuts[2] - 2, cuts[3], cuts[4]]
    stages = [
        msgspec.structs.replace(stage, layers=((low, high),))
        for stage, low, high in zip(plan.stages, cuts[:-1], cuts[1:], strict=True)
    ]
    return msgspec.structs.replace(plan, stages=tuple(stages))


@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        ("llama-3-8b", (32, 4096, 14336, 32, 8), "swiglu disable_bias_linear group_query_attention"),
        ("llama-2-7b", (32, 4096, 11008, 32, None), "swiglu disable_bias_linear"),
        ("qwen2.5-7b", (28, 3584, 18944, 28, 4), "swiglu disable_bias_linear add_qkv_bias group_query_attention"),
        ("qwen3-8b", (36, 4096, 12288, 32, 8), "swiglu disable_bias_linear qk_layernorm group_query_attention"),
        ("gpt2-xl", (48, 1600, 6400, 25, None), ""),
    ],
)
def test_megatron_is_told_the_whole_model(make, name, sizes, says):
    given = megatron(_plan(make, name))
    found = given.num_layers, given.hidden_size, given.ffn_hidden_size, given.num_attention_heads
    assert (*found, given.num_query_groups) == sizes
    switches = {"swiglu", "disable_bias_linear", "add_qkv_bias", "qk_layernorm", "group_query_attention"}
    assert {switch for switch in switches if getattr(given, switch)} == set(says.split())
    gpt2 = name == "gpt2-xl"
    assert given.normalization == ("LayerNorm" if gpt2 else "RMSNorm")
    assert given.position_embedding_type == ("learned_absolute" if gpt2 else "rope")
    assert given.hidden_dropout == (0.1 if gpt2 else 0.0)
    assert given.vocab_size == read_presets()[name].config["vocab_size"] and given.make_vocab_size_divisible_by == 1


def test_megatron_is_told_rotary_angles_heads_of_their_own_width_and_biases(make):
    given = megatron(_plan(make, "llama-3-405b", num_hidden_layers=8))
    assert (given.rotary_base, given.use_rope_scaling, given.rope_scaling_factor) == (500000, True, 8.0)
    assert given.max_position_embeddings == 131072 and given.kv_channels is None
    given = megatron(_plan(make, "qwen3-8b", head_dim=64, num_attention_heads=48))
    assert (given.kv_channels, given.num_attention_heads) == (64, 48)
    biased = megatron(_plan(make, "llama-2-7b", attention_bias=True, mlp_bias=True))
    assert not (biased.disable_bias_linear or biased.add_qkv_bias)
    with pytest.raises(BadInput, match="cannot express biases of some matrices of a layer"):
        megatron_arguments(_plan(make, "llama-2-7b", attention_bias=True), PLAN)


def test_a_window_that_samples_are_longer_than_counts_the_positions_before_a_query_s_own(make):
    assert megatron(_plan(make, "mistral-7b", sliding_window=8192)).window_size is None
    assert megatron(_plan(make, "mistral-7b", sliding_window=4096)).window_size == "4095,0"


def test_what_the_arguments_cannot_hold_of_a_model_is_told(make):
    notes = megatron_arguments(_plan(make, "bert-large"), PLAN).notes
    assert any("of a bert model the arguments give only the sizes" in note for note in notes)
    scaled = _plan(make, "llama-2-7b", rope_scaling={"type": "linear", "factor": 2.0})
    assert "rotary embeddings of type linear are not in the file" in megatron_arguments(scaled, PLAN).notes


@pytest.mark.parametrize(("name", "flavor"), [("llama-3-8b", "8B"), ("llama-3-70b", "70B"), ("llama-2-7b", None)])
def test_torchtitan_is_told_the_model_it_has_registered(make, name, flavor):
    exported = torchtitan_toml(_plan(make, name), PLAN)
    sections = tomllib.loads(exported.text)
    assert sections["model"] == {"name": "llama3"} | ({} if flavor is None else {"flavor": flavor})
    assert any("the flavor of [model] is yours" in note for note in exported.notes) == (flavor is None)
    assert [file for file, _ in exported.beside] == ([] if flavor is None else ["torchtitan_plan.py"])
    assert all('"norm", "lm_head"]' in text for _, text in exported.beside)
    parts = sections["parallelism"]["module_fqns_per_model_part"]
    modules = [module for part in parts for module in part]
    layers = len(_plan(make, name).layers)
    assert modules == ["tok_embeddings", *(f"layers.{i}" for i in range(layers)), "norm", "output"]
    assert all(set(keys) <= KEYS[section] for section, keys in sections.items())


def test_a_family_that_torchtitan_has_not_is_told(make):
    exported = torchtitan_toml(
        _plan(make, "mistral-7b", pp_size=1, num_microbatches=4, gradient_reduction=GradientReduction.EVERY_MICROBATCH),
        PLAN,
    )
    assert "model" not in tomllib.loads(exported.text)
    assert any("torchtitan has no mistral model" in note for note in exported.notes)


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-8b", "gpt2-xl"])
def test_megatron_core_itself_takes_the_sizes_and_the_layout(make, name):
    config = pytest.importorskip("megatron.core.transformer.transformer_config", reason="megatron-core is absent")
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    plan = _uneven(_plan(make, name))
    given = megatron(plan)
    assert {field.name for field in fields(config.TransformerConfig)} >= FIELDS
    layout = layouts.PipelineParallelLayerLayout(given.pipeline_model_parallel_layout, 4)
    layout.validate_layer_layout(given.num_layers, None)
    counts = [[kind.name for kind in chunk].count("decoder") for (chunk,) in layout.layout]
    assert counts == [sum(high - low for low, high in stage.layers) for stage in plan.stages]


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-2-7b"])
def test_torchtitans_own_classes_take_every_key(make, name):
    module = pytest.importorskip("torchtitan.config.job_config", reason="torchtitan 0.2 is absent")
    sections = {field.name: field.default_factory for field in fields(module.JobConfig)}
    for section, keys in tomllib.loads(torchtitan_toml(_plan(make, name), PLAN).text).items():
        made = sections[section](**keys)
        assert {key: getattr(made, key) for key in keys} == keys
