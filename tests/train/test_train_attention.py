"""The kernels that run without a GPU give the same, and look ahead only where a model does."""

import pytest
import torch
from tiny_models import SEQUENCE_LENGTH, batch_of, tiny

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
