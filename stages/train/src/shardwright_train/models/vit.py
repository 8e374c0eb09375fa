"""ViT (Dosovitskiy et al. 2021): patches of an image instead of tokens, and a class instead of the next token."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ViTConfig
from transformers.models.vit import modeling_vit as vit

from shardwright_formats.types.model import EMBEDDING, HEAD, Model, Region
from shardwright_train.models.base import BLOCK, Batch, Family, ImageForm, States
from shardwright_train.parallel.sharding_rules import COLUMN, ROW, VOCABULARY, Parts
from shardwright_train.parallel.tensor import TensorParallel
from shardwright_train.parallel.vocab import loss_of_logits

__all__ = ["FAMILIES", "ViT"]


class _Embedding(nn.Module):
    """Images [b, channels, height, width] to hidden states of the class and the patches."""

    tensor_parallel: TensorParallel

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embeddings = vit.ViTEmbeddings(config)

    def forward(self, batch: Batch) -> States:
        # Every rank computes all positions and keeps its own.
        # Images are read in float32.
        states = self.embeddings(batch["pixel_values"].to(self.embeddings.cls_token.dtype))
        # A view would hold the others' positions, too.
        return (states[:, self.tensor_parallel.positions(states.shape[1])].clone(),)


class _Head(nn.Module):
    """Hidden states and labels [b, 1] to the sum of cross entropy over the group's samples."""

    tensor_parallel: TensorParallel

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.classes = config.num_labels

    def forward(self, states: States, batch: Batch) -> Tensor:
        first = self.tensor_parallel.enter(self.layernorm(states[0]))[:, :1]
        return loss_of_logits(self.classifier(first), batch["labels"], self.classes, self.tensor_parallel)


class ViT(Family):
    """Column-parallel q, k, v and fc1, row-parallel o and fc2; patch matrix, positions and norms whole."""

    config_class = ViTConfig
    pretrained_class = vit.ViTPreTrainedModel
    rules = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "fc1"), COLUMN),
        **dict.fromkeys(("o_proj", "fc2"), ROW),
        "classifier": VOCABULARY,
    }
    parts = {BLOCK: Parts(enter=("attention", "mlp"), attention=("attention",), mlp=("mlp",))}
    names = {
        EMBEDDING: {"embeddings": "vit.embeddings"},
        BLOCK: "vit.layers.{}.",
        HEAD: {"layernorm": "vit.layernorm", "classifier": "classifier"},
    }
    divided = ("num_attention_heads", "intermediate_size")
    # The head uses position 0, which under Ulysses only one rank has.
    divided_by_ulysses = {BLOCK: ("num_attention_heads",), HEAD: {"pooled_positions": 1}}
    other_keys = ("num_labels",)

    def check(self, config: Any, sequence_length: int) -> None:
        """The image settles the sequence length."""
        if config.num_labels < 1:
            raise ValueError("there are no classes: give num_labels or id2label")
        wanted = _patches(config) + 1
        if sequence_length != wanted:
            raise ValueError(f"sequence length {sequence_length} is not that of the patches and the class: {wanted}")

    def make(self, kind: str, config: Any, index: int) -> nn.Module:
        """Stock embeddings and blocks; final norm and classifier."""
        if kind == EMBEDDING:
            return _Embedding(config)
        if kind == HEAD:
            return _Head(config)
        return vit.ViTLayer(config)

    def call(self, block: nn.Module, states: States, batch: Batch, constants: dict[str, Any]) -> States:
        """Attention in both directions and a feed-forward."""
        return (block(states[0]),)

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:
        """Each rank has its share of the heads."""
        block.get_submodule("attention").num_attention_heads = config.num_attention_heads // tensor_parallel.size

    def dropout(self, config: Any) -> float:
        """Of hidden states and of the attention's weights."""
        rate: float = max(config.hidden_dropout_prob, config.attention_probs_dropout_prob)
        return rate

    def computed_positions(self, kind: str, sequence_length: int) -> int:
        """The patches, all positions, and the one that tells the class."""
        return {EMBEDDING: sequence_length - 1, HEAD: 1}.get(kind, sequence_length)

    def regions(self, kind: str, config: Any) -> tuple[Region, ...]:
        """The embedding is whole on every rank."""
        return () if kind == EMBEDDING else super().regions(kind, config)

    def replays_sum(self, config: Any) -> tuple[str, ...]:
        """A block ends in a dropout, which keeps its mask."""
        return ("full",) if config.hidden_dropout_prob > 0 else ()

    def labels(self, sequence_length: int) -> int:
        """One class."""
        return 1

    def image_form(self, model: Model) -> ImageForm:
        """As the configuration says."""
        config = self.configuration(model)
        return ImageForm(config.num_channels, *_pair(config.image_size), config.num_labels)

    def stream_tokens(self, sequence_length: int) -> None:
        """Images are no text."""

    def random_batch(self, model: Model, samples: int, generator: torch.Generator) -> Batch:
        """Random pixels in [-1, 1) and classes."""
        form = self.image_form(model)
        pixels = torch.rand(samples, form.channels, form.height, form.width, dtype=torch.float32, generator=generator)
        labels = torch.randint(0, form.classes, (samples, 1), generator=generator)
        return {"pixel_values": 2 * pixels - 1, "labels": labels}


def _pair(size: int | Iterable[int]) -> tuple[int, int]:
    """Height and width, of which one number gives both."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _patches(config: Any) -> int:
    height, width = _pair(config.image_size)
    patch_height, patch_width = _pair(config.patch_size)
    return (height // patch_height) * (width // patch_width)


FAMILIES = {"vit": ViT()}
