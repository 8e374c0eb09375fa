"""What T5 and ViT say of themselves: real configurations, batches, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_calls import call
from tiny_models import SEQUENCE_LENGTH, batch_of, tiny
from torch import Tensor

from shardwright.io import read_document
from shardwright.types import EMBEDDING, HEAD, Model, SequenceParallel, Strategy, misfit
from shardwright_train.cli import APP
from shardwright_train.data.objectives import Text
from shardwright_train.models.base import family_named
from shardwright_train.models.masks import Places
from shardwright_train.models.stock import Pieces

T5_SMALL = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_heads": 8,
    "num_layers": 6,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "task_specific_params": {"summarization": {"early_stopping": True, "prefix": "summarize: "}},
    "transformers_version": "4.27.0.dev0",
    "use_cache": True,
    "vocab_size": 32128,
}
VIT_BASE = {
    "_name_or_path": "google/vit-base-patch16-224",
    "architectures": ["ViTForImageClassification"],
    "attention_probs_dropout_prob": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 768,
    "id2label": {str(i): f"class {i}" for i in range(1000)},
    "image_size": 224,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "label2id": {f"class {i}": str(i) for i in range(1000)},
    "layer_norm_eps": 1e-12,
    "model_type": "vit",
    "num_attention_heads": 12,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "patch_size": 16,
    "qkv_bias": True,
    "transformers_version": "4.13.0.dev0",
}


def describe(folder: Path, config: dict[str, Any], sequence_length: int) -> tuple[int, str]:
    (folder / "config.json").write_text(json.dumps(config))
    options = ["--name", "x", "--sequence-length", str(sequence_length), "--out", str(folder / "model.json")]
    ended = call(APP, "describe", str(folder), *options)
    return ended.exit_code, ended.stderr


@pytest.mark.parametrize(
    ("config", "sequence_length", "parameters", "layers"),
    [
        (T5_SMALL, 512, 60_506_624, ["encoder"] * 6 + ["decoder"] * 6),
        (
            T5_SMALL | {"num_decoder_layers": 1},
            512,
            60_506_624 - 5 * (8 * 512 * 512 + 2 * 512 * 2048 + 3 * 512),
            ["encoder"] * 6 + ["decoder"],
        ),
        (VIT_BASE, 197, 86_567_656, ["block"] * 12),
    ],
)
def test_published_configurations_are_described_with_their_published_size(
    tmp_path: Path, config: dict[str, Any], sequence_length: int, parameters: int, layers: list[str]
) -> None:
    assert describe(tmp_path, config, sequence_length) == (0, "")
    model = read_document(tmp_path / "model.json", Model)
    assert model.parameter_count == parameters
    assert list(model.layers) == layers


def test_the_operations_of_vit_are_those_of_its_patches_and_one_class(tmp_path: Path) -> None:
    assert describe(tmp_path, VIT_BASE, 197)[0] == 0
    types = read_document(tmp_path / "model.json", Model).types
    assert types[EMBEDDING].forward_flops_per_sample == 2 * 196 * 3 * 16 * 16 * 768
    assert types[HEAD].forward_flops_per_sample == 2 * 768 * 1000
    matrices, attention = 2 * 197 * 12 * 768 * 768, 4 * 197 * 197 * 768
    assert types["block"].forward_flops_per_sample == matrices + attention


def test_a_decoder_block_of_t5_attends_twice() -> None:
    types = tiny("t5").types
    feed_forward, projections = 3 * 32 * 48, 4 * 32 * 32
    attention = 4 * SEQUENCE_LENGTH * 32
    encoder = SEQUENCE_LENGTH * (2 * (feed_forward + projections) + attention)
    assert types["encoder"].forward_flops_per_sample == encoder
    assert types["decoder"].forward_flops_per_sample - encoder == SEQUENCE_LENGTH * (2 * projections + attention)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (T5_SMALL | {"num_decoder_layers": 0}, "num_layers and num_decoder_layers must be 1 or more"),
        (T5_SMALL | {"pad_token_id": None, "decoder_start_token_id": None}, "no pad_token_id"),
        (T5_SMALL | {"d_modl": 512}, "unknown key 'd_modl' for models of the family t5"),
        (VIT_BASE | {"image_size": [224, 240]}, "sequence length 197 is not the 211 positions of an image"),
        (VIT_BASE | {"id2label": {}}, "there are no classes"),
        (VIT_BASE | {"vocab_size": 5}, "unknown key 'vocab_size' for models of the family vit"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    status, err = describe(tmp_path, config, 197)
    assert (status, err.count("\n")) == (2, 1)
    assert words in err


def test_the_encoder_reads_and_the_decoder_goes_on() -> None:
    model, family = tiny("t5", decoder_start_token_id=9), family_named("t5", "test")
    learns = family.learns(model)
    assert isinstance(learns, Text) and learns.stream_tokens == 32
    text = torch.stack([torch.arange(33), torch.arange(20, 53)])
    batch = learns.batch(text, torch.Generator())
    assert batch["tokens"].tolist() == [list(range(16)), list(range(20, 36))]
    assert batch["labels"].tolist() == [list(range(16, 32)), list(range(36, 52))]
    assert batch["decoder_tokens"].tolist() == [[9, *range(16, 31)], [9, *range(36, 51)]]


def test_the_token_table_of_t5_begins_with_the_variance_of_the_stock_model() -> None:
    model, family = tiny("t5", vocab_size=2000, initializer_factor=0.5), family_named("t5", "test")
    torch.manual_seed(0)
    embedding = family.build(model, EMBEDDING, "sdpa")
    family.initialize(model, embedding)
    assert embedding.get_parameter("shared.weight").std().item() == pytest.approx(0.5, rel=0.02)


def t5_block(number: int, kernel: str, encoder_states: Tensor, decoder_states: Tensor) -> tuple[Tensor, ...]:
    """What a block of the tiny T5 gives for some states."""
    model, family = tiny("t5"), family_named("t5", "test")
    torch.manual_seed(0)
    block = family.build(model, f"layers[{number}]", kernel)
    family.initialize(model, block)
    constants = family.constants(model, model.layers[0], Places.whole(SEQUENCE_LENGTH), encoder_states, kernel)
    return family.call(block, (encoder_states, decoder_states), batch_of(model, 2, 0), constants)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_the_encoder_of_t5_looks_both_ways_and_its_decoder_ahead_in_the_encoder_alone(kernel: str) -> None:
    draw = torch.Generator().manual_seed(0)
    encoder_states, decoder_states = (torch.randn(2, SEQUENCE_LENGTH, 32, generator=draw) for _ in range(2))
    end, before = slice(SEQUENCE_LENGTH - 1, None), slice(0, SEQUENCE_LENGTH - 1)
    other_encoder, other_decoder = encoder_states.clone(), decoder_states.clone()
    other_encoder[:, end] += 1
    other_decoder[:, end] += 1
    encoded, handed_on = t5_block(1, kernel, encoder_states, decoder_states)
    assert handed_on is decoder_states
    assert (t5_block(1, kernel, other_encoder, decoder_states)[0] != encoded)[:, before].all(-1).all()
    handed_on, decoded = t5_block(2, kernel, encoder_states, decoder_states)
    assert handed_on is encoder_states
    torch.testing.assert_close(decoded, t5_block(2, "sdpa", encoder_states, decoder_states)[1])
    assert torch.equal(t5_block(2, kernel, encoder_states, other_decoder)[1][:, before], decoded[:, before])
    assert (t5_block(2, kernel, other_encoder, decoder_states)[1] != decoded).any(-1).all()


@pytest.mark.parametrize("scaled", [True, False])
def test_outputs_of_t5_are_scaled_where_the_stock_model_does(scaled: bool) -> None:
    model, family = tiny("t5", tie_word_embeddings=scaled), family_named("t5", "test")
    head = family.build(model, HEAD, "sdpa")
    assert isinstance(head, Pieces)
    family.initialize(model, head)
    normed = family.normed(head, (torch.zeros(1, 1, 32), torch.ones(1, 1, 32)))
    assert normed.mean().item() == pytest.approx(32**-0.5 if scaled else 1.0)
    assert model.tied == (("shared.weight", "lm_head.weight"),)


def test_the_head_of_vit_cannot_be_spread_by_ulysses() -> None:
    model = tiny("vit")
    ulysses = Strategy(tp_size=2, dp_size=1, sequence_parallel=SequenceParallel.ULYSSES)
    assert misfit(model, HEAD, ulysses) == "tp_size 2 does not divide pooled_positions 1"
    assert misfit(model, "block", ulysses) is None
    assert misfit(model, HEAD, Strategy(tp_size=2, dp_size=1, sequence_parallel=SequenceParallel.MEGATRON)) is None


@pytest.mark.parametrize(
    ("family", "key"),
    [("t5", "dropout_rate"), ("vit", "attention_probs_dropout_prob"), ("swin", "drop_path_rate")],
)
def test_dropout_is_known_from_the_configuration(family: str, key: str) -> None:
    known = family_named(family, "test")
    assert known.dropout(known.configuration(tiny(family))) == 0.0
    assert known.dropout(known.configuration(tiny(family, **{key: 0.25}))) == 0.25
