"""The modules that get low-rank matrices are those to which peft itself gives them, in every family."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import CONFIGS, stock_model, tiny

from shardwright.io import BadInput
from shardwright.models.adapter_config import adapter_of_config, read_adapter
from shardwright.models.frozen import layers_of
from shardwright.models.low_rank import adapt, adapter_config, pairs_of
from shardwright.models.low_rank_targets import paths_of
from shardwright.models.registry import FAMILIES
from shardwright.types import Model
from shardwright_train.models.base import family_named

TOGETHER = "cannot have one pair of low-rank matrices together"
REFUSED = {
    "baichuan": f"model.layers.0.self_attn.W_pack is held here as q_proj and k_proj and v_proj, which {TOGETHER}",
    "phi3": f"model.layers.0.self_attn.qkv_proj is held here as q_proj and k_proj and v_proj, which {TOGETHER}",
    "glm4": f"model.layers.0.mlp.gate_up_proj is held here as gate_proj and up_proj, which {TOGETHER}",
    "llama4_text": "model.layers.1.feed_forward.router returns its scores twice, which peft cannot run",
}
"""Families some of whose matrices have none here, with the first and the reason."""


def _ours(model: Model) -> dict[str, int]:
    """The elements of all low-rank matrices by their names."""
    paths = paths_of(model)
    return {
        f"{paths[place]}{matrix.name}": matrix.numel(1)
        for place, kind in layers_of(model)
        for _, *both in pairs_of(model, kind)
        for matrix in both
    }


def _theirs(model: Model, config: dict[str, Any]) -> dict[str, int]:
    with torch.device("meta"):
        family = family_named(model.family, "test")
        stock = stock_model(model) if model.family == "baichuan" else family.stock(family.configuration(model))
        adapted = get_peft_model(stock, LoraConfig(**config))
    named = ((name.removeprefix("base_model.model."), p.numel()) for name, p in adapted.named_parameters())
    return {name.replace(".default", ""): count for name, count in named if ".lora_" in name}


def _adapted(model: Model, config: dict[str, Any]) -> Model:
    return adapt(model, adapter_of_config({"peft_type": "LORA", **config}, "adapter"), "adapter")


def test_every_family_is_compared() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} >= {
        name for name, facts in FAMILIES.items() if facts.untrained is None
    } - {"qwen2"}


@pytest.mark.parametrize("family", CONFIGS)
def test_all_linear_means_what_peft_means(family: str) -> None:
    config = {"r": 2, "target_modules": "all-linear"}
    theirs = _theirs(tiny(family), config)
    if family not in REFUSED:
        assert _ours(_adapted(tiny(family), config)) == theirs
        return
    named = REFUSED[family].partition(" ")[0]
    assert f"{named}.lora_A.weight" in theirs
    with pytest.raises(BadInput) as refused:
        _adapted(tiny(family), config)
    assert f"target_modules: {REFUSED[family]}" in str(refused.value)
    config["exclude_modules"] = [name.rpartition(".")[2] for name in ("W_pack", "qkv_proj", "gate_up_proj", "router")]
    assert _ours(_adapted(tiny(family), config)) == _theirs(tiny(family), config)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"target_modules": r".*layers\.[02]\.(self_attn\.[qv]_proj|mlp\.up_proj)"}),
        ("llama", {"target_modules": ["model.layers.1.self_attn.q_proj", "v_proj"], "layers_to_transform": [2]}),
        ("t5", {"target_modules": ["q", "wo"], "layers_to_transform": 1, "layers_pattern": "block"}),
        ("gpt2", {"target_modules": ["c_proj"], "layers_to_transform": [0, 3], "layers_pattern": ["h"]}),
        ("qwen3", {"target_modules": "all-linear", "exclude_modules": r".*\.mlp\..*"}),
        ("bert", {"target_modules": ["dense"], "exclude_modules": ["intermediate.dense"]}),
        ("whisper", {"target_modules": ["encoder_attn.q_proj", "fc1"], "rank_pattern": {"fc1": 3, "layers.1.fc1": 5}}),
        ("llava", {"target_modules": ["multi_modal_projector.linear_1", "language_model.layers.0.self_attn.q_proj"]}),
        ("deepseek_v3", {"target_modules": ["q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj"]}),
        ("deepseek_v3", {"target_modules": ["model.layers.0.mlp.down_proj", "o_proj"]}),
        ("deepseek_v2", {"target_modules": r".*experts\.(gate|up)_proj|.*kv_b_proj"}),
        ("mixtral", {"target_modules": ["w1", "w2", "w3"], "rank_pattern": {"down_proj": 3}}),
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight", "gate_up_proj"]}),
        ("llama4_text", {"target_modules": ["shared_expert.up_proj", "feed_forward.up_proj"]}),
    ],
)
def test_named_modules_are_found_as_peft_finds_them(family: str, config: dict[str, Any]) -> None:
    config = {"r": 2, **config}
    assert _ours(_adapted(tiny(family), config)) == _theirs(tiny(family), config)


@pytest.mark.parametrize("family", ["deepseek_v3", "bert", "gpt2", "mixtral"])
def test_a_folder_of_peft_is_described_as_its_configuration_was(family: str, tmp_path: Path) -> None:
    config = {"r": 2, "lora_alpha": 6, "target_modules": "all-linear"}
    described = family_named(family, "test")
    adapted = get_peft_model(described.stock(described.configuration(tiny(family))), LoraConfig(**config))
    adapted.save_pretrained(str(tmp_path))
    read, _ = read_adapter(tmp_path)
    model = adapt(tiny(family), read, "adapter")
    wanted = _adapted(tiny(family), config)
    assert model.types == wanted.types and model.low_rank.alphas == wanted.low_rank.alphas  # type: ignore[union-attr]
    assert len(model.low_rank.weights_sha256) == 64  # type: ignore[arg-type, union-attr]
    (tmp_path / "again.json").write_text(json.dumps(adapter_config(model)))
    again, _ = read_adapter(tmp_path / "again.json")
    assert adapt(tiny(family), again, "adapter").types == model.types


def test_a_pickled_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"]}))
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(BadInput, match="is pickled, which is not read: save it as adapter_model"):
        read_adapter(tmp_path)
