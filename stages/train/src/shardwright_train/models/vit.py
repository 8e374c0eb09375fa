"""ViT (Dosovitskiy et al. 2021): patches of an image instead of tokens, and a class instead of the next token."""

from typing import Any

from shardwright_models.facts import BLOCK
from shardwright_train.data.objectives import Classification
from shardwright_train.data.share import Batch
from shardwright_train.models.auxiliary_loss import States
from shardwright_train.models.base import Family
from shardwright_train.models.stock import Pieces
from shardwright_train.parallel.sharding_rules import Parts


class ViT(Family):
    """The ViT family: column-parallel q, k, v and fc1, row-parallel o and fc2; patches, positions, norms replicated."""

    embedding: tuple[str, ...] = ("vit.embeddings",)
    head = ("vit.layernorm", "classifier")
    parts = {BLOCK: Parts("vit.layers", attention=("attention",), mlp=("mlp",))}
    plan = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "fc1"), "colwise"),
        **dict.fromkeys(("o_proj", "fc2"), "rowwise"),
        "classifier": "colwise_gather_output",
    }
    objective = Classification
    counted_per_rank = ("num_attention_heads",)

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """Return the embedding of class and patches: every rank computes all positions and keeps its own."""
        stock: Any = pieces.get_submodule("vit.embeddings")
        # Images are read in float32.
        states = stock(batch["pixel_values"].to(stock.cls_token.dtype))
        # A view would hold the others' positions, too.
        return (states[:, pieces.tensor_parallel.positions(states.shape[1])].clone(),)
