"""The kernels that run without a GPU give the same, and look ahead only where a model does."""

from typing import Any

import pytest
import torch
from compared_families import FAMILIES
from random_plans import random_plan
from rest_long import rest_long
from tiny_models import CONFIGS, SEQUENCE_LENGTH, batch_of, engine_of, tiny
from torch import Tensor
from torch.nn import functional

from shardwright_train.models import attention_kernels as kernels
from shardwright_train.models.base import describe, family_named
from shardwright_train.models.masks import Places
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.runner import Step


@pytest.mark.parametrize(
    ("name", "causal"),
    [("bert", False), ("gpt2", True), ("llama", True), ("mistral", True), ("baichuan", True), ("modernbert", False)],
)
def test_every_attention_kernel_attends_to_the_same_positions(name: str, causal: bool) -> None:
    model, family = tiny(name), family_named(name, "test")
    batch = batch_of(model, 4, 0)
    states = torch.randn(4, SEQUENCE_LENGTH, 32, generator=torch.Generator().manual_seed(0))
    # ModernBERT's first block has no window.
    number, outputs = int(name == "modernbert"), []
    for kernel in ("sdpa", "sdpa_math", "eager"):
        torch.manual_seed(0)
        block = family.build(model, f"layers[{number}]", kernel)
        family.initialize(model, block)
        constants = family.constants(model, model.layers[number], Places.whole(SEQUENCE_LENGTH), states, kernel)
        (output,) = family.call(block, (states,), batch, constants)
        outputs.append(output)
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0])
    # What comes last changes nothing before it where attention is causal, and something where it is not.
    changed = states.clone()
    changed[:, SEQUENCE_LENGTH // 2 :] *= -1
    (output,) = family.call(block, (changed,), batch, constants)
    before = slice(0, SEQUENCE_LENGTH // 2)
    assert torch.equal(output[:, before], outputs[2][:, before]) == causal
    # What comes first changes as many positions as a window has, itself among them.
    changed = states.clone()
    changed[:, 0] *= -1
    (output,) = family.call(block, (changed,), batch, constants)
    last = model.types[model.layers[number]].window or SEQUENCE_LENGTH
    differs = (output != outputs[2]).any(-1).all(0).tolist()
    assert differs == [position < last for position in range(SEQUENCE_LENGTH)]


@pytest.mark.parametrize(("length", "tried"), [(16, 16), (4096, 1024), (4099, 1027)])
def test_masks_of_long_samples_are_tried_as_those_of_short_ones(
    length: int, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask of all pairs of 131,072 positions takes 32 GiB; sdpa was then said to have no kernel."""
    masks = list[torch.Size]()
    monkeypatch.setattr(
        kernels, "scaled_dot_product_attention", lambda *_, attn_mask, **__: masks.append(attn_mask.shape)
    )
    family = family_named("llama", "test")
    plan = random_plan(describe(family, CONFIGS["llama"] | {"max_position_embeddings": 8192}, "long", length), 0, 1)
    assert kernels._refusal(plan, family, torch.device("cpu"), by_document=True) is None
    assert masks == [(tried, tried)]


@pytest.mark.parametrize("name", rest_long(1, dict.fromkeys(("t5", *FAMILIES))))
def test_masks_have_a_column_for_each_key(name: str, one_rank: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's memory-efficient kernel refuses a column that stands for all, which the processor takes."""
    stock, masks = functional.scaled_dot_product_attention, list[tuple[int, int, int]]()

    def noted(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **more: Any) -> Tensor:
        if attn_mask is not None:
            masks.append((attn_mask.shape[-1], key.shape[-2], attn_mask.stride(-1)))
        return stock(query, key, value, attn_mask=attn_mask, **more)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    plan = random_plan(tiny(name), 0, 1)
    engine = engine_of(plan, one_rank, Groups("cpu"))
    batch = batch_of(plan.model, plan.global_batch_size, 0)
    engine.forward_backward(Step.of_batch(batch, engine.stage.context.share))
    assert all(columns == keys and stride == 1 for columns, keys, stride in masks), masks
    assert masks or name != "t5"
