"""Models that torchtitan registers: an export names the one that is meant, and asks nothing of it that it refuses.

Where torchtitan 0.2.2 is installed, its own registry says so.
"""

import tomllib
from pathlib import Path

import pytest

from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.models.registry import FAMILIES, read_presets
from shardwright.types import DataParallel, GradientReduction, Model, Plan, Precision
from shardwright_search.options import UniformRequest
from shardwright_search.systems.torchtitan import registered, torchtitan_limits, torchtitan_toml
from shardwright_search.uniform_plan import uniform_plan

FLAVORS = {
    "llama-3-8b": ("llama3", "8B"),
    "llama-3.1-70b": ("llama3", "70B"),
    "llama-3-405b": ("llama3", "405B"),
    "qwen3-0.6b": ("qwen3", "0.6B"),
    "qwen3-1.7b": ("qwen3", "1.7B"),
    "qwen3-4b": ("qwen3", "4B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"),
    "qwen3-32b": ("qwen3", "32B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
    "deepseek-v2-lite": ("deepseek_v3", "16B"),
    "deepseek-v2": ("deepseek_v3", "236B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
    "llama-4-scout": ("llama4", "17bx16e_irope"),
    "llama-4-maverick": ("llama4", "17bx128e_irope"),
    "gpt-oss-20b": ("gpt_oss", "20b"),
    "gpt-oss-120b": ("gpt_oss", "120b"),
}
EVERY = GradientReduction.EVERY_MICROBATCH


def _model(name: str) -> Model:
    preset = read_presets()[name]
    return model_of_config(preset.config, name, preset.sequence_length, name)


def _plan(make, model: Model, **changes: object) -> Plan:
    request = {"global_batch_size": 32, "num_microbatches": 2, "data_parallel": DataParallel.ZERO3, **changes}
    return uniform_plan(model.name, UniformRequest(**request), model, make.cluster(8))


@pytest.mark.parametrize(("preset", "name", "flavor"), [(key, *value) for key, value in FLAVORS.items()])
def test_a_preset_has_the_flavor_that_torchtitan_registers(make, preset, name, flavor):
    exported = torchtitan_toml(_plan(make, _model(preset), gradient_reduction=EVERY), Path("plan.json"))
    assert tomllib.loads(exported.text)["model"] == {"name": name, "flavor": flavor}


def test_every_flavor_is_some_presets():
    models = [x.torchtitan for x in (each.systems for each in FAMILIES.values()) if x.torchtitan is not None]
    assert {(each.name, flavor) for each in models for flavor in each.flavors.values()} == set(FLAVORS.values())


@pytest.mark.parametrize("preset", FLAVORS)
def test_torchtitans_own_registry_has_the_flavor_with_as_many_parameters(preset):
    torch = pytest.importorskip("torch")
    specs = pytest.importorskip("torchtitan.protocols.train_spec", reason="torchtitan 0.2 is absent")
    model, (name, flavor) = _model(preset), FLAVORS[preset]
    spec, ours = specs.get_train_spec(name), registered(model)
    sizes = spec.model_args[flavor]
    sizes.moe_impl = "standard"  # What its `update_from_config` sets of the communication backend.
    with torch.device("meta"):
        made = spec.model_cls(sizes)
    assert sum(parameter.numel() for parameter in made.parameters()) == model.parameter_count
    assert (spec.pipelining_fn is not None) == ours.pipelines
    assert hasattr(sizes, "enable_weight_tying") == ours.ties
    assert (getattr(sizes, "attn_type", "sdpa") == "sdpa") == ours.contexts


@pytest.mark.parametrize(
    ("preset", "changes", "words"),
    [
        ("qwen3-32b", {"pp_size": 2}, "pipeline stages of its qwen3 model, which has no pipelining_fn: choose pp_size"),
        ("gpt-oss-20b", {"pp_size": 2}, "pipeline stages of its gpt_oss model, which has no pipelining_fn"),
    ],
)
def test_pipelines_of_a_model_without_them_are_refused_and_not_searched(make, preset, changes, words):
    model = _model(preset)
    with pytest.raises(BadInput, match=words):
        torchtitan_toml(_plan(make, model, **changes), Path("plan.json"))
    assert [limits.pipeline for limits in torchtitan_limits(model, Precision())] == [False]
    assert [limits.pipeline for limits in torchtitan_limits(_model("llama-3-8b"), Precision())] == [False, True]


def test_context_parallelism_of_flex_attention_is_refused_and_not_searched(make):
    model = _model("deepseek-v2-lite")
    plan = _plan(make, model, cp_size=2, gradient_reduction=EVERY)
    with pytest.raises(BadInput, match=r"cp_size 2 of its deepseek_v3 model, whose flavors have flex attention"):
        torchtitan_toml(plan, Path("plan.json"))
    assert all(limits.contexts == () for limits in torchtitan_limits(model, Precision()))
    assert all(limits.contexts != () for limits in torchtitan_limits(_model("qwen3-8b"), Precision()))


@pytest.mark.parametrize(("preset", "unlike"), [("llama-3.2-1b", True), ("qwen3-0.6b", False), ("llama-3-8b", False)])
def test_weights_that_torchtitan_does_not_tie_are_noted(make, preset, unlike):
    notes = torchtitan_toml(_plan(make, _model(preset), gradient_reduction=EVERY), Path("plan.json")).notes
    assert any("does not tie embedding and head" in note for note in notes) == unlike


def test_a_sequence_length_that_torchtitan_does_not_divide_is_refused(make):
    preset = read_presets()["llama-3-8b"]
    model = model_of_config(preset.config, "llama-3-8b", 4097, "llama-3-8b")
    with pytest.raises(BadInput, match="sequence_length 4097 beside tp_size 1 and cp_size 1: choose a multiple of 2"):
        torchtitan_toml(_plan(make, model, gradient_reduction=EVERY), Path("plan.json"))
