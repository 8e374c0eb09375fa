"""Gemma 3 with images (Gemma team 2025)."""

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig

from shardwright_formats.types import EMBEDDING, base_type
from shardwright_models.facts import FULL, SLIDING
from shardwright_models.families.gemma3 import GEMMA3
from shardwright_models.families.llava import LANGUAGE, PROJECTOR, TOWER
from shardwright_train.data.share import Batch
from shardwright_train.models.auxiliary_loss import States
from shardwright_train.models.llava import Llava
from shardwright_train.models.stock import Pieces
from shardwright_train.parallel.sharding_rules import Parts


class Gemma3Images(Llava):
    """Llava with Gemma's blocks, scaled embeddings of tokens, and a projector that norms and pools."""

    parts = {
        **dict.fromkeys((SLIDING, FULL), Parts(f"{LANGUAGE}.layers", ("self_attn",), ("mlp",))),
        **{kind: Llava.parts[kind] for kind in (TOWER, PROJECTOR)},
    }
    plan = {**Llava.plan, **dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce")}
    text = Gemma3TextConfig, GEMMA3

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return the configuration, which says how many positions an image takes as Llava's does."""
        configured = super().configured({key: x for key, x in config.items() if key != "image_seq_length"})
        configured.image_seq_length = configured.mm_tokens_per_image
        return configured

    def normalized(self, read: Mapping[str, Any]) -> dict[str, Any]:
        """Return nothing: all blocks of the tower compute something."""
        return {}

    def module(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return the modules of a layer, of which the table is a plain one: `embed` scales its rows."""
        module = super().module(stock, kind, index)
        if kind == EMBEDDING:
            scaled = stock.model.language_model.embed_tokens
            (rows, features), weight = scaled.weight.shape, scaled.weight
            table = nn.Embedding(rows, features, scaled.padding_idx, device=weight.device, dtype=weight.dtype)
            module.set_submodule(self.embedding[0], table)
        return module

    def block(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return a stock block, or the projector, which norms what the tower's last block gives."""
        block = super().block(stock, kind, index)
        if kind == PROJECTOR:
            block.post_layernorm.requires_grad_(True)
            block.forward = MethodType(_projected, block)
        return block

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """Return the states of patches and of tokens, these scaled by the root of the number of features."""
        image, text = super().embed(pieces, batch)
        return image, text * torch.tensor(pieces.config.text_config.hidden_size**0.5).to(text.dtype)

    def angles(self, rotary: nn.Module, kind: str, example: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Return the cosines and sines of a type of block."""
        angles: tuple[Tensor, ...] = rotary(example, positions, base_type(kind))
        return angles


def _projected(projector: Any, image: Tensor) -> Tensor:
    """Return an image's features, of the normed states."""
    features: Tensor = type(projector).forward(projector, projector.post_layernorm(image))
    return features
