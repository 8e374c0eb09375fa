"""GPT-2 (Radford et al. 2019)."""

from collections.abc import Mapping
from typing import Any

from shardwright.models.traits import BLOCK
from shardwright_train.data.share import POSITIONS, Batch
from shardwright_train.models.base import Family
from shardwright_train.models.stock import Pieces, States
from shardwright_train.parallel.sharding_rules import Parts, Rule
from shardwright_train.parallel.vocab import positions_of, token_embedding


class GPT2(Family):
    """The GPT-2 family: column-parallel q, k, v (side by side in one matrix) and c_fc; row-parallel c_proj."""

    embedding = ("transformer.wte", "transformer.wpe", "transformer.drop")
    head = ("transformer.ln_f", "lm_head")
    parts = {BLOCK: Parts("transformer.h", attention=("attn",), mlp=("mlp",))}
    plan = {
        "wte": "embedding_rowwise",
        "c_attn": Rule("column", fused=3),
        "c_fc": "colwise",
        "c_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }
    counted_per_rank = ("split_size",)

    def configured(self, config: Mapping[str, Any]) -> Any:
        """The configuration; the default feed-forward width is four times the hidden states'."""
        configured = super().configured(config)
        configured.n_inner = configured.n_inner or 4 * configured.n_embd
        return configured

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """The sum of a vector of the token and a learned one of the position."""
        stock: Any = pieces.transformer
        tokens = token_embedding(stock.wte, batch["tokens"], pieces.tensor_parallel)
        positions = positions_of(batch["tokens"], pieces.tensor_parallel, batch.get(POSITIONS))
        return (stock.drop(tokens + stock.wpe(positions)),)
