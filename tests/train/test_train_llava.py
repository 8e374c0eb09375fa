"""Llava: what its layers compute and keep, what files may hold, and where an image stands in a text."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from random_plans import random_plan
from safetensors.torch import load_file, save_file
from test_weights import published
from tiny_models import SEQUENCE_LENGTH, batch_of, stock_logits, stock_model, tiny
from tiny_multi_modal import SEVERAL
from torch.utils.flop_counter import FlopCounterMode

from shardwright.estimate.hardware import Link
from shardwright.estimate.layers import Machine, estimate_layer
from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.models.frozen import FrozenPart, freeze
from shardwright.types import Attention, LayerStrategy, Precision
from shardwright.types.plan import misfit
from shardwright_train.models.base import family_named
from shardwright_train.models.images import placed
from shardwright_train.models.masks import Places, image_mask
from shardwright_train.models.support import check_supported
from shardwright_train.weights.reading import open_weights

FAMILY = family_named("llava", "test")
SAMPLES = 3
WHOLE = {**tiny("gemma3").config["text_config"], "num_hidden_layers": 2, "sliding_window": 16}
"""Gemma's blocks, of which windows hold a whole sample: stock computes all scores, whatever is masked."""


def test_layers_are_a_tower_a_projector_and_a_language_model() -> None:
    model = tiny("llava")
    assert model.layers == ("vision", "vision", "projector", "block", "block")
    received = {name: [(t.name, t.sequence_length, t.features) for t in model.received_by(name)] for name in (
        "layers[0]", "layers[2]", "layers[3]", "head")}  # fmt: skip
    image, text = ("image_states", 10, 24), ("hidden_states", 16, 32)
    assert received == {"layers[0]": [image, text], "layers[2]": [image, text], "layers[3]": [text], "head": [text]}
    assert model.reshaping == ("projector",)
    names = {p.name for p in model.types["projector"].parameters if not p.trained}
    assert names == {"post_layernorm.weight", "post_layernorm.bias"}


@pytest.mark.parametrize(
    ("family", "images", "tokens"),
    [("llava", 1, 9), ("gemma3", 1, 4), ("mistral3", 1, 4), ("llava", 2, 4), ("gemma3", 3, 4)],
)
def test_operations_are_those_that_torch_counts(family: str, images: int, tokens: int) -> None:
    several = SEVERAL[family] if images > 1 else {}
    model = tiny(family, **({"text_config": WHOLE} if family == "gemma3" else {}), **several)
    stock = stock_model(model, "eager")
    batch = batch_of(model, 1, 1)
    batch["tokens"][:] = 1
    batch["tokens"][:, 2 : 2 + images * tokens] = stock.config.image_token_index
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        stock_logits(stock, batch)
    described = sum(model.types[name].forward_flops_per_sample for name in ("embedding", *model.layers, "head"))
    # Rotations make their angles by products, Gemma's of two kinds.
    angles = 2 * SEQUENCE_LENGTH * (4 // 2 if family == "llava" else 2 * 8 // 2)
    assert counter.get_total_flops() in (described, described + angles)


@pytest.mark.parametrize("window", [5, None])
def test_positions_of_an_image_attend_to_all_of_it(window: int | None) -> None:
    inside = torch.zeros(2, 12, dtype=torch.bool)
    inside[0, 1:5] = inside[0, 6:9] = True
    seen = image_mask(inside, window, torch.float32)[:, 0] == 0
    for sample, query, key in product(range(2), range(12), range(12)):
        together = bool(inside[sample, min(query, key) : max(query, key) + 1].all())
        near = window is None or key > query - window
        assert bool(seen[sample, query, key]) == ((key <= query or together) and near)


def test_the_plan_says_the_format_not_a_part_of_the_file() -> None:
    config = tiny("llava").config
    parts = {key: {**config[key], "torch_dtype": "float16"} for key in ("text_config", "vision_config")}
    model = tiny("llava", **parts)
    assert {p.dtype for p in FAMILY.stock_model(model).parameters()} == {torch.get_default_dtype()}


def test_a_tower_that_is_frozen_with_the_embedding_has_no_backward_pass() -> None:
    model = freeze(tiny("llava"), [FrozenPart.parse("embedding"), FrozenPart.parse("layers[0:2]")])
    assert model.layers == ("vision.no_grad", "vision.no_grad", "projector", "block", "block")


def test_only_the_text_shares_out_a_sequence_behind_an_odd_tower() -> None:
    model = tiny("llava", vision_config={**tiny("llava").config["vision_config"], "image_size": 8})
    halves = {"tp_size": 2, "dp_size": 1, "sequence_parallel": "megatron"}
    problems = {name: misfit(model, name, LayerStrategy(type=name, **halves)) for name in dict.fromkeys(model.layers)}
    assert problems["vision"] == "tp_size 2 does not divide the sequence length 5"
    assert problems["projector"] == "tp_size 2 does not divide image_positions 1"
    assert problems["block"] is None


def test_a_tower_of_several_images_has_them_whole_on_each_rank() -> None:
    model = tiny("llava", **SEVERAL["llava"])
    halves = {"tp_size": 2, "dp_size": 1, "sequence_parallel": "megatron"}
    assert misfit(model, "vision", LayerStrategy(type="vision", **halves)) == (
        "tp_size 2 does not divide attended_positions 1"
    )


def test_positions_of_a_text_with_images_keep_their_order() -> None:
    plan = random_plan(tiny("llava"), 0, 2, stages=1)
    shared = LayerStrategy(type="block", tp_size=1, dp_size=1, cp_size=2)
    layers = tuple(shared if layer.type == "block" else layer for layer in plan.layers)
    with pytest.raises(BadInput, match="cp_size above 1 is not for images among a text"):
        check_supported(replace(plan, layers=layers), "plan.json")


@pytest.mark.parametrize(
    ("layer", "images"), [("vision", 1), ("projector", 1), ("block", 1), ("vision", 2), ("projector", 2)]
)
def test_a_layer_keeps_what_autograd_saves(layer: str, images: int) -> None:
    """With what it is given, or, of the projector, what it hands on."""
    model = tiny("llava", **(SEVERAL["llava"] if images > 1 else {}))
    torch.manual_seed(0)
    place = model.layers.index(layer)
    module = FAMILY.block(stock_model(model), layer, 0).float().train()
    shapes = model.received_by(f"layers[{place}]")
    states = tuple(torch.randn(SAMPLES, t.sequence_length, t.features, requires_grad=True) for t in shapes)
    tokens = torch.zeros(SAMPLES, SEQUENCE_LENGTH, dtype=torch.long)
    tokens[:, 3:12] = 60
    constants = FAMILY.constants(model, layer, Places.whole(SEQUENCE_LENGTH), torch.zeros(1), "sdpa")
    apart = {x.untyped_storage().data_ptr() for x in (*module.parameters(), tokens)}
    apart |= {x.untyped_storage().data_ptr() for x in constants["arguments"].get("position_embeddings", ())}
    apart |= {x.untyped_storage().data_ptr() for x in states} if layer == "projector" else set()
    held = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        held[saved.untyped_storage().data_ptr()] = saved.untyped_storage()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        out = FAMILY.call(module, states, {"tokens": tokens}, constants)
    if layer == "projector":
        held[out[0].untyped_storage().data_ptr()] = out[0].untyped_storage()
    measured = sum(storage.nbytes() for place, storage in held.items() if place not in apart)
    strategy, precision = (
        LayerStrategy(type=layer, tp_size=1, dp_size=1),
        Precision(parameters="float32", compute="float32"),
    )
    machine = Machine(1e12, 1e12, Link(1e12, 0.0))
    found = estimate_layer(model, layer, strategy, SAMPLES, precision, Attention.SDPA, machine).activation_bytes
    assert found == pytest.approx(measured, rel=0.08)


def test_an_image_stands_where_its_tokens_are_and_nowhere_in_a_text_without() -> None:
    features, text = torch.arange(6.0).view(1, 3, 2).repeat(2, 1, 1), torch.full((2, 5, 2), 9.0)
    inside = torch.tensor([[False, True, True, True, False], [False] * 5])
    found = placed(features, text, inside)
    assert found[0].tolist() == [[9, 9], [0, 1], [2, 3], [4, 5], [9, 9]] and bool((found[1] == 9).all())


def test_samples_have_an_image_or_none_and_labels_of_the_text_alone() -> None:
    batch = batch_of(tiny("llava"), 32, 0)
    inside = batch["tokens"] == 60
    assert set(inside.sum(1).tolist()) == {0, 9}
    assert batch["pixel_values"].shape == (32, 3, 12, 12)
    ahead = torch.cat((inside[:, 1:], torch.zeros(32, 1, dtype=torch.bool)), 1)
    assert bool((batch["labels"][ahead] == -100).all()) and 60 not in batch["labels"].unique()


def test_blocks_of_published_files_that_compute_nothing_are_left_out(tmp_path: Path) -> None:
    model = tiny("llava")
    published(model, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    last = {key: x for key, x in tensors.items() if "vision_tower" in key and ".layers.1." in key}
    tensors |= {key.replace(".layers.1.", ".layers.2."): x.clone() for key, x in last.items()}
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["num_hidden_layers"], config["vision_feature_layer"] = 3, -2
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = open_weights(tmp_path, model, FAMILY, allow_new=False)
    assert len(last) == 16 and len(weights.surplus) == 16 and not weights.new
    tensors["model.vision_tower.encoder.layers.0.more"] = torch.zeros(1)
    save_file(tensors, file)
    with pytest.raises(BadInput, match="has tensors that the model's blocks do not"):
        open_weights(tmp_path, model, FAMILY, allow_new=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_feature_layer": -5}, "vision_feature_layer -5 does not take the states of one of 3 blocks"),
        (
            {"vision_feature_layer": [1, 2]},
            r"vision_feature_layer (must be a number|\[1, 2\] is not the number of one layer)",
        ),
        ({"images_per_sample": 0}, "images_per_sample 0 is not a number from 1 to 1024"),
        ({"image_token_index": 61}, "image_token_index 61 is not below vocab_size 61"),
        ({"vision_config": None}, "vision_config is missing"),
        ({"vision_config": {"model_type": "pixtral"}}, "model_type 'pixtral' is not one of clip_vision_model"),
        ({"text_config": {"model_type": "qwen2"}}, "model_type 'qwen2' is not a language model of this family"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_its_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny("llava", **changes)
    config = {**tiny("llava").config, "num_hidden_layers": 2, "vision_feature_layer": -2}
    config["vision_config"] = {**config["vision_config"], "num_hidden_layers": 3}
    with pytest.raises(BadInput, match=message):
        model_of_config({**config, **changes}, "m", SEQUENCE_LENGTH, "config.json")


def test_a_sample_is_longer_than_its_image() -> None:
    with pytest.raises(ValueError, match="sequence length 16 is under 17"):
        tiny("llava", vision_config={**tiny("llava").config["vision_config"], "image_size": 16})
