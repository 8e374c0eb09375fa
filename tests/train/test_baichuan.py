"""Baichuan's own: its published files, the slopes of its scores, its head, and what no kernel or mask can do for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from baichuan_reference import interleaved_slopes
from command_calls import call
from random_plans import on_devices, random_plan
from safetensors.torch import load_file
from test_weights import published as published_folder
from test_weights_folder import change_config, change_tensors
from tiny_models import SEQUENCE_LENGTH, batch_of, tiny

from shardwright.estimate.hardware import Link
from shardwright.estimate.layers import Machine, estimate_layer
from shardwright.io import BadInput, read_document
from shardwright.types import Attention, LayerStrategy, Model, Plan, Precision, Strategy
from shardwright_train.cli import APP
from shardwright_train.models.attention_kernels import check_kernels
from shardwright_train.models.base import family_named
from shardwright_train.models.masks import Places, alibi_mask, alibi_slopes
from shardwright_train.models.support import flash_obstacle
from shardwright_train.weights.reading import open_weights

Config = dict[str, Any]
PACKED = "model.layers.2.self_attn.W_pack.weight"
SLOPED = tiny("baichuan")
ROTATED = tiny("baichuan", max_position_embeddings=64, z_loss_weight=None)


def published(hidden: int, inner: int, layers: int, heads: int, vocabulary: int, **more: Any) -> Config:
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    code = {"AutoConfig": "configuration_baichuan.BaichuanConfig", "AutoModelForCausalLM": "modeling_baichuan.Baichuan"}
    kind = {"model_type": "baichuan", "architectures": ["BaichuanForCausalLM"], "auto_map": code, "hidden_act": "silu"}
    tokens = {"vocab_size": vocabulary, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    numbers = {"initializer_range": 0.02, "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "use_cache": True}
    return shape | kind | tokens | numbers | {"num_attention_heads": heads, "torch_dtype": "bfloat16"} | more


PUBLISHED = {
    "Baichuan-7B": (published(4096, 11008, 32, 32, 64000, max_position_embeddings=4096), 7_000_559_616),
    "Baichuan-13B": (
        published(5120, 13696, 40, 40, 64000, model_max_length=4096, _from_model_config=True),
        13_264_901_120,
    ),
    "Baichuan2-7B": (
        published(4096, 11008, 32, 32, 125696, max_position_embeddings=4096, model_max_length=4096),
        7_505_973_248,
    ),
    "Baichuan2-13B": (
        published(5120, 13696, 40, 40, 125696, model_max_length=4096, tokenizer_class="BaichuanTokenizer"),
        13_896_668_160,
    ),
}


def describe(folder: Path, config: Config, length: int) -> tuple[int, str]:
    (folder / "config.json").write_text(json.dumps(config))
    asked = ["--name", "x", "--sequence-length", str(length), "--out", str(folder / "model.json")]
    ended = call(APP, "describe", str(folder), *asked)
    return ended.exit_code, ended.stderr


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_described_as_it_is(tmp_path: Path, name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert describe(tmp_path, config, 4096) == (0, "")
    model, family = read_document(tmp_path / "model.json", Model), family_named("baichuan", "test")
    assert model.parameter_count == parameters and "auto_map" not in model.config
    assert model.types["block"].alibi_heads == (40 if "13B" in name else 0)
    assert family.facts.norm.of_head(model.config) == ("2" in name)
    assert describe(tmp_path, model.config | {"num_hidden_layers": len(model.layers)}, 4096) == (0, "")
    assert read_document(tmp_path / "model.json", Model) == model


@pytest.mark.parametrize(
    ("change", "length", "words"),
    [
        ({}, 8192, "sequence length 8192 is over 4096 positions"),
        ({"z_loss_weight": 0.1}, 4096, "z_loss_weight 0.1 cannot be trained: the loss is only cross entropy"),
        ({"tie_word_embeddings": True}, 4096, "tie_word_embeddings true cannot be trained"),
        ({"num_key_value_heads": 8}, 4096, "num_key_value_heads 8 cannot be trained"),
    ],
)
def test_what_cannot_be_trained_is_named_in_one_line(tmp_path: Path, change: Config, length: int, words: str) -> None:
    for name in ("Baichuan-7B", "Baichuan2-13B"):
        status, error = describe(tmp_path, PUBLISHED[name][0] | change, length)
        assert (status, error.count("\n")) == (2, 1) and words in error


@pytest.mark.parametrize("heads", [1, 8, 12, 40])
def test_slopes_and_masks_are_those_of_the_published_code(heads: int) -> None:
    assert alibi_slopes(heads) == pytest.approx(interleaved_slopes(heads), rel=1e-14)
    example = torch.zeros(1, dtype=torch.float64)
    mask = alibi_mask(Places.whole(5), alibi_slopes(heads), example)
    slopes, positions = torch.tensor(interleaved_slopes(heads)).float(), torch.arange(5)
    wanted = (slopes[:, None, None] * (positions[None] - positions[:, None])).double()
    seen = positions[None] <= positions[:, None]
    assert torch.equal(mask[0][:, seen], wanted[:, seen])
    assert (mask[0][:, ~seen] == torch.finfo(torch.float64).min).all()
    # One for all layers, as long as a layer holds it.
    assert alibi_mask(Places.whole(5), alibi_slopes(heads), example) is mask


def planned(model: Model) -> Plan:
    return on_devices(random_plan(model, 0, 2, "bfloat16"), "NVIDIA H200", "NVIDIA H200")


def test_flash_attention_is_for_rotated_positions_alone() -> None:
    assert flash_obstacle(planned(SLOPED)) == "cannot add the slopes of ALiBi to scores"
    assert flash_obstacle(planned(ROTATED)) is None


def test_documents_have_no_masks_of_heads() -> None:
    family = family_named("baichuan", "test")
    with pytest.raises(BadInput, match="ALiBi need a mask for each head, unlike --reset-attention-mask") as refused:
        check_kernels(planned(SLOPED), family, torch.device("cpu"), "plan.json", by_document=True)
    assert "\n" not in str(refused.value)
    check_kernels(planned(ROTATED), family, torch.device("cpu"), "plan.json", by_document=True)


def test_kept_activations_and_the_mask_are_those_that_are_estimated() -> None:
    """The mask and the normalised matrix are computed once for all samples: they are workspace."""
    shape = {"type": "block", "tp_size": 1, "dp_size": 1}
    precision = Precision(parameters="float32", compute="bfloat16", reduce="float32")
    machine, figures = Machine(1e12, 1e12, Link(1e12, 0.0)), {}
    for model in (SLOPED, ROTATED):
        for kind, strategy in (("block", LayerStrategy(**shape)), ("head", Strategy(tp_size=1, dp_size=1))):
            figures[model is SLOPED, kind] = [
                estimate_layer(model, kind, strategy, samples, precision, Attention.SDPA, machine) for samples in (1, 2)
            ]
    more = {}
    for kind in ("block", "head"):
        sloped, rotated = figures[True, kind], figures[False, kind]
        assert [x.activation_bytes for x in sloped] == [x.activation_bytes for x in rotated]
        (more[kind],) = {x.workspace_bytes - y.workspace_bytes for x, y in zip(sloped, rotated, strict=True)}
    assert more == {"block": 2 * 8 * SEQUENCE_LENGTH**2, "head": 2 * 61 * 32}


def test_blocks_save_what_llamas_do_and_one_mask_for_all() -> None:
    family, batch = family_named("baichuan", "test"), batch_of(SLOPED, 4, 0)
    states = torch.randn(4, SEQUENCE_LENGTH, 32, requires_grad=True)
    saved: dict[str, dict[int, int]] = {}
    for name, model in (("sloped", SLOPED), ("rotated", ROTATED)):
        held = saved[name] = dict[int, int]()

        def pack(x: torch.Tensor, held: dict[int, int] = held) -> torch.Tensor:
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        constants = [family.constants(model, "block", Places.whole(16), states.detach(), "sdpa") for _ in range(2)]
        blocks = [family.build(model, f"layers[{i}]") for i in range(2)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            outputs = [family.call(block, (states,), batch, c) for block, c in zip(blocks, constants, strict=True)]
        assert len(outputs) == 2
        assert (constants[0]["mask"] is constants[1]["mask"]) and (constants[0]["mask"] is None) == (name == "rotated")
    mask_bytes = 8 * SEQUENCE_LENGTH**2 * 4
    assert 0 <= sum(saved["sloped"].values()) - sum(saved["rotated"].values()) - mask_bytes <= 2 * 4 * 8 * 16 * 4


def test_rows_of_a_matrix_of_files_are_read_into_each_that_it_stacks(tmp_path: Path) -> None:
    model = tiny("baichuan", vocab_size=66)
    family = family_named("baichuan", "test")
    published_folder(model, tmp_path / "model")
    change_config(tmp_path / "model", auto_map={"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"})
    weights = open_weights(tmp_path / "model", model, family, allow_new=False)
    packed = load_file(tmp_path / "model" / "model.safetensors")[PACKED]
    for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
        window, box = torch.empty(6, 20), ((3, 9), (12, 32))
        assert weights.read(window, f"model.layers.2.self_attn.{name}.weight", (32, 32), box)
        assert torch.equal(window, packed[32 * place + 3 : 32 * place + 9, 12:])
    assert weights.new == weights.surplus == ()
    change_tensors(tmp_path / "model", lambda tensors: tensors.update({PACKED: tensors[PACKED][:64].clone()}))
    with pytest.raises(BadInput, match=r"W_pack.weight has the shape \[64, 32\], the model's is \[96, 32\]"):
        open_weights(tmp_path / "model", model, family, allow_new=False)
    change_tensors(tmp_path / "model", lambda tensors: tensors.pop(PACKED))
    with pytest.raises(BadInput, match=r"lacks model.layers.2.self_attn.k_proj.weight, .*q_proj.*v_proj"):
        open_weights(tmp_path / "model", model, family, allow_new=False)
