"""Masked language models: BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019) and ModernBERT (Warner et al. 2024).

Also GPT-2, which, like BERT, adds a learned vector for each position.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from shardwright.models.families.bert import FIRST
from shardwright.models.traits import BLOCK, FULL, SLIDING
from shardwright_train.data.objectives import Masked
from shardwright_train.data.share import POSITIONS, Batch
from shardwright_train.models.base import Family
from shardwright_train.models.stock import Pieces, States
from shardwright_train.parallel.sharding_rules import Parts, Rule
from shardwright_train.parallel.vocab import positions_of, token_embedding

_EMBEDDINGS = ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm", "dropout")


class Bert(Family):
    """The BERT family: q, k, v, intermediate column-parallel; outputs row-parallel; norms, head's dense replicated."""

    embedding = tuple(f"bert.embeddings.{name}" for name in _EMBEDDINGS)
    head: tuple[str, ...] = ("cls.predictions.transform", "cls.predictions.decoder")
    parts = {
        BLOCK: Parts(
            "bert.encoder.layer",
            attention=("attention",),
            mlp=("feed_forward_chunk",),
            products=("attention.self", "intermediate"),
        )
    }
    plan = {
        "word_embeddings": "embedding_rowwise",
        **dict.fromkeys(("query", "key", "value", "intermediate.dense"), "colwise"),
        "output.dense": "rowwise",
        "decoder": "colwise_gather_output",
    }
    objective = Masked

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """Return the normed sum of the embeddings of token, type (always 0) and position."""
        stock: Any = pieces.get_submodule(self.embedding[0].rpartition(".")[0])
        positions = self.numbers(pieces, batch)
        summed = token_embedding(stock.word_embeddings, batch["tokens"], pieces.tensor_parallel)
        # In the stock model's order, because the order changes the result in 16 bits.
        summed = summed + stock.token_type_embeddings(torch.zeros_like(positions))
        summed = summed + stock.position_embeddings(positions)
        return (stock.dropout(stock.LayerNorm(summed)),)

    def numbers(self, pieces: Pieces, batch: Batch) -> Tensor:
        """Return the rows of the position table for this rank's tokens."""
        return positions_of(batch["tokens"], pieces.tensor_parallel, batch.get(POSITIONS))


class Roberta(Bert):
    """BERT with position numbers that count only tokens other than padding, from pad_token_id + 1."""

    embedding = tuple(path.replace("bert.", "roberta.", 1) for path in Bert.embedding)
    head = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder")
    parts = {kind: parts._replace(path=f"roberta.{parts.path.partition('.')[2]}") for kind, parts in Bert.parts.items()}

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return the configuration; raise ValueError if there is no padding token, after whose row positions begin."""
        configured = super().configured(config)
        if configured.pad_token_id is None:
            raise ValueError("pad_token_id null cannot be trained: positions begin after it")
        return configured

    def numbers(self, pieces: Pieces, batch: Batch) -> Tensor:
        """Return the rows of the position table for this rank's tokens; they restart with each document of a sample."""
        padding, held = pieces.config.pad_token_id, pieces.tensor_parallel.positions(batch["tokens"].shape[1])
        real = (batch["tokens"] != padding).long()
        counted = real.cumsum(1)
        if POSITIONS in batch:
            begins = torch.arange(real.shape[1], device=real.device) - batch[POSITIONS]
            counted = counted - (counted - real).gather(1, begins)
        rows: Tensor = counted * real + padding
        return rows[:, held]

    def normed(self, pieces: Pieces, states: States) -> Tensor:
        """Return the last hidden states, transformed and normed."""
        dense, norm = (pieces.get_submodule(path) for path in self.head[:-1])
        normed: Tensor = norm(gelu(dense(states[-1])))
        return normed


class ModernBert(Family):
    """The ModernBERT family: fused column-parallel matrices for queries, keys and values, and for gate and input."""

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
        """Return the block of a type, wherever it is in a model; only the type FIRST does not norm its input."""
        block: Any = super().block(stock, kind, index)
        if kind == FIRST:
            block.attn_norm = nn.Identity()
        elif isinstance(block.attn_norm, nn.Identity):
            block.attn_norm = copy.deepcopy(block.mlp_norm)
        return block  # type: ignore[no-any-return]

    def angles(self, rotary: nn.Module, kind: str, example: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Return the rotary angles for a type of block; blocks with a window have another base."""
        angles: tuple[Tensor, ...] = rotary(example, positions, SLIDING if kind == SLIDING else FULL)
        return angles


# GPT-2 (Radford et al. 2019).


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
        """Return the configuration; the default feed-forward width is four times the width of the hidden states."""
        configured = super().configured(config)
        configured.n_inner = configured.n_inner or 4 * configured.n_embd
        return configured

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """Return the sum of the embedding of the token and a learned one of the position."""
        stock: Any = pieces.transformer
        tokens = token_embedding(stock.wte, batch["tokens"], pieces.tensor_parallel)
        positions = positions_of(batch["tokens"], pieces.tensor_parallel, batch.get(POSITIONS))
        return (stock.drop(tokens + stock.wpe(positions)),)
