"""Image classifiers: ViT (Dosovitskiy et al. 2021), SigLIP (Zhai et al. 2023) and Swin (Liu et al. 2021)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.siglip.configuration_siglip import SiglipConfig, SiglipVisionConfig

from shardwright.models.families.images import VISION
from shardwright.models.families.swin import MERGES, STAGES
from shardwright.models.traits import BLOCK
from shardwright.types import Model
from shardwright_train.data.objectives import Classification, ClassificationOfAll
from shardwright_train.data.share import Batch
from shardwright_train.models.base import Family
from shardwright_train.models.configuration import parse
from shardwright_train.models.stock import Pieces, States
from shardwright_train.parallel.sharding_rules import Parts, Rule


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
        """Return the embedding of class token and patches; every rank computes all positions and keeps its own."""
        stock: Any = pieces.get_submodule("vit.embeddings")
        # Images are read in float32.
        states = stock(batch["pixel_values"].to(stock.cls_token.dtype))
        # A view would hold the others' positions, too.
        return (states[:, pieces.tensor_parallel.positions(states.shape[1])].clone(),)


_VISION_KEYS = SiglipVisionConfig().to_dict().keys() - SiglipConfig().to_dict().keys()
_PATCHES, _POSITIONS = (f"vision_model.embeddings.{name}_embedding" for name in ("patch", "position"))


class Siglip(ViT):
    """SigLIP's vision tower, sharded as ViT is; the stock model's attention pooling and text tower are left out."""

    embedding = (_PATCHES, _POSITIONS)
    head = ("vision_model.post_layernorm", "classifier")
    parts = {BLOCK: Parts("vision_model.encoder.layers", attention=("self_attn",), mlp=("mlp",))}
    plan = {**ViT.plan, "out_proj": "rowwise"}
    objective = ClassificationOfAll

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return the configuration, with the vision tower's attributes, which may also be top-level keys."""
        outer, vision = dict(config), dict(config.get(VISION) or {}) | {"vision_use_head": False}
        vision |= {key: outer.pop(key) for key in _VISION_KEYS & outer.keys()}
        parse(SiglipVisionConfig, vision, self.facts)  # names an unknown key
        configured = super().configured(outer | {VISION: vision})
        vars(configured).update({**vars(configured.vision_config), **vars(configured)})
        return configured

    def initialize(self, model: Model, module: nn.Module) -> None:
        """Give a layer its initial weights: stock draws positions and classifier if their owners are whole."""
        super().initialize(model, module)
        config, modules = self.configuration(model), dict[str, Any](module.named_modules())
        drawn: dict[str, float] = {_POSITIONS: 1.0, self.head[-1]: config.initializer_factor}
        for path in drawn.keys() & modules.keys():
            nn.init.normal_(modules[path].weight, std=drawn[path] * config.hidden_size**-0.5)

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """Return the embedding of patches; every rank computes all positions and keeps its own."""
        stock: Any = pieces.get_submodule("vision_model.embeddings")
        table = stock.position_embedding.weight
        patches = stock.patch_embedding(batch["pixel_values"].to(table.dtype)).flatten(2).transpose(1, 2)
        return ((patches + table)[:, pieces.tensor_parallel.positions(len(table))].clone(),)

    def normed(self, pieces: Pieces, states: States) -> Tensor:
        """The mean of the normed positions, as a single position."""
        return pieces.through(self.head[:1], states[-1]).mean(1, keepdim=True)


# Swin: stages of blocks that attend in windows; between stages, patches are merged.


class Swin(Family):
    """The Swin family: sharded as ViT, with a column-parallel position bias; patch merging is replicated."""

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
        """Return the embedding of patches; every rank computes all positions and keeps its own."""
        stock: Any = pieces.get_submodule("swin.embeddings")
        states, _ = stock(batch["pixel_values"].to(stock.norm.weight.dtype))
        return (states[:, pieces.tensor_parallel.positions(states.shape[1])].clone(),)

    def normed(self, pieces: Pieces, states: States) -> Tensor:
        """The mean of the normed positions, as a single position."""
        return pieces.through(self.head[:1], states[-1]).mean(1, keepdim=True)

    def block(self, stock: Any, kind: str, index: int) -> Any:
        """Return a block, or a patch merging, with the height and width of its input image set."""
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
