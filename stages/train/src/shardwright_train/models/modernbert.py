"""ModernBERT (Warner et al. 2024), trained as a masked language model."""

import copy
from typing import Any

from torch import Tensor, nn

from shardwright_models.facts import FULL, SLIDING
from shardwright_models.families.modernbert import FIRST
from shardwright_train.data.objectives import Masked
from shardwright_train.data.share import Batch
from shardwright_train.models.auxiliary_loss import States
from shardwright_train.models.base import Family
from shardwright_train.models.stock import Pieces
from shardwright_train.parallel.sharding_rules import Parts, Rule
from shardwright_train.parallel.vocab import token_embedding


class ModernBert(Family):
    """The ModernBERT family: queries, keys and values in one column-parallel matrix, gate and input in another."""

    embedding = ("model.embeddings",)
    head = ("model.final_norm", "head", "decoder")
    parts = dict.fromkeys((FULL, SLIDING, FIRST), Parts("model.layers", attention=("attn",), mlp=("mlp",)))
    plan = {
        "tok_embeddings": "embedding_rowwise",
        "attn.Wqkv": Rule("column", fused=3),
        "mlp.Wi": Rule("column", fused=2),
        **dict.fromkeys(("attn.Wo", "mlp.Wo"), "rowwise"),
        "decoder": "colwise_gather_output",
    }
    rotary = "model.rotary_emb"
    objective = Masked

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """Return the tokens' rows, normed."""
        stock: Any = pieces.get_submodule("model.embeddings")
        return (stock(inputs_embeds=token_embedding(stock.tok_embeddings, batch["tokens"], pieces.tensor_parallel)),)

    def block(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return the block of a type, wherever in a model it stands: the first type alone norms no input."""
        block: Any = super().block(stock, kind, index)
        if kind == FIRST:
            block.attn_norm = nn.Identity()
        elif isinstance(block.attn_norm, nn.Identity):
            block.attn_norm = copy.deepcopy(block.mlp_norm)
        return block  # type: ignore[no-any-return]

    def angles(self, rotary: nn.Module, kind: str, example: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Return the angles of a type of block: those with a window have a base of their own."""
        angles: tuple[Tensor, ...] = rotary(example, positions, SLIDING if kind == SLIDING else FULL)
        return angles
