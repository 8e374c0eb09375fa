"""Parts of a model that are not trained: how they are named, and which types of layer they make."""

import pytest

from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.models.frozen import FrozenPart, freeze
from shardwright.models.registry import read_presets
from shardwright.plan.communication import regathers
from shardwright.types import EMBEDDING, HEAD, Model

LLAMA = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
T5 = {
    "model_type": "t5",
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 4,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 8,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}


def _frozen(*parts: str, config: dict[str, object] = LLAMA, **changed: object) -> Model:
    model = model_of_config(config | changed, "tiny", 16, "config.json")
    return freeze(model, tuple(map(FrozenPart.parse, parts)))


def test_layers_before_the_first_trained_one_have_no_backward_pass() -> None:
    model = _frozen(EMBEDDING, "layers[:2]", "layers[3]")
    assert model.layers == ("block.no_grad", "block.no_grad", "block", "block.frozen")
    assert [model.types[kind].has_backward for kind in (EMBEDDING, *model.layers, HEAD)] == [False] * 3 + [True] * 3
    assert model.types["block.frozen"].trained_count() == 0 < model.types["block"].trained_count()
    assert model.parameter_count == _frozen("layers[1]").parameter_count


def test_frozen_layers_behind_a_trained_embedding_have_one() -> None:
    model = _frozen("layers")
    assert model.layers == ("block.frozen",) * 4
    assert model.types["block.frozen"].has_backward


def test_single_parameters_are_named_behind_a_dot() -> None:
    model = _frozen("layers[0:2].mlp.*", "layers[2:].self_attn.?_proj.weight", "head.lm_head.weight")
    assert model.layers == ("block.part", "block.part", "block.part2", "block.part2")
    frozen = [p.name for p in model.types["block.part2"].parameters if not p.trained]
    assert frozen == [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    assert [p.name for p in model.types[HEAD].trained_parameters] == ["model.norm.weight"]


def test_parts_add_up() -> None:
    once = _frozen(EMBEDDING, "layers[0]")
    assert freeze(once, [FrozenPart.parse("layers[1]")]) == _frozen(EMBEDDING, "layers[:2]")


def test_a_description_without_frozen_parts_is_written_as_before() -> None:
    model = model_of_config(LLAMA, "tiny", 16, "config.json")
    assert freeze(model, ()) == model
    assert not model.is_frozen and _frozen(EMBEDDING).is_frozen


def test_shared_parameters_count_once_however_their_layers_are_frozen() -> None:
    whole = model_of_config(T5, "tiny", 16, "config.json")
    model = _frozen("layers[0].*.wi.weight", config=T5)
    assert model.layers == ("encoder.part", "encoder", "decoder", "decoder")
    assert model.parameter_count == whole.parameter_count


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (["layer[0]"], "'layer\\[0\\]' names no part"),
        (["layers[]"], "names no part"),
        (["embedding[0]"], "names no part"),
        (["layers[4]"], "'layers\\[4\\]' matches no parameter"),
        (["head.nothing"], "matches no parameter"),
        ([EMBEDDING, "layers", HEAD], "every parameter is frozen"),
    ],
)
def test_what_cannot_be_frozen_is_refused(parts: list[str], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        _frozen(*parts)


def test_a_parameter_of_several_layers_is_frozen_in_all_or_in_none() -> None:
    with pytest.raises(BadInput, match="one parameter of several layers"):
        _frozen(EMBEDDING, tie_word_embeddings=True)
    with pytest.raises(BadInput, match=r"relative_attention_bias.* is one parameter of several layers"):
        _frozen("layers[0]", config=T5)
    both = _frozen(EMBEDDING, "head.lm_head.weight", tie_word_embeddings=True)
    assert not both.types[EMBEDDING].has_backward


@pytest.mark.parametrize("name", read_presets())
def test_regions_of_trained_layers_gather_their_input_again_however_matrices_lie(name):
    preset = read_presets()[name]
    model = model_of_config(preset.config, name, preset.sequence_length, "a preset")
    assert all(all(regathers(kind)) for kind in model.types.values())
