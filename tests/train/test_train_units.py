"""Small parts: utilization, refusals, descriptions."""

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import random_plans
import torch
from command_calls import call
from file_forms import as_in_files
from random_plans import on_devices
from tiny_models import CONFIGS, named_parameters, stock_model, tiny

from shardwright.devices.table import read_devices
from shardwright.devices.utilization import model_flops_utilization
from shardwright.io import BadInput, read_document
from shardwright.models.facts import Family
from shardwright.models.registry import facts_of_type
from shardwright.models.traits import Mask
from shardwright.types import FP8, Heads, Plan, Precision
from shardwright_train.cli import APP
from shardwright_train.models.base import family_named

PlanMaker = Callable[..., Plan]


def test_utilization_is_known_only_where_the_peak_is(random_plan: PlanMaker) -> None:
    plan = random_plan(0, 2, "bfloat16")
    assert model_flops_utilization(plan, 1.0) is None  # on CPU
    peak, slow = 989.5e12, 312e12  # FLOP/s in bfloat16, by NVIDIA's data sheets
    in_float64 = on_devices(random_plan(0, 2), "NVIDIA H200", "NVIDIA H200")
    assert model_flops_utilization(in_float64, 1.0) is None
    names = ("embedding", *plan.model.layers, "head")
    kinds = [plan.model.types[name] for name in names]
    heads = [region.attention for kind in kinds for region in kind.regions if region.attention is not None]
    length, width = plan.model.sequence_length, heads[0].heads * heads[0].head_features
    masked = 4 * width * length * (length - 1) / 2 * len(heads)
    full = 3 * plan.global_batch_size * sum(kind.forward_flops_per_sample for kind in kinds)
    flops = (full - 3 * plan.global_batch_size * masked, full)
    alike = on_devices(plan, "NVIDIA H200", "NVIDIA H200")
    assert model_flops_utilization(alike, 0.5) == pytest.approx([each / 0.5 / (2 * peak) for each in flops])
    mixed = on_devices(plan, "NVIDIA H200", "NVIDIA A100-SXM4-80GB")
    assert model_flops_utilization(mixed, 0.5) == pytest.approx([each / 0.5 / (peak + slow) for each in flops])
    assert model_flops_utilization(on_devices(plan, "NVIDIA H200", "unheard of"), 0.5) is None


def test_utilization_is_known_on_every_device_of_the_table_in_each_of_its_formats(random_plan: PlanMaker) -> None:
    plan = random_plan(0, 2, "bfloat16")
    flops = sum(plan.model.types[name].step_flops_per_sample for name in ("embedding", *plan.model.layers, "head"))
    for device in read_devices().devices.values():
        for name, products in product(device.names, device.peaks.keys() - {FP8}):
            compute: Any = "float32" if products == "tf32" else products
            precision = Precision(compute=compute, tf32=products == "tf32")
            of_device = msgspec.structs.replace(on_devices(plan, name, name), precision=precision)
            utilization = model_flops_utilization(of_device, 1.0)
            assert utilization is not None and utilization.causal < utilization.full_square
            expected = flops * plan.global_batch_size / (2 * device.peaks[products])
            assert utilization.full_square == pytest.approx(expected)


def _seen(family: Family, heads: Heads, length: int) -> tuple[int, int]:
    """Pairs of positions that attention sees, one by one, and those that count as if nothing was masked."""
    window = heads.window or length
    counted = length**2 - (length - window) ** 2
    if family.attention.mask is not Mask.CAUSAL and "decoder" not in heads.queries:
        return counted, counted
    return sum(0 <= q - k < window for q in range(length) for k in range(length)), counted


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_utilization_counts_the_pairs_that_attention_sees(name: str) -> None:
    model = tiny(name)
    masked = 0
    for layer in model.layers:
        kind, family = model.types[layer], facts_of_type(model, layer)[0]
        for heads in (region.attention for region in kind.regions):
            if heads is not None and heads.queries == heads.keys:
                length = next(t.sequence_length for t in kind.outputs if t.name == heads.queries)
                seen, near = _seen(family, heads, length)
                operations = 2 * heads.heads * (heads.head_features + heads.features_of_values)
                masked += operations * (near - seen)
    plan = on_devices(random_plans.random_plan(model, 0, 1, "bfloat16"), "NVIDIA H200")
    share = model_flops_utilization(plan, 1.0)
    assert share is not None
    flops = (share.full_square - share.causal) * 989.5e12 / plan.global_batch_size
    assert flops == pytest.approx(3 * masked, abs=1e-3)


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
        ({"model_type": "clip_vision_model"}, "model_type 'clip_vision_model' is none of the families known here"),
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
