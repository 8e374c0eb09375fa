"""Swin (Liu et al. 2021): stages of blocks that attend in windows of an image; between them, patches are merged."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwright_models.families.swin import MERGES, STAGES
from shardwright_train.data.objectives import ClassificationOfAll
from shardwright_train.data.share import Batch
from shardwright_train.models.base import Family, States
from shardwright_train.models.stock import Pieces
from shardwright_train.parallel.sharding_rules import Parts, Rule

_BIAS = "attention.relative_position_bias"


class Swin(Family):
    """The Swin family: as ViT's, column-parallel position bias; what merges patches is replicated."""

    embedding = ("swin.embeddings",)
    head = ("swin.layernorm", "swin.pooler", "classifier")
    parts = {
        **{stage: Parts(f"swin.encoder.layers.{i}.blocks", ("attention",), ("mlp",)) for i, stage in enumerate(STAGES)},
        **{merge: Parts(f"swin.encoder.layers.{i}.downsample", (), (), alone=True) for i, merge in enumerate(MERGES)},
    }
    plan = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "fc1"), "colwise"),
        **dict.fromkeys(("o_proj", "fc2"), "rowwise"),
        "relative_position_bias_table": Rule("cut", dim=1),
        "classifier": "colwise_gather_output",
    }
    objective = ClassificationOfAll
    counted_per_rank = ("num_attention_heads",)

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """Return the embedding of patches: every rank computes all positions and keeps its own."""
        stock: Any = pieces.get_submodule("swin.embeddings")
        states, _ = stock(batch["pixel_values"].to(stock.norm.weight.dtype))
        return (states[:, pieces.tensor_parallel.positions(states.shape[1])].clone(),)

    def normed(self, pieces: Pieces, states: States) -> Tensor:
        """Return the mean of the normed positions, as the only one."""
        normed = pieces.through(self.head[:1], states[-1])
        return pieces.through(self.head[1:2], normed.transpose(1, 2)).transpose(1, 2)

    def block(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return a block, or what merges patches, which knows how high and wide the image is that it gets."""
        block = super().block(stock, kind, index)
        if kind in MERGES:
            height, width = stock.swin.embeddings.patch_grid
            number = MERGES.index(kind)
            block.input_resolution = height >> number, width >> number  # type: ignore[assignment]
            return block
        _keep_index(block.get_submodule(_BIAS))
        # The states alone: FSDP2 would watch over the eager kernel's scores, too.
        block.register_forward_hook(lambda _block, _args, out: out[0])
        return block

    def call(self, block: Any, states: States, batch: Batch, constants: dict[str, Any]) -> States:
        """Run a block, or merge patches; the mask of shifted windows is the block's to make."""
        return (block(states[0], block.input_resolution),)


def _keep_index(bias: Any) -> None:
    """Keep the rows of the table that pairs of positions have as an attribute: a buffer would lose its values."""
    with torch.device("cpu"):
        index = bias._create_relative_position_index().view(-1)
    del bias.relative_position_index
    # transformers gives no value to what is marked so.
    index._is_hf_initialized = True
    bias.relative_position_index, bias._create_relative_position_index = index, lambda: index

    def moved(module: Any, _args: Any) -> None:
        module.relative_position_index = module.relative_position_index.to(module.relative_position_bias_table.device)

    bias.register_forward_pre_hook(moved)
