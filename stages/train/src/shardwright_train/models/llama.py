"""Llama (Touvron et al. 2023), and the families whose blocks are called like Llama's blocks.

Mistral, Qwen2 and Qwen3 differ only by their stock classes.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.models.families.llama import ROTATED, UNROTATED
from shardwright.models.families.stacked import PHI3
from shardwright.models.traits import BLOCK, FULL, SLIDING
from shardwright.types import EMBEDDING, Model
from shardwright.types.model import base_type
from shardwright_train.data.share import POSITIONS, Batch
from shardwright_train.models.base import Family
from shardwright_train.models.masks import Places
from shardwright_train.models.mtp import plain_table
from shardwright_train.models.stock import Pieces, States
from shardwright_train.parallel.sharding_rules import Parts, Rule
from shardwright_train.parallel.tensor import TensorParallel


class Llama(Family):
    """The Llama family, sharded by transformers' own tensor-parallel plan; the embedding is sharded by vocabulary."""

    embedding = ("model.embed_tokens",)
    head = ("model.norm", "lm_head")
    parts = dict.fromkeys((BLOCK, SLIDING, FULL), Parts("model.layers", attention=("self_attn",), mlp=("mlp",)))
    plan = {"embed_tokens": "embedding_rowwise"}
    rotary = "model.rotary_emb"


class Cohere(Llama):
    """Llama with scaled logits, and norms with separate weights for each head."""

    plan = Llama.plan | dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), Rule("cut", dim=0))

    def logits(self, pieces: Pieces, inputs: Tensor) -> Tensor:
        """Return the logits, scaled as configured."""
        scale: float = pieces.config.logit_scale
        return super().logits(pieces, inputs) * scale


class Granite(Llama):
    """Llama with scaled embeddings and logits; the stock blocks scale scores and sums."""

    def scaled(self, config: Any, rows: Tensor) -> Tensor:
        """Return the rows, multiplied as configured."""
        multiplier: float = config.embedding_multiplier
        return rows * multiplier

    def logits(self, pieces: Pieces, inputs: Tensor) -> Tensor:
        """Return the logits, divided as configured."""
        scaling: float = pieces.config.logits_scaling
        return super().logits(pieces, inputs) / scaling


class Ministral(Llama):
    """Llama with a stock class that needs an explicit head dimension."""

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return the configuration; by default the hidden states' features are divided evenly among heads."""
        configured = super().configured(config)
        configured.head_dim = configured.head_dim or configured.hidden_size // configured.num_attention_heads
        return configured


class Ministral3(Llama):
    """Llama whose stock blocks scale queries by their positions in a sample."""

    def constants(self, model: Model, kind: str, places: Places, example: Tensor, *others: Any) -> dict[str, Any]:
        """Return the constants of all families, and the positions [1, s] that this rank computes."""
        constants = super().constants(model, kind, places, example, *others)
        constants["arguments"]["position_ids"] = places.positions(example.device)[places.computed][None]
        return constants

    def call(self, block: Any, states: States, batch: Batch, constants: dict[str, Any]) -> Any:
        """Run a block with the positions in their documents, if a batch has them."""
        if POSITIONS in batch:
            positions = {"position_ids": batch[POSITIONS][:, constants["places"].computed]}
            constants = {**constants, "arguments": {**constants["arguments"], **positions}}
        return super().call(block, states, batch, constants)


class SmolLM3(Llama):
    """Llama with two types of block; the stock blocks decide whether they rotate."""

    parts = dict.fromkeys((ROTATED, UNROTATED), Llama.parts[BLOCK])

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return the configuration; raise ValueError if layer_types lists a layer with a window."""
        if "sliding_attention" in (config.get("layer_types") or ()):
            raise ValueError("layer_types 'sliding_attention' cannot be trained: attention is whole")
        return super().configured(config)


# The language models of Gemma 2 and 3 (Gemma team 2024, 2025).


class Gemma2(Llama):
    """Llama with scaled embeddings and soft-capped logits; the stock blocks contain the other differences."""

    def module(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return the modules of a layer, with a plain embedding table: `embed` scales its rows."""
        module = super().module(stock, kind, index)
        if kind == EMBEDDING:
            module.set_submodule(self.embedding[0], plain_table(stock.model.embed_tokens))
        return module

    def scaled(self, config: Any, rows: Tensor) -> Tensor:
        """Return the rows, scaled in their format by the square root of the number of features."""
        return rows * torch.tensor(config.hidden_size**0.5).to(rows.dtype)

    def logits(self, pieces: Pieces, inputs: Tensor) -> Tensor:
        """Return the logits, bounded by a hyperbolic tangent if so configured."""
        logits, bound = super().logits(pieces, inputs), pieces.config.final_logit_softcapping
        return logits if bound is None else torch.tanh(logits / bound) * bound


class Gemma3(Gemma2):
    """Gemma 2 with rotation angles that differ by type of block."""

    def angles(self, rotary: nn.Module, kind: str, example: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Return the cosines and sines of a type of block."""
        angles: tuple[Tensor, ...] = rotary(example, positions, base_type(kind))
        return angles


# Families whose files hold several matrices as one: Baichuan, GLM 4, Phi 3.
# Baichuan (Yang et al. 2023) is trained on the modules of Llama; none of the code published with it runs.


class NormedHead(nn.Linear):
    """A linear layer whose matrix's rows are normalized to unit length before the matrix product."""

    def forward(self, states: Tensor) -> Tensor:
        """Return the matrix product of the states and the normalized rows."""
        return nn.functional.linear(states, nn.functional.normalize(self.weight))


class Baichuan(Llama):
    """Llama whose files hold queries, keys and values as one matrix; ALiBi instead of rotations in 13B."""

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return Llama's configuration, with the number of positions of 13B under the usual name."""
        parsed, read = super().configured(config), self.facts.keys.implied(config)
        parsed.alibi, parsed.max_position_embeddings = read["alibi"], read["max_position_embeddings"]
        return parsed

    def skeleton(self, config: Any) -> Any:
        """Return Llama's stock model, with Baichuan 2's head if the configuration has it."""
        stock = super().skeleton(config)
        if self.facts.norm.of_head(vars(config)):
            rows, features = stock.lm_head.weight.shape
            stock.lm_head = NormedHead(features, rows, bias=False, device="meta", dtype=stock.lm_head.weight.dtype)
        return stock

    def constants(self, model: Model, kind: str, places: Places, *others: Any) -> dict[str, Any]:
        """Return the constants of Llama; with ALiBi the angles are 0, because positions are in the mask."""
        constants = super().constants(model, kind, places, *others)
        if model.types[kind].alibi_heads:
            cos, sin = constants["arguments"]["position_embeddings"]
            constants["arguments"] = {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
            del constants["every_angle"]
        return constants


class Glm4(Llama):
    """Llama whose files hold the feed-forward's gate and first matrix as one; each is sharded separately."""

    plan = {
        **Llama.plan,
        **dict.fromkeys(("mlp.gate_up_proj", "gate_proj", "up_proj"), "colwise"),
        "mlp.down_proj": "rowwise",
    }


class Phi3(Llama):
    """Llama whose files hold queries, keys and values as one matrix; the feed-forward's gate and first matrix, too."""

    plan = {
        **Llama.plan,
        **dict.fromkeys(chain(*PHI3.stock.stacked.values()), "colwise"),
        **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "rowwise"),
    }
    counted_per_rank = ("num_key_value_heads",)

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:
        """Correct the number of heads, which the stock block reads from its copy of the configuration."""
        super().after_split(block, config, tensor_parallel)
        attention: Any = block.get_submodule("self_attn")
        attention.config.num_attention_heads //= tensor_parallel.size
