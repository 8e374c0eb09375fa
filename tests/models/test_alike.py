"""Files of types without a family: read under another name, priced by their keys, or refused with a way out."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_calls import call
from transformers import GPT2Config, InternLM3Config, IQuestCoderConfig

from shardwright.io import BadInput, read_document
from shardwright.models.alike import nearest_family, priced_families, read_config
from shardwright.models.description import model_of_config
from shardwright.models.registry import FAMILIES, read_presets
from shardwright.types import Model
from shardwright_search.cli import APP as SEARCH
from shardwright_train.cli import APP as TRAIN

DENSE = {
    "model_type": "seed_oss", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = DENSE | {
    "model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def _model(config: dict[str, Any], taken_as: str | None = None) -> Model:
    return model_of_config(read_config(config, "f", taken_as).config, "m", 32, "f")


def test_a_model_of_another_type_has_the_shapes_that_its_keys_say() -> None:
    assert _model(DENSE, "llama") == _model(DENSE | {"model_type": "llama"})
    experts = {"num_local_experts": 8, "intermediate_size": 16, "num_experts_per_tok": 2}
    sparse = _model(DENSE | experts | {"model_type": "mixtral", "sliding_window": None})
    taken = _model(EXPERTS, "mixtral")
    assert (taken.types, taken.layers) == (sparse.types, sparse.layers)
    read = read_config(EXPERTS, "f", "mixtral")
    assert read.notes == (
        "approximate, as mixtral: without intermediate_size, n_shared_experts, first_k_dense_replace",
    )
    assert read.named("m") == "m (approximate, as mixtral)"


def test_keys_may_have_the_names_of_other_classes() -> None:
    old = {"n_embd": 48, "n_inner": 80, "n_layer": 2, "n_head": 6, "num_kv_heads": 2, "n_positions": 64}
    kept = {key: DENSE[key] for key in ("head_dim", "vocab_size", "tie_word_embeddings")}
    assert _model(old | kept | {"model_type": "falcon"}, "llama").types == _model(DENSE, "llama").types


def test_the_language_model_of_a_larger_one_is_taken_alone() -> None:
    whole = {"model_type": "new_vl", "text_config": DENSE, "vision_config": {"hidden_size": 7}}
    assert _model(whole, "llama").types == _model(DENSE, "llama").types
    assert "its text_config alone" in read_config(whole, "f", "llama").notes[-1]


@pytest.mark.parametrize("lacking", ["hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"])
def test_no_length_is_made_up(lacking: str) -> None:
    config = {key: value for key, value in DENSE.items() if key != lacking}
    with pytest.raises(BadInput, match=f"f: 'seed_oss' has no {lacking}, which llama needs"):
        read_config(config, "f", "llama")


def test_what_a_family_takes_by_default_is_not_taken_of_another_type() -> None:
    """Mistral's window and its 8 heads of keys, and Qwen 3's heads of 128 features, are not those of other models."""
    bare = {key: value for key, value in DENSE.items() if key not in ("head_dim", "num_key_value_heads")}
    assert _model(bare, "mistral").types == _model(bare | {"model_type": "llama"}).types
    assert _model(bare, "qwen3").types["block"].parameters[0].shape == (48, 48)


def test_a_family_that_does_not_fit_is_refused_by_the_options_name() -> None:
    with pytest.raises(BadInput, match=r"--as: llama has no experts, and the model has 8 \(n_routed_experts\)"):
        read_config(EXPERTS, "f", "llama")
    with pytest.raises(BadInput, match="--as: 'lama' is not a family of language models: did you mean llama"):
        read_config(DENSE, "f", "lama")
    with pytest.raises(BadInput, match="--as: 'bert' is not a family of language models"):
        read_config(DENSE, "f", "bert")


def test_a_refusal_names_the_nearest_family_and_what_to_do() -> None:
    with pytest.raises(BadInput) as refused:
        read_config(EXPERTS, "f")
    said = str(refused.value)
    assert "the nearest is mixtral: --as mixtral prices it by its keys, approximately" in said
    assert "docs/add-a-model.md" in said and len(said) < 250
    near = {"seed_oss": "llama", "olmo3": "olmo2", "gemma": "gemma2", "phi": "phi3", "qwen2_moe": "qwen2"}
    assert {kind: nearest_family(DENSE | {"model_type": kind}) for kind in near} == near
    assert nearest_family({"model_type": "mamba", "hidden_size": 64, "vocab_size": 100}) is None
    with pytest.raises(BadInput, match="f: has no model_type"):
        read_config({"hidden_size": 1}, "f")


@pytest.mark.parametrize("taken_as", priced_families())
def test_each_family_of_language_models_prices_its_own_presets_by_their_keys(taken_as: str) -> None:
    presets = {name: each for name, each in read_presets().items() if each.config["model_type"] == taken_as}
    for name, preset in presets.items():
        other = preset.config | {"model_type": "unheard_of", "tie_word_embeddings": False}
        told = FAMILIES[taken_as].configured(preset.config)
        lengths = {key: told[key] for key in FAMILIES[taken_as].keys.lengths if key not in other}
        own = preset.config | lengths | {"tie_word_embeddings": False}
        read = read_config(other | lengths, name, taken_as)
        taken = model_of_config(read.config, name, preset.sequence_length, name)
        assert taken.parameter_count == model_of_config(own, name, preset.sequence_length, name).parameter_count


def test_types_of_another_name_are_read_as_their_family() -> None:
    kimi = read_presets()["kimi-k2"].config
    assert _model(kimi | {"model_type": "kimi_k2"}) == _model(kimi)
    for made, family in ((InternLM3Config(), "llama"), (IQuestCoderConfig(), "llama"), (GPT2Config(), "gpt2")):
        config = json.loads(made.to_json_string(use_diff=False))
        kind = {"gpt2": "gpt-sw3"}.get(family, made.model_type)
        read = read_config(config | {"model_type": kind}, "f")
        assert (read.config["model_type"], read.approximates) == (family, None)
        whole = {key: value for key, value in config.items() if not key.startswith("_")}
        assert _model(config | {"model_type": kind}).types == _model(whole | {"model_type": family}).types
    older = {"model_type": "internlm3", "qkv_bias": False, "bias": False, "vocab_size": 96, "hidden_size": 256}
    older |= {"num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
    shapes = {p.name: p.shape for p in _model(older).types["block"].parameters}
    assert shapes["self_attn.k_proj.weight"] == (2 * 128, 256)  # as InternLM3Config has it, not LlamaConfig


def test_describe_takes_them_too_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"model_type": "unheard_of"}))
    asked = ("describe", tmp_path, "--name", "m", "--sequence-length", 32, "--out", tmp_path / "m.json")
    refused = call(TRAIN, *asked)
    assert refused.exit_code == 2 and "--as llama" in refused.stderr and not (tmp_path / "m.json").exists()
    described = call(TRAIN, *asked, "--as", "llama")
    assert described.exit_code == 0, described.stderr
    assert "config.json: approximate, as llama: all its keys are read" in described.stderr
    assert read_document(tmp_path / "m.json", Model) == _model(DENSE, "llama")


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_weights_in_other_formats_change_no_shape(method: str) -> None:
    config = DENSE | {"model_type": "llama", "quantization_config": {"quant_method": method}}
    assert _model(config) == _model(DENSE | {"model_type": "llama"})
    (note,) = read_config(config, "f").notes
    assert note.startswith(f"weights are stored in {method}")


@pytest.mark.parametrize("kind", ["qwen2_vl", "internvl", "aya_vision"])
def test_images_beside_a_text_are_refused_in_one_line_with_the_way_to_price_the_text(kind: str, tmp_path: Path) -> None:
    text = {key: value for key, value in DENSE.items() if key != "model_type"}
    config = {"model_type": kind, "text_config": text, "vision_config": {"hidden_size": 32}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ("describe", tmp_path, "--name", "m", "--sequence-length", 32, "--out", tmp_path / "m.json")
    for app, command in ((TRAIN, asked), (SEARCH, ("advise", tmp_path, "--gpus", "1x8:H100-SXM"))):
        refused = call(app, *command)
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert (
            f"model_type {kind!r} is none of the families known here, and has a vision_config: --as" in refused.stderr
        )
        assert "prices its text_config alone, approximately" in refused.stderr
    assert _model(config, "llama") == _model(DENSE, "llama")
