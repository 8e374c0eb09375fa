"""SigLIP's vision tower (Zhai et al. 2023), trained to classify images by the mean of their patches."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.models.siglip.configuration_siglip import SiglipConfig, SiglipVisionConfig

from shardwright_formats.types import Model
from shardwright_models.facts import BLOCK
from shardwright_models.families.siglip import VISION
from shardwright_train.data.objectives import ClassificationOfAll
from shardwright_train.data.share import Batch
from shardwright_train.models.auxiliary_loss import States
from shardwright_train.models.configuration import parse
from shardwright_train.models.stock import Pieces
from shardwright_train.models.vit import ViT
from shardwright_train.parallel.sharding_rules import Parts

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
        """Return the configuration; it has the attributes of the vision tower's, whose keys may also be top ones."""
        outer, vision = dict(config), dict(config.get(VISION) or {}) | {"vision_use_head": False}
        vision |= {key: outer.pop(key) for key in _VISION_KEYS & outer.keys()}
        parse(SiglipVisionConfig, vision, self.facts)  # names an unknown key
        configured = super().configured(outer | {VISION: vision})
        vars(configured).update({**vars(configured.vision_config), **vars(configured)})
        return configured

    def initialize(self, model: Model, module: nn.Module) -> None:
        """Give a layer its initial weights: stock draws positions and classifier where their owners are whole."""
        super().initialize(model, module)
        config, modules = self.configuration(model), dict[str, Any](module.named_modules())
        drawn: dict[str, float] = {_POSITIONS: 1.0, self.head[-1]: config.initializer_factor}
        for path in drawn.keys() & modules.keys():
            nn.init.normal_(modules[path].weight, std=drawn[path] * config.hidden_size**-0.5)

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """Return the embedding of patches: every rank computes all positions and keeps its own."""
        stock: Any = pieces.get_submodule("vision_model.embeddings")
        table = stock.position_embedding.weight
        patches = stock.patch_embedding(batch["pixel_values"].to(table.dtype)).flatten(2).transpose(1, 2)
        return ((patches + table)[:, pieces.tensor_parallel.positions(len(table))].clone(),)

    def normed(self, pieces: Pieces, states: States) -> Tensor:
        """Return the mean of the normed positions, as the only one."""
        return pieces.through(self.head[:1], states[-1]).mean(1, keepdim=True)
