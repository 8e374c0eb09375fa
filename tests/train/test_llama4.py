"""Llama 4: its router and experts are the stock ones, and what a part of a sequence cannot tell is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import SEQUENCE_LENGTH, tiny
from torch import nn

from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.models.families.llama4 import DENSE, ROTATED_DENSE, ROTATED_SPARSE, SPARSE
from shardwright.plan.axes import axes_of
from shardwright.types import Attention, Strategy
from shardwright_train.models.base import family_named
from shardwright_train.models.masks import Places
from shardwright_train.parallel.checkpointing import Recomputation

MODEL = tiny("llama4_text", num_experts_per_tok=3)
FAMILY: Any = family_named("llama4_text", "test")


def stock_and_run(dtype: torch.dtype) -> tuple[Any, Any]:
    """The stock part of a block with experts, and what runs make of it, with the same weights."""
    torch.manual_seed(0)
    stock: Any = FAMILY.stock(FAMILY.configuration(MODEL))
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.3)
    block = FAMILY.block(stock.to(dtype), SPARSE, 3)
    part = block.feed_forward
    recomputation = Recomputation(keeps_last=False)
    axes = axes_of(Strategy(tp_size=1, dp_size=1))
    part.tensor_parallel = SimpleNamespace(
        size=1, splits_everything=False, axes=axes, leave=lambda x: x, recomputation=recomputation
    )
    return stock.model.layers[3].feed_forward, part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_router_chooses_as_the_stock_one_to_the_bit(dtype: torch.dtype) -> None:
    stock, part = stock_and_run(dtype)
    x = torch.randn(64, 32).to(dtype)
    scores, logits = stock.router(x)
    choice = part.choose(x)
    assert torch.equal(choice.weights.to(dtype), scores.gather(1, choice.experts))
    assert torch.equal(choice.experts.sort(-1).values, scores.nonzero()[:, 1].view(64, 3))
    assert torch.equal(choice.probabilities, logits.float().softmax(-1))


def test_experts_compute_what_the_stock_part_does() -> None:
    stock, part = stock_and_run(torch.float32)
    x = torch.randn(2, SEQUENCE_LENGTH, 32)
    torch.testing.assert_close(part(x)[0], stock(x)[0].view_as(x), rtol=1e-5, atol=1e-5)


def test_lists_of_blocks_make_their_types() -> None:
    assert MODEL.layers == (ROTATED_DENSE, ROTATED_SPARSE, DENSE, SPARSE)
    assert Attention.FLASH_ATTENTION_2 not in FAMILY.facts.kernels


def test_scaled_queries_need_all_positions() -> None:
    scaled = tiny("llama4_text", floor_scale=SEQUENCE_LENGTH)
    part, whole, example = slice(0, SEQUENCE_LENGTH // 2), slice(0, SEQUENCE_LENGTH), torch.zeros(1)
    half = Places(SEQUENCE_LENGTH, part, part)
    for model, kind in ((MODEL, SPARSE), (scaled, ROTATED_SPARSE)):
        FAMILY.constants(model, kind, half, example, "sdpa")
    for places in (half, Places(SEQUENCE_LENGTH, whole, whole, torch.arange(SEQUENCE_LENGTH))):
        with pytest.raises(BadInput, match=r"1: not supported when queries scale .* \(no_rope_sparse layers\)"):
            FAMILY.constants(scaled, SPARSE, places, example, "sdpa")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention_chunk_size": 16}, "sequence length 32 is over the attention_chunk_size 16: attention is whole"),
        ({"no_rope_layers": [1]}, "no_rope_layers lists 1 of 4 layers"),
        ({"moe_layers": 2}, "moe_layers 2 is not a list of numbers"),
        ({"interleave_moe_layer_step": 0}, "interleave_moe_layer_step must be a whole number from 1"),
    ],
)
def test_what_has_no_shapes_is_refused_in_one_line(change: dict[str, object], said: str) -> None:
    config = {"model_type": "llama4_text", "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
    with pytest.raises(BadInput) as refused:
        model_of_config(config | change, "m", 32, "config.json")
    assert said in str(refused.value) and "\n" not in str(refused.value)
