"""Sinks by kernels that know none are those of the stock eager kernel: outputs and gradients, of each type of block."""

from typing import Any

import pytest
import torch
from tiny_models import SEQUENCE_LENGTH, batch_of, tiny
from torch import Tensor

from shardwright.models.traits import FULL, SLIDING, Mask
from shardwright.types import Attention
from shardwright_train.models.base import family_named
from shardwright_train.models.masks import Places, mask_for

MODEL = tiny("gpt_oss", num_hidden_layers=2)
FAMILY = family_named("gpt_oss", "test")


def attended(layer: int, kernel: str) -> list[Tensor]:
    """Output of a block's attention, and gradients of its input and parameters, in float64."""
    torch.manual_seed(0)
    block: Any = FAMILY.build(MODEL, f"layers[{layer}]", kernel)
    FAMILY.initialize(MODEL, block)
    part = block.double().self_attn
    states = torch.randn(3, SEQUENCE_LENGTH, 32, dtype=torch.float64, requires_grad=True)
    constants = FAMILY.constants(MODEL, MODEL.layers[layer], Places.whole(SEQUENCE_LENGTH), states.detach(), kernel)
    mask = mask_for(Mask.CAUSAL, states, batch_of(MODEL, 3, 0), constants)
    output, _ = part(states, attention_mask=mask, **constants["arguments"])
    output.square().sum().backward()
    gradients = [parameter.grad for parameter in part.parameters()]
    assert part.sinks.grad.abs().min() > 1e-3
    return [output, states.grad, *gradients]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kernel", ["sdpa", "sdpa_math"])
def test_every_kernel_has_the_sinks_of_the_stock_one(layer: int, kernel: str) -> None:
    assert MODEL.layers == (SLIDING, FULL)
    for mine, stock in zip(attended(layer, kernel), attended(layer, "eager"), strict=True):
        torch.testing.assert_close(mine, stock, rtol=1e-12, atol=1e-12)


def test_sinks_leave_out_the_kernel_that_has_none() -> None:
    assert Attention.FLASH_ATTENTION_2 not in FAMILY.facts.kernels
    assert {Attention.SDPA, Attention.SDPA_MATH, Attention.EAGER} <= set(FAMILY.facts.kernels)
