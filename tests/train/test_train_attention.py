"""The kernels that run without a GPU give the same, and look ahead only where a model does."""

import pytest
import torch
from random_plans import random_plan
from tiny_models import CONFIGS, SEQUENCE_LENGTH, batch_of, tiny

from shardwright_train.models import attention_kernels as kernels
from shardwright_train.models.description import describe
from shardwright_train.models.masks import Places
from shardwright_train.models.registry import family_named


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
        kernels, "scaled_dot_product_attention", lambda q, k, v, mask, *_, **__: masks.append(mask.shape)
    )
    family = family_named("llama", "test")
    plan = random_plan(describe(family, CONFIGS["llama"] | {"max_position_embeddings": 8192}, "long", length), 0, 1)
    assert kernels._refusal(plan, family, torch.device("cpu"), by_document=True) is None
    assert masks == [(tried, tried)]
