"""Swin: windows of an image, and what merges its patches; whole plans of it are compared in test_train_parity."""

import pytest
import torch
from random_plans import random_plan
from tiny_models import stock_model, tiny
from torch import Tensor

from shardwright.types import EMBEDDING, HEAD, SequenceParallel, Strategy
from shardwright.types.plan import misfit
from shardwright_train.models import attention_kernels as kernels
from shardwright_train.models.base import family_named


@pytest.mark.parametrize("split", [SequenceParallel.MEGATRON, SequenceParallel.ULYSSES])
def test_no_ranks_share_out_the_positions_of_an_image(split: SequenceParallel) -> None:
    model = tiny("swin")
    shared, whole = Strategy(tp_size=2, dp_size=1, sequence_parallel=split), Strategy(tp_size=2, dp_size=1)
    named = {"stage1": "windows_across_positions", "merge1": "merged_positions", HEAD: "pooled_positions"}
    for layer, name in named.items():
        assert misfit(model, layer, shared) == f"tp_size 2 does not divide {name} 1"
        assert misfit(model, layer, whole) is None
    # Of the patches that are embedded, each rank keeps its own.
    assert misfit(model, EMBEDDING, shared) is None


def test_heads_of_each_stage_bound_the_degree() -> None:
    model = tiny("swin")
    eight = Strategy(tp_size=8, dp_size=1)
    assert misfit(model, "stage1", eight) == "tp_size 8 does not divide num_attention_heads 4"
    assert misfit(model, "stage2", eight) is None and misfit(model, "merge1", eight) is None


def test_layers_have_the_names_of_the_stock_model_wherever_they_stand() -> None:
    model, family = tiny("swin", depths=[1, 2]), family_named("swin", "test")
    assert model.layers == ("stage1", "merge1", "stage2", "stage2")
    assert set(family.stock_names(model)) == set(dict(stock_model(model).named_parameters()))
    named = {f"layers[{i}]": family.full_name(model, f"layers[{i}]", "x") for i in (0, 1, 3)}
    assert named == {
        "layers[0]": "swin.encoder.layers.0.blocks.0.x",
        "layers[1]": "swin.encoder.layers.0.downsample.x",
        "layers[3]": "swin.encoder.layers.1.blocks.1.x",
    }


def test_a_block_that_is_built_without_values_knows_its_windows() -> None:
    """The rows of the table of biases are those of the stock block, in which they are no parameter."""
    model, family = tiny("swin"), family_named("swin", "test")
    with torch.device("meta"):
        block = family.build(model, "layers[0]")
    block.to_empty(device="cpu")
    stock = stock_model(model).get_submodule("swin.encoder.layers.0.blocks.0.attention.relative_position_bias")
    built = block.get_submodule("attention.relative_position_bias")
    assert torch.equal(built.relative_position_index, stock.relative_position_index)  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "positions"), [("swin", 4), ("t5", 16)])
def test_a_kernel_is_tried_on_the_positions_that_it_is_given(
    family: str, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a window of an image, or of a sample, with a mask that is learned."""
    tried = []

    def attend(query: Tensor, _key: Tensor, _value: Tensor, *, attn_mask: Tensor, **_more: object) -> Tensor:
        tried.append((query.shape[2], tuple(attn_mask.shape), attn_mask.requires_grad))
        return query

    monkeypatch.setattr(kernels, "scaled_dot_product_attention", attend)
    plan = random_plan(tiny(family), 0, 1, "float32", stages=1)
    assert kernels._refusal(plan, family_named(family, "test"), torch.device("cpu")) is None
    assert set(tried) == {(positions, (positions, positions), True)}
