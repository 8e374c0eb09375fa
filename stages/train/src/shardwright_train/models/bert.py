"""BERT (Devlin et al. 2019), trained as a masked language model."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert import modeling_bert as bert

from shardwright_formats.types.model import EMBEDDING, HEAD, Model
from shardwright_train.models.base import BLOCK, Batch, Family, States
from shardwright_train.models.masked import Vocabulary, mask_of_kernel
from shardwright_train.parallel.sharding_rules import COLUMN, ROW, VOCABULARY, Parts
from shardwright_train.parallel.tensor import TensorParallel
from shardwright_train.parallel.vocab import loss_of_logits, token_embedding

__all__ = ["FAMILIES", "Bert"]


class _Embedding(nn.Module):
    """Tokens [b, s] to hidden states: vectors of token, position and type (always 0), summed and normed."""

    tensor_parallel: TensorParallel

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, batch: Batch) -> States:
        tokens = batch["tokens"]
        mine = self.tensor_parallel.positions(tokens.shape[1])
        positions = torch.arange(mine.start, mine.stop, device=tokens.device)
        summed = token_embedding(self.word_embeddings, tokens, self.tensor_parallel) + self.position_embeddings(
            positions
        )
        summed = summed + self.token_type_embeddings(torch.zeros_like(positions))
        return (self.dropout(self.LayerNorm(summed)),)


class _Head(nn.Module):
    """A dense layer, a norm and a vocabulary matrix: hidden states and labels [b, s] to the sum of cross entropy."""

    tensor_parallel: TensorParallel

    def __init__(self, config: Any) -> None:
        super().__init__()
        transform: type[nn.Module] = bert.BertPredictionHeadTransform
        self.transform = transform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.classes = config.vocab_size

    def forward(self, states: States, batch: Batch) -> Tensor:
        logits = self.decoder(self.tensor_parallel.enter(self.transform(states[0])))
        return loss_of_logits(logits, batch["labels"], self.classes, self.tensor_parallel)


class Bert(Family):
    """Column-parallel query, key, value and intermediate; row-parallel outputs; norms and the head's dense whole."""

    config_class = BertConfig
    pretrained_class = bert.BertPreTrainedModel
    block_class: type[nn.Module] = bert.BertLayer
    other_keys = ("mask_token_id",)
    rules = {
        **dict.fromkeys(("query", "key", "value", "intermediate.dense"), COLUMN),
        "output.dense": ROW,
        **dict.fromkeys(("word_embeddings", "decoder"), VOCABULARY),
    }
    parts = {
        BLOCK: Parts(enter=("attention.self", "intermediate"), attention=("attention",), mlp=("feed_forward_chunk",))
    }
    names = {
        EMBEDDING: {
            name: f"bert.embeddings.{name}"
            for name in ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm")
        },
        BLOCK: "bert.encoder.layer.{}.",
        HEAD: {
            "transform": "cls.predictions.transform",
            "decoder.weight": "cls.predictions.decoder.weight",
            "decoder.bias": "cls.predictions.bias",
        },
    }
    tied = (("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),)
    divided = ("num_attention_heads", "intermediate_size")

    def check(self, config: Any, sequence_length: int) -> None:
        """An encoder with tied embeddings, whose mask token is known."""
        super().check(config, sequence_length)
        for key in ("is_decoder", "add_cross_attention", "chunk_size_feed_forward"):
            if getattr(config, key):
                raise ValueError(f"{key} cannot be trained")
        if not config.tie_word_embeddings:
            raise ValueError("tie_word_embeddings false cannot be trained")
        Vocabulary.of(config)

    def make(self, kind: str, config: Any, index: int) -> nn.Module:
        """Stock blocks; embedding of tokens, positions and types; the masked language model's head."""
        if kind == EMBEDDING:
            return _Embedding(config)
        return _Head(config) if kind == HEAD else self.block_class(config, layer_idx=index)

    def constants(self, config: Any, kind: str, positions: slice, example: Tensor, kernel: str) -> dict[str, Any]:
        """Which kernel attention uses."""
        return {"kernel": kernel}

    def call(self, block: nn.Module, states: States, batch: Batch, constants: dict[str, Any]) -> States:
        """Attention to all positions but padding, and a feed-forward."""
        mask = mask_of_kernel(batch["attention_mask"], states[0].dtype, constants["kernel"])
        return (block(states[0], attention_mask=mask),)

    def replays_sum(self, config: Any) -> tuple[str, ...]:
        """Each part ends in a norm, which keeps its input."""
        return ("full", "attention", "mlp")

    def dropout(self, config: Any) -> float:
        """Of hidden states and of attention's weights."""
        rate: float = max(config.hidden_dropout_prob, config.attention_probs_dropout_prob)
        return rate

    def batch(self, model: Model, samples: Tensor, generator: torch.Generator) -> Batch:
        """Text with some positions hidden, which are the labels; `attention_mask` [b, s] is false on padding."""
        return Vocabulary.of(self.configuration(model)).masked_batch(samples[:, :-1], generator)

    def random_batch(self, model: Model, samples: int, generator: torch.Generator) -> Batch:
        """On random tokens, with up to a quarter of padding behind them."""
        vocabulary = Vocabulary.of(self.configuration(model))
        return vocabulary.masked_batch(vocabulary.padded_text(samples, model.sequence_length, generator), generator)


FAMILIES = {"bert": Bert()}
