"""Swin (Liu et al. 2021): stages of blocks that attend in windows of an image; between them, patches are merged."""

from typing import Any

import torch
from torch import Tensor

from shardwright_models.families.swin import MERGES, STAGES
from shardwright_train.data.objectives import ClassificationOfAll
from shardwright_train.data.share import Batch
from shardwright_train.models.auxiliary_loss import States
from shardwright_train.models.base import Family
from shardwright_train.models.stock import Pieces
from shardwright_train.parallel.sharding_rules import Parts, Rule


class Swin(Family):
    """The Swin family: as ViT's, column-parallel position bias; what merges patches is replicated."""

    embedding = ("swin.embeddings",)
    head = ("swin.layernorm", "classifier")
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
        return pieces.through(self.head[:1], states[-1]).mean(1, keepdim=True)

    def block(self, stock: Any, kind: str, index: int) -> Any:
        """Return a block, or what merges patches, which knows how high and wide the image is that it receives."""
        block: Any = super().block(stock, kind, index)
        if kind in MERGES:
            block.input_resolution = [side >> MERGES.index(kind) for side in stock.swin.embeddings.patch_grid]
            return block
        # A buffer would lose its values, as parameters do.
        bias = block.attention.relative_position_bias
        with torch.device("cpu"):
            rows = type(bias)(1, bias.window_size).relative_position_index.detach().clone()
        del bias.relative_position_index
        bias.relative_position_index = rows
        bias.register_forward_pre_hook(_move_rows)
        # The states alone: FSDP2 would watch over the eager kernel's scores, too.
        block.register_forward_hook(lambda _block, _args, out: out[0])
        return block

    def call(self, block: Any, states: States, batch: Batch, constants: dict[str, Any]) -> States:
        """Run a block, which makes the mask of shifted windows, or merge patches."""
        return (block(states[0], block.input_resolution),)


def _move_rows(bias: Any, _args: Any) -> None:
    bias.relative_position_index = bias.relative_position_index.to(bias.relative_position_bias_table.device)
