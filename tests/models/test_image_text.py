"""Models of images and text in one form: their layers are those of the stock model, and so are their operations."""

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command_calls import call
from msgspec.structs import replace
from torch.utils.flop_counter import FlopCounterMode

from shardwright.io import BadInput, read_document
from shardwright.models.alike import read_config
from shardwright.models.description import model_of_config
from shardwright.models.families.image_text import SIDE
from shardwright.models.registry import FAMILIES
from shardwright.types import EMBEDDING, HEAD, Model, Plan
from shardwright_search.cli import APP as SEARCH
from shardwright_train.cli import APP as TRAIN
from shardwright_train.models.support import check_supported

LENGTH = 40
_TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT |= {"num_key_value_heads": 2}
_WIDE = {"hidden_size": 32, "intermediate_size": 40}
_VISUAL = {**_WIDE, "depth": 3, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32}
_VISION = {**_WIDE, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
_MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
_TINY: Mapping[str, dict[str, Any]] = {
    "mistral3": {
        "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 8, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **_VISION},
        "image_token_index": 60,
    },
    "llama4": {
        "text_config": {"model_type": "llama4_text", **_TEXT, "head_dim": 8, "num_local_experts": 4}
        | {"intermediate_size_mlp": 56, "interleave_moe_layer_step": 2},
        "vision_config": {"model_type": "llama4_vision_model", **_VISION, "intermediate_size": 128}
        | {"vision_output_dim": 20, "projector_input_dim": 20, "projector_output_dim": 20},
        "image_token_index": 60,
    },
    "qwen3_vl": {
        "text_config": {"model_type": "qwen3_vl_text", **_TEXT, "head_dim": 8, "rope_parameters": _MROPE},
        "vision_config": {**_VISUAL, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]},
        "image_token_id": 60,
    },
    "glm4v": {
        "text_config": {"model_type": "glm4v_text", **_TEXT, "rope_parameters": _MROPE},
        "vision_config": {"model_type": "glm4v_vision", **_VISUAL, "image_size": 16},
        "image_token_id": 60,
    },
}
UNTRAINED = tuple(name for name in _TINY if FAMILIES[name].untrained is not None)


def config_of(kind: str, **changes: object) -> dict[str, Any]:
    return {"model_type": kind, **_TINY[kind], **changes}


def described(kind: str, **changes: object) -> Model:
    read = read_config(config_of(kind, **changes), "config.json")
    return model_of_config(read.config, "tiny", LENGTH, "config.json")


def stock_of(kind: str, **context: Any) -> Any:
    stock = getattr(transformers, FAMILIES[kind].stock.name)
    config = {key: value for key, value in config_of(kind).items() if key != "model_type"}
    with torch.device(context.get("device", "cpu")):
        return stock(stock.config_class(**config))


def named(model: Model) -> dict[str, int]:
    """The elements of each parameter, by its name in the stock model."""
    facts, numbers, found = FAMILIES[model.family], dict[str, int](), dict[str, int]()
    merged = {part: whole for whole, parts in facts.stock.stacked.items() for part in parts}
    for kind in (EMBEDDING, *model.layers, HEAD):
        place = facts.stock.places.get(kind, "")
        number = numbers.setdefault(place, 0)
        numbers[place] += 1
        for parameter in model.types[kind].parameters:
            module, _, name = ".".join(filter(None, (place.format(number), parameter.name))).rpartition(".")
            for part, whole in merged.items():
                module = module.removesuffix(part) + whole if module.endswith(f".{part}") else module
            full = f"{module}.{name}"
            found[full] = found.get(full, 0) + prod(parameter.shape)
    return found


@pytest.mark.parametrize("kind", _TINY)
def test_parameters_are_those_of_the_stock_model(kind: str) -> None:
    stock = stock_of(kind, device="meta")
    assert named(described(kind)) == {name: p.numel() for name, p in stock.named_parameters(remove_duplicate=False)}


def images_for(kind: str) -> dict[str, torch.Tensor]:
    """One image, as the stock model takes it."""
    if kind in ("mistral3", "llama4"):
        sizes = {"image_sizes": torch.tensor([[16, 16]])} if kind == "mistral3" else {}
        return {"pixel_values": torch.rand(1, 3, 16, 16), **sizes}
    side = 6 if kind == "qwen3_vl" else 4
    pixels = torch.rand(side * side, 3 * 2 * 4 * 4)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}


@pytest.mark.parametrize("kind", _TINY)
def test_operations_are_those_that_torch_counts(kind: str) -> None:
    model, stock = described(kind), stock_of(kind)
    facts = FAMILIES[kind]
    assert facts.vision is not None
    tokens = torch.ones((1, LENGTH), dtype=torch.long)
    tokens[:, 2 : 2 + facts.vision.positions(facts.configured(config_of(kind)))] = 60
    stock.set_attn_implementation("eager")
    kinds = {"mm_token_type_ids": (tokens == 60).int()} if kind in ("qwen3_vl", "glm4v") else {}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        stock(input_ids=tokens, **images_for(kind), **kinds)
    total = sum(model.types[name].forward_flops_per_sample for name in (EMBEDDING, *model.layers, HEAD))
    # The eager form multiplies each token by all experts of the only block that has some.
    idle = 3 * 6 * LENGTH * 32 * 48 if kind == "llama4" else 0
    assert counter.get_total_flops() == total + idle


@pytest.mark.parametrize("kind", _TINY)
def test_the_size_of_images_is_named_and_a_key_sets_it(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind, images_per_sample=2)))
    model = tmp_path / "model.json"
    asked = "--name", "m", "--sequence-length", LENGTH, "--out", model
    done = call(TRAIN, "describe", tmp_path, *asked)
    assert done.exit_code == 0, done.stderr
    side, patches = (24, 36) if kind == "qwen3_vl" else (16, 16)
    said = f"{side} x {side} pixels: {patches} patches in the tower, {patches // 4} tokens of the text; 2 in each"
    assert said in done.stderr
    assert replace(read_document(model, Model), name="tiny") == described(kind, images_per_sample=2)
    if kind == "llama4":
        with pytest.raises(BadInput, match=f"{SIDE} 24 is not the 16 of vision_config"):
            described(kind, **{SIDE: 24})
        return
    larger = described(kind, **{SIDE: 32})
    assert larger.types["vision"].outputs[0].sequence_length == 64
    with pytest.raises(BadInput, match=f"{SIDE} 36 is not a multiple of 8, the pixels of a token"):
        described(kind, **{SIDE: 36})


@pytest.mark.parametrize("kind", UNTRAINED)
def test_plans_are_found_without_torch_and_refused_by_name_where_they_would_run(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind)))
    file = tmp_path / "plan.json"
    asked = "--gpus", "1x2:H100-SXM", "--batch", 8, "--seq", LENGTH, "--out", file
    advised = call(SEARCH, "advise", tmp_path / "config.json", *asked)
    assert advised.exit_code == 0, advised.stderr
    assert "images are taken to have" in advised.stderr + advised.stdout
    plan = read_document(file, Plan)
    assert plan.model.layers[:4] == ("vision",) * 3 + ("projector",)
    assert len(plan.layers) == 6
    reason = FAMILIES[kind].untrained
    assert reason
    with pytest.raises(BadInput, match=f"models of the family {kind} are planned, not trained: {re.escape(reason)}"):
        check_supported(plan, file)
    folders = "--checkpoints", tmp_path / "kept", "--out", tmp_path / "run"
    refused = call(TRAIN, "run", file, "--data", "random", "--steps", 1, *folders)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert f"are planned, not trained: {reason}" in refused.stderr


@pytest.mark.parametrize(
    ("kind", "vision", "problem"),
    [
        ("mistral3", {"model_type": "clip_vision_model"}, "model_type 'clip_vision_model' does not belong"),
        ("mistral3", {"hidden_size": 30}, "hidden_size 30 is not a multiple of num_attention_heads 4"),
        ("qwen3_vl", {"depth": 0}, "depth"),
        ("qwen3_vl", {"deepstack_visual_indexes": 3}, "deepstack_visual_indexes 3 is not a list of blocks"),
        ("glm4v", {"out_hidden_size": "x"}, "out_hidden_size"),
        ("llama4", {"pixel_shuffle_ratio": 0}, "pixel_shuffle_ratio 0 is not a part of 1"),
    ],
)
def test_wrong_towers_are_refused(kind: str, vision: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        described(kind, vision_config={**_TINY[kind]["vision_config"], **vision})
