"""Gemma 3n with images is described by traces and figures of its tower, planned, and not trained."""

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from command_calls import call
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma3nConfig, Gemma3nForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.gemma3n import modeling_gemma3n

from shardwright.io import BadInput, read_document
from shardwright.models.adapter_config import read_adapter
from shardwright.models.alike import read_config
from shardwright.models.frozen import FrozenPart, freeze
from shardwright.models.low_rank import adapt
from shardwright.models.registry import TRACED_TOWERS
from shardwright.types import EMBEDDING, HEAD, Model, Plan
from shardwright_search.advise import question as asking
from shardwright_search.cli import APP as SEARCH
from shardwright_train.cli import APP as TRAIN
from shardwright_train.models.base import family_of
from shardwright_train.models.gemma3n import GEMMA3N, IMAGE_TOKENS, SIDE, TOWER_PARTS, TOWER_TRACED, describe_gemma3n
from shardwright_train.models.operators import Trace
from shardwright_train.models.support import check_supported
from shardwright_train.torch_private import FakeTensorMode

LENGTH, IMAGE = 2 * IMAGE_TOKENS + 30, 85
CONFIG: dict[str, Any] = {
    "model_type": GEMMA3N,
    "text_config": {
        **{"vocab_size": 120, "vocab_size_per_layer_input": 80, "hidden_size": 32, "num_attention_heads": 4},
        **{"head_dim": 8, "num_key_value_heads": 2, "intermediate_size": 48, "hidden_size_per_layer_input": 12},
        **{"laurel_rank": 4, "sliding_window": LENGTH, "max_position_embeddings": 1024, "num_hidden_layers": 6},
        # Keys that the last blocks take are those of blocks behind the first of their type.
        **{"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3},
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
        "pad_token_id": 0,
    },
    "vision_config": {"model_type": "gemma3n_vision", "vocab_size": 10, "vocab_offset": 80},
    "audio_config": {"hidden_size": 24, "vocab_size": 10, "vocab_offset": 90},
    "image_token_id": IMAGE,
    "audio_token_id": 95,
    "images_per_sample": 2,
}


def described(**changes: Any) -> Model:
    return describe_gemma3n({**CONFIG, **changes}, "tiny", LENGTH)[0]


class _Tower(nn.Module):
    def forward(self, pixel_values: torch.Tensor, **_: Any) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(last_hidden_state=torch.zeros(len(pixel_values), 2048, 16, 16))


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stock model, but for its towers."""
    built = modeling_gemma3n.AutoModel.from_config
    monkeypatch.setattr(
        modeling_gemma3n.AutoModel,
        "from_config",
        lambda config: built(config) if config.model_type == "gemma3n_text" else _Tower(),
    )
    kept = {key: value for key, value in CONFIG.items() if key not in ("model_type", "images_per_sample")}
    return Gemma3nForConditionalGeneration(Gemma3nConfig(**kept))


def test_parameters_but_for_the_towers_are_those_of_the_stock_model(stock: Any) -> None:
    model, named = described(), dict[str, int]()
    for number, kind in enumerate((EMBEDDING, *model.layers, HEAD)):
        at = "" if kind in (EMBEDDING, "vision", HEAD) else f"{model.types[kind].traced.path}.{number - 2}."
        named |= {f"{at}{p.name}": prod(p.shape) for p in model.types[kind].parameters}
    tower = {name: size for name, size in named.items() if name.startswith("model.vision_tower.")}
    assert sum(tower.values()) == 294_126_912
    assert {name: size for name, size in named.items() if name not in tower} == {
        name: p.numel() for name, p in stock.named_parameters(remove_duplicate=False)
    }


def test_operations_behind_the_tower_are_those_that_torch_counts(stock: Any) -> None:
    model = described()
    tokens = torch.ones((1, LENGTH), dtype=torch.long)
    tokens[:, 2 : 2 + 2 * IMAGE_TOKENS] = IMAGE
    stock.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        stock(input_ids=tokens, pixel_values=torch.zeros(2, 3, 2, 2))
    total = sum(model.types[name].forward_flops_per_sample for name in (EMBEDDING, *model.layers, HEAD))
    assert total == counter.get_total_flops() + 2 * (TOWER_TRACED.product_flops + TOWER_TRACED.attention_flops)


def test_the_figures_are_those_of_the_tower() -> None:
    timm = pytest.importorskip("timm")
    trace = Trace()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            tower = timm.create_model("mobilenetv5_300m_enc").train()
            image = torch.zeros(1, 3, SIDE, SIDE)
            trace.begin("vision", tower)
            with trace.watching():
                out = tower(image)
    finally:
        torch.set_default_dtype(torch.float32)
    assert out.shape == (1, 2048, 16, 16)
    parts = {part: sum(p.numel() for p in tower.get_submodule(part).parameters()) for part in TOWER_PARTS}
    assert parts == TOWER_PARTS
    assert sum(parts.values()) == sum(p.numel() for p in tower.parameters())
    assert trace.seen["vision"].counted() == TOWER_TRACED


def test_blocks_are_of_one_type_only_if_they_do_the_same() -> None:
    """The first drop most features, the next pass on keys and values, the last take them; no window cuts a sample."""
    kinds = described().layers[1:]
    assert kinds[::2] == kinds[1::2]
    assert len({*kinds}) == 3


def test_plans_are_found_and_refused_by_name_where_they_would_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "plan.json"
    asked = "--gpus", "1x2:H100-SXM", "--batch", 4, "--seq", LENGTH, "--out", file
    advised = call(SEARCH, "advise", tmp_path / "config.json", *asked)
    assert advised.exit_code == 0, advised.stderr
    said = "768 x 768 pixels: 256 tokens of the text; 2 in each", "the tower of audio_config is left out"
    assert all(words in advised.stderr for words in said)
    plan = read_document(file, Plan)
    assert plan.model.layers[0] == "vision" and len(plan.layers) == 7
    words = f"models of the family {GEMMA3N} are planned, not trained: {re.escape(TRACED_TOWERS[GEMMA3N])}"
    for check in (lambda: check_supported(plan, file), lambda: family_of(plan.model, file)):
        with pytest.raises(BadInput, match=words):
            check()
    folders = "--checkpoints", tmp_path / "kept", "--out", tmp_path / "run"
    refused = call(TRAIN, "run", file, "--data", "random", "--steps", 1, *folders)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert re.search(words, refused.stderr)


def test_the_tower_can_be_frozen_by_name_and_low_rank_matrices_are_refused(tmp_path: Path) -> None:
    found = freeze(described(), [FrozenPart.parse("layers[0].model.vision_tower.*")])
    assert found.parameter_count - found.trained_count == 294_126_912
    assert found.type_of("layers[0]").trained_share < 0.01
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(BadInput, match="low-rank matrices are not supported for gemma3n, whose towers"):
        adapt(described(), *read_adapter(tmp_path))


def test_without_torch_the_planner_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asking.is_traced(CONFIG)
    monkeypatch.setattr(asking, "find_spec", lambda name: None)
    assert not asking.is_traced(CONFIG)
    with pytest.raises(BadInput, match=r"'gemma3n' is none of the families .* pip install '\.\[train\]' traces"):
        read_config(CONFIG, "config.json")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"text_config": None}, "text_config is missing"),
        ({"text_config": {"model_type": "llama"}}, "text_config: model_type 'llama' does not belong"),
        (
            {"vision_config": {"architecture": "resnet50"}},
            "architecture 'resnet50' is not supported, only",
        ),
        ({"vision_config": {"hidden_size": 1024}}, "vision_config: hidden_size 1024 is not supported, only 2048 is"),
        ({"vision_config": {"architectur": "x"}}, "did you mean 'architecture'"),
        ({"vision_soft_tokens_per_image": 64}, "vision_soft_tokens_per_image 64 is not 256, the number of tokens"),
        ({"images_per_sample": 0}, "images_per_sample 0 is not a number from 1"),
        ({"images_per_sample": 3}, "sequence length 542 is under 769: those of images, and of a text"),
        ({"image_per_sample": 2}, "did you mean 'images_per_sample'"),
        ({"audio_config": {"hidden_size": "x"}}, "transformers cannot build it"),
    ],
)
def test_wrong_parts_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        described(**changes)
