"""Small parts: utilization, refusals, descriptions."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from command_calls import call
from file_forms import as_in_files
from random_plans import on_devices
from tiny_models import CONFIGS, named_parameters, stock_model, tiny

from shardwright_formats.io import BadInput, read_document
from shardwright_formats.types import Plan
from shardwright_train.cli import APP
from shardwright_train.models.registry import family_named
from shardwright_train.training.metrics import model_flops_utilization

PlanMaker = Callable[..., Plan]


def test_utilization_is_known_only_where_the_peak_is(random_plan: PlanMaker) -> None:
    plan = random_plan(0, 2, "bfloat16")
    assert model_flops_utilization(plan, 1.0) is None  # on CPU
    peak, slow = 989.4e12, 312e12  # FLOP/s in bfloat16, by NVIDIA's data sheets
    in_float32 = on_devices(random_plan(0, 2, "float32"), "NVIDIA H200", "NVIDIA H200")
    assert model_flops_utilization(in_float32, 1.0) is None
    names = ("embedding", *plan.model.layers, "head")
    flops = 3 * plan.global_batch_size * sum(plan.model.types[n].forward_flops_per_sample for n in names)
    alike = on_devices(plan, "NVIDIA H200", "NVIDIA H200")
    assert model_flops_utilization(alike, 0.5) == pytest.approx(flops / 0.5 / (2 * peak))
    mixed = on_devices(plan, "NVIDIA H200", "NVIDIA A100-SXM4-80GB")
    assert model_flops_utilization(mixed, 0.5) == pytest.approx(flops / 0.5 / (peak + slow))
    assert model_flops_utilization(on_devices(plan, "NVIDIA H200", "unheard of"), 0.5) is None


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_description_has_every_parameter_of_the_stock_model(name: str) -> None:
    model = tiny(name)
    family = family_named(name, "test")
    stock = {name: p.numel() for name, p in named_parameters(stock_model(model), model).items()}
    described: dict[str, torch.Tensor] = {}
    for layer in ("embedding", *(f"layers[{i}]" for i in range(len(model.layers))), "head"):
        for local, parameter in family.build(model, layer).named_parameters():
            described.setdefault(family.hugging_face_name(model, layer, local), parameter)
    aliases = {second for _, second in model.tied}
    stored = as_in_files(family, {name: x for name, x in described.items() if name not in aliases})
    buffers = {name: x.numel() for name, x in stock_model(model).named_buffers() if name in stored}
    assert {name: x.numel() for name, x in stored.items()} == stock | buffers
    assert model.parameter_count == sum(stock.values())


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_parameter_is_given_an_initial_value_and_every_norm_its_neutral_one(name: str) -> None:
    model, family = tiny(name), family_named(name, "test")
    for layer in ("embedding", *(f"layers[{i}]" for i in range(len(model.layers))), "head"):
        built = family.build(model, layer)
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.fill_(math.nan)
        family.initialize(model, built)
        for local, parameter in built.named_parameters():
            assert parameter.isfinite().all(), (layer, local)
            # Matrices and tables are drawn, the rest begins with 1 or 0, as Swin's biases do; some families draw more.
            of_many = ("relative_position_bias_table", "_norm.weight", "_proj_bias", "mm_input_projection_weight")
            drawn = {
                "siglip": ("mlp",),
                "gpt_oss": ("sinks", "router"),
                "llava": ("class_embedding",),
                "gemma3": ("mlp.fc",),
            }.get(name, ())
            alike = parameter.dim() == 1 or local.endswith(of_many)
            alike = alike and not any(part in local for part in drawn)
            assert (parameter.unique().numel() == 1) == alike, (layer, local)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hiden_size": 64}, "unknown key 'hiden_size' for models of the family llama"),
        ({"model_type": "mamba"}, "model family 'mamba' cannot be trained"),
        ({"model_type": "qwen2_5_vl"}, "'qwen2_5_vl' cannot be trained: mrope_section and window_size follow the size"),
        ({"max_position_embeddings": 8}, "sequence length 16 is over 8 positions"),
    ],
)
def test_describe_refuses_a_configuration_in_one_line(tmp_path: Path, change: dict[str, object], words: str) -> None:
    config = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--name", "x", "--sequence-length", "16", "--out", str(tmp_path / "model.json")]
    ended = call(APP, "describe", str(tmp_path), *options)
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith("error: ") and words in ended.stderr
    assert not (tmp_path / "model.json").exists()


def test_a_plan_for_another_world_size_is_refused_in_one_line(tmp_path: Path, random_plan: PlanMaker) -> None:
    plan = json.loads(msgspec.json.encode(random_plan(0, 2, "float32")))
    plan["cluster"]["node_types"]["cpu"]["devices_per_node"] = 4
    (tmp_path / "plan.json").write_text(json.dumps({"format": "shardwright.plan", "version": 1} | plan))
    with pytest.raises(BadInput, match=r"plan\.json: the stages use 2 ranks, the cluster has 4 devices"):
        read_document(tmp_path / "plan.json", Plan)
