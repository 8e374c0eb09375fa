"""Keys that change nothing are named by `describe` and `advise` alike, and those of other models refused by both."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from command_calls import call
from stock_keys import TARGET, content, family_keys

from shardwright.io import read_document
from shardwright.models.config_keys import read_keys, without_notes
from shardwright.models.registry import FAMILIES
from shardwright.types import Model
from shardwright_search.cli import APP as SEARCH
from shardwright_train.cli import APP as TRAIN

LLAMA = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 64,
}  # fmt: skip
V4_COMMON = {
    "return_dict": True, "output_hidden_states": False, "output_attentions": False, "torchscript": False,
    "torch_dtype": "bfloat16", "use_bfloat16": False, "tf_legacy_loss": False, "pruned_heads": {},
    "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "is_decoder": False, "cross_attention_hidden_size": None,
    "add_cross_attention": False, "tie_encoder_decoder": False, "max_length": 20, "min_length": 0, "do_sample": False,
    "early_stopping": False, "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "temperature": 1.0,
    "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0, "length_penalty": 1.0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "num_return_sequences": 1,
    "output_scores": False, "return_dict_in_generate": False, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "remove_invalid_values": False, "exponential_decay_length_penalty": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "architectures": ["LlamaForSequenceClassification"], "finetuning_task": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "tokenizer_class": None,
    "prefix": None, "bos_token_id": 1, "pad_token_id": None, "eos_token_id": 2, "sep_token_id": None,
    "decoder_start_token_id": None, "task_specific_params": None, "problem_type": "regression", "_name_or_path": "x",
    "transformers_version": "4.46.0", "num_labels": 2,
}  # fmt: skip
"""All that PretrainedConfig.to_dict of transformers 4 writes for any model."""
HARMLESS: dict[str, dict[str, Any]] = {
    "unsloth": {"unsloth_fixed": True, "unsloth_version": "2025.3.19", "model_name": "unsloth/llama"},
    "trl": {"use_reentrant": False, "loss_type": "ForCausalLM", "num_labels": 1},
    "axolotl": {"axolotl_config": {"lr": 1}, "use_cache": False, "_attn_implementation_autoset": True},
    "llama-factory": {"attn_implementation": "flash_attention_2", "_flash_attn_2_enabled": True},
    "nemo": {"nemo_version": "2.0", "model_max_length": 4096},
    "off": {"sliding_window": None, "num_experts": None, "hidden_dropout": 0.0, "qk_layernorm": None},
    "window off": {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 1},
    "window of other classes": {"sliding_window": 16},
    "nowhere": {"trained_by": "somebody", "dataset_mixture_weights": [0.5, 0.5]},
    "transformers 4": V4_COMMON,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "typo": ({"hiden_size": 64}, "unknown key 'hiden_size' for models of the family llama: did you mean hidden_size?"),
    "shorter": ({"num_hidden_layer": 3}, "did you mean num_hidden_layers?"),
    "experts": ({"num_local_experts": 8}, "unknown key 'num_local_experts' for models of the family llama: it changes"),
    "multiplier": ({"residual_multiplier": 0.2}, "it changes other models of transformers"),
    "bias off where others have one": ({"use_bias": False}, "it changes other models of transformers"),
    "norms": ({"use_qk_norm": True}, "it changes other models of transformers"),
    "own code": ({"auto_map": {"AutoModel": "x.Y"}, "depth_scale": 2}, "read by the code that auto_map names"),
}


def _folder(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _described(folder: Path, out: Path) -> Any:
    return call(TRAIN, "describe", folder, "--name", "m", "--sequence-length", 32, "--out", out)


def _advised(folder: Path, out: Path) -> Any:
    asked = ("--seq", 32, "--gpus", "1x1:H100-SXM", "--batch", 1, "--out", out, "--against", "none")
    return call(SEARCH, "advise", folder, *asked[:-2])


@pytest.mark.parametrize("name", HARMLESS)
def test_keys_that_change_nothing_are_named_in_one_line(name: str, tmp_path: Path) -> None:
    whole, plain = _folder(tmp_path / "whole", LLAMA | HARMLESS[name]), _folder(tmp_path / "plain", LLAMA)
    for folder in (whole, plain):
        ended = _described(folder, tmp_path / f"{folder.name}.json")
        assert ended.exit_code == 0, ended.stderr
        assert ended.stderr.count("\n") == (folder is whole)
        ignored = [key for key in HARMLESS[name] if key not in read_keys().families["llama"]]
        assert folder is plain or f"config.json: {', '.join(ignored)}: ignored, a model of the family" in ended.stderr
    models = [read_document(tmp_path / f"{folder}.json", Model) for folder in ("whole", "plain")]
    assert models[0].types == models[1].types and models[0].layers == models[1].layers
    assert not set(models[0].config) & {key for key in HARMLESS[name] if key not in read_keys().families["llama"]}


def test_advise_names_them_as_describe_does(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", LLAMA | HARMLESS["unsloth"])
    described, advised = _described(folder, tmp_path / "m.json"), _advised(folder, tmp_path / "plan.json")
    assert (described.exit_code, advised.exit_code) == (0, 0), advised.stderr
    assert described.stderr in advised.stderr and described.stderr.count("\n") == 1


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_could_change_a_model_are_refused_by_both(name: str, tmp_path: Path) -> None:
    keys, words = REFUSED[name]
    folder = _folder(tmp_path / "m", LLAMA | keys)
    for ended in (_described(folder, tmp_path / "m.json"), _advised(folder, tmp_path / "m.json")):
        assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)
        assert words in ended.stderr and not (tmp_path / "m.json").exists()


def test_keys_inside_of_a_part_are_named_with_it() -> None:
    config = {"model_type": "gemma3", "text_config": {"hidden_size": 8, "unsloth_fixed": True}}
    kept, line = without_notes(FAMILIES["gemma3"], config)
    assert kept == {"model_type": "gemma3", "text_config": {"hidden_size": 8}}
    assert line is not None and line.startswith("text_config.unsloth_fixed: ignored")
    with pytest.raises(ValueError, match="unknown key 'residual_multiplier'"):
        without_notes(FAMILIES["gemma3"], {"text_config": {"residual_multiplier": 2}})


@pytest.mark.parametrize("name", FAMILIES)
def test_the_list_has_every_key_of_the_installed_classes(name: str) -> None:
    """A newer transformers may declare more: then the list is written again, lest they pass as unknown."""
    assert family_keys(FAMILIES[name]) <= read_keys().families[name]


@pytest.mark.long
def test_the_list_is_what_the_pinned_transformers_declares() -> None:
    written = json.loads(TARGET.read_text())
    if transformers.__version__ == written["transformers"]:
        assert content() == written
    else:  # what is off by default, and what is new, differ
        assert {*content()["families"]} == {*written["families"]}
