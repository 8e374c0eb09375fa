"""A folder of Hugging Face goes into any plan's shards, through checkpoints of others, and out again to the bit."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from forked_ranks import run_worker
from random_plans import random_plan, uneven_plan
from rest_long import rest_long
from safetensors.torch import load_file
from shared_experts import with_shared_experts
from tiny_models import CONFIGS, batch_of, stock_logits, stock_model, tiny
from torch import Tensor, nn

from shardwright.io import write_document
from shardwright.types import Model, Plan, Plans
from shardwright_train.checkpoints.folders import complete_checkpoints
from shardwright_train.options import ConvertOptions
from shardwright_train.weights.export import export

TOLERANCE = 1e-10
MODELS = (*(tiny(family, **({"vocab_size": 66} if "vocab_size" in CONFIGS[family] else {})) for family in CONFIGS),)
TIED = tiny("qwen3", tie_word_embeddings=True)
ROTATED = tiny("baichuan", max_position_embeddings=64, z_loss_weight=None)
"""The form of 7B of the first generation, whose head is not normalised."""
FORMS = (
    *("llama", "baichuan", "phi3", "llama4_text", "gpt_oss", "deepseek_v3", "gpt2", "bert", "roberta", "modernbert"),
    *("t5", "whisper", "gemma3", "vit", "glm4", "mixtral"),
)
"""Families whose files are unlike: stacked, turned or joined matrices, buffers, names, models within models."""
ON_TWO = ("baichuan", "llama4_text", "gpt_oss", "deepseek_v3", "gpt2", "bert", "t5", "gemma3", "vit")
"""One or two of each form, for `make test`."""


def published(model: Model, folder: Path, **form: Any) -> nn.Module:
    """A stock model with random weights, in a folder as transformers writes it; norms and biases are no constants."""
    torch.manual_seed(len(model.layers))
    stock: Any = stock_model(model).float()
    for parameter in (*stock.parameters(), *(x for name, x in stock.named_buffers() if name.endswith("_bias"))):
        nn.init.normal_(parameter, std=0.1)
    stock.save_pretrained(folder, **form)
    return stock  # type: ignore[no-any-return]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: x for file in sorted(folder.glob("*.safetensors")) for key, x in load_file(file).items()}


def pairs(all_forms: bool, ranks: int) -> list[Plan]:
    """Two plans for each form of files, or for each other family.

    Ranks share experts out. On four ranks some of a second plan's stages are of unequal width.
    """
    found = []
    for number, model in enumerate((*MODELS, TIED, ROTATED)):
        forms = FORMS if ranks > 2 else ON_TWO
        if all_forms != (number >= len(MODELS) or model.family in forms):
            continue
        second = uneven_plan if number % 2 and ranks > 2 else random_plan
        name = f"{model.family} {number}"
        # Wide stages have more ways to share experts out.
        wide = {"stages": 1} if any(kind.experts is not msgspec.UNSET for kind in model.types.values()) else {}
        first = with_shared_experts(random_plan(model, 40 + number, ranks, "float32", **wide), number)
        plans = first, with_shared_experts((random_plan if wide else second)(model, 50 + number, ranks, **wide), number)
        found += [msgspec.structs.replace(plan, name=f"{name} {i}") for i, plan in enumerate(plans)]
    return found


@pytest.mark.parametrize(("all_forms", "ranks"), rest_long(1, [(True, 2), (True, 4), (False, 4)]))
def test_weights_come_out_as_they_went_in_and_train_as_transformers_does(
    tmp_path: Path, all_forms: bool, ranks: int
) -> None:
    """float32 in the folder, float32 under the first plan, float64 under the second."""
    plans = pairs(all_forms, ranks)
    for plan in plans[1::2]:
        published(plan.model, tmp_path / plan.name / "single")
        published(plan.model, tmp_path / plan.name / "sharded", max_shard_size="20KB")
        assert len(list((tmp_path / plan.name / "sharded").glob("*.safetensors"))) > 3
    write_document(tmp_path / "plans.json", Plans(plans=tuple(plans)))
    result = tmp_path / "errors.json"
    run_worker("weights_worker", [str(tmp_path / "plans.json"), str(tmp_path), str(result)], ranks)
    errors = json.loads(result.read_bytes())
    assert len(errors) == len(plans) // 2
    for name, error in errors.items():
        assert error["resumed"] == 0, (name, error)
        assert max(error.values()) < TOLERANCE, (name, error)
    for plan in plans[1::2]:
        _check_export(plan, tmp_path / plan.name)


def _check_export(plan: Plan, folder: Path) -> None:
    write_document(folder / "plan.json", plan)
    (checkpoint,) = complete_checkpoints(folder / "second")
    wanted = tensors_of(folder / "single")
    for name, gib in (("out", 1.0), ("out sharded", 2e-5)):
        asked = ConvertOptions(
            checkpoint=checkpoint, plan=folder / "plan.json", out=folder / name, dtype="float32", file_gib=gib
        )
        export(asked)
        found = tensors_of(folder / name)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], x) and found[key].dtype is x.dtype for key, x in wanted.items())
    assert len(list((folder / "out sharded").glob("*.safetensors"))) > 1
    if any(key.endswith("correction_bias") for key in wanted):
        narrow = ConvertOptions(
            checkpoint=checkpoint, plan=folder / "plan.json", out=folder / "narrow", dtype="bfloat16", file_gib=1.0
        )
        export(narrow)
        for key, x in tensors_of(folder / "narrow").items():
            assert x.dtype is (torch.float32 if key.endswith("correction_bias") else torch.bfloat16)
    stock_class: Any = type(stock_model(plan.model))
    batch = batch_of(plan.model, 2, 0)
    torch.set_default_dtype(torch.float32)
    logits = [stock_logits(stock_class.from_pretrained(folder / name).eval(), batch) for name in ("single", "out")]
    assert torch.equal(*logits)
