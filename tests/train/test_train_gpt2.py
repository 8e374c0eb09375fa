"""GPT-2: the keys of its configuration, what it refuses, and its initial weights."""

import math

import pytest
import torch
from tiny_models import CONFIGS, LAYERS, SEQUENCE_LENGTH, tiny

from shardwright_train.models.base import describe, family_named

PUBLISHED = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
"""config.json of openai-community/gpt2."""


def test_the_published_configuration_has_the_published_number_of_parameters() -> None:
    family = family_named("gpt2", "test")
    model = describe(family, PUBLISHED, "gpt2", 1024)
    assert model.parameter_count == 124_439_808
    assert model.types["block"].tp_must_divide == {"n_head": 12, "n_inner": 4 * 768}
    assert family.dropout(family.configuration(model)) == 0.1


def test_short_and_long_keys_mean_the_same() -> None:
    long = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    long |= {"n_positions": "max_position_embeddings"}
    config = {long.get(key, key): value for key, value in CONFIGS["gpt2"].items()}
    short, other = tiny("gpt2"), describe(family_named("gpt2", "test"), config, "long", SEQUENCE_LENGTH)
    assert (other.types, other.layers) == (short.types, short.layers)
    assert not {"n_layer", "num_hidden_layers"} & (set(short.config) | set(other.config))


@pytest.mark.parametrize("key", ["add_cross_attention", "reorder_and_upcast_attn"])
def test_what_cannot_be_trained_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} true cannot be trained: "):
        tiny("gpt2", **{key: True})


def test_initial_weights_on_the_residual_path_shrink_with_depth() -> None:
    family = family_named("gpt2", "test")
    for layers in (LAYERS, 4 * LAYERS):
        model = tiny("gpt2", n_layer=layers, n_embd=128, n_inner=512)
        block = family.build(model, "layers[1]", "sdpa")
        torch.manual_seed(0)
        family.initialize(model, block)
        shrunk = 0.02 / math.sqrt(2 * layers)
        assert block.get_parameter("mlp.c_proj.weight").std().item() == pytest.approx(shrunk, rel=0.02)
        assert block.get_parameter("attn.c_proj.weight").std().item() == pytest.approx(shrunk, rel=0.02)
        assert block.get_parameter("mlp.c_fc.weight").std().item() == pytest.approx(0.02, rel=0.02)
