"""Models of images: classifiers, and models of text and images."""

import copy
from collections.abc import Mapping
from itertools import product
from math import isqrt
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.siglip.configuration_siglip import SiglipConfig, SiglipVisionConfig

from shardwright.models.facts import Family as Facts
from shardwright.models.families.gemma import GEMMA3
from shardwright.models.families.image_text import PIXTRAL
from shardwright.models.families.images import VISION
from shardwright.models.families.llama import LLAMA, MISTRAL
from shardwright.models.families.llava import (
    CLIP,
    IMAGES,
    LANGUAGE,
    PROJECTOR,
    TEXT,
    TOWER,
    TOWERS,
    VISION_TOWER,
    image_tokens,
    part_of,
    vision_kind,
)
from shardwright.models.families.swin import MERGES, STAGES
from shardwright.models.traits import BLOCK, FULL, SLIDING
from shardwright.types import EMBEDDING, Model, base_type
from shardwright_train.data.objectives import Classification, ClassificationOfAll, ImageText
from shardwright_train.data.share import Batch
from shardwright_train.models.base import Family
from shardwright_train.models.configuration import check_only, parse
from shardwright_train.models.masks import Places
from shardwright_train.models.mtp import plain_table
from shardwright_train.models.stock import Pieces, States
from shardwright_train.parallel.sharding_rules import Parts, Rule
from shardwright_train.parallel.vocab import token_embedding

# Image classifiers: ViT (Dosovitskiy et al. 2021), SigLIP (Zhai et al. 2023) and Swin (Liu et al. 2021).


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
        # A view would keep the other ranks' positions in memory, too.
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
        """Fill a layer with initial weights; positions and classifier are drawn here, as stock needs a whole model."""
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
        """Return the mean of the normed positions, as a single position."""
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
        """Return the mean of the normed positions, as a single position."""
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
        # Return only the states: FSDP2 would otherwise put hooks on the eager kernel's scores, too.
        block.register_forward_hook(lambda _block, _args, out: out[0])
        return block

    def call(self, block: Any, states: States, batch: Batch, constants: dict[str, Any]) -> States:
        """Run a block, which makes the mask of shifted windows, or merge patches."""
        return (block(states[0], block.input_resolution),)


def _move_rows(bias: Any, _args: Any) -> None:
    bias.relative_position_index = bias.relative_position_index.to(bias.relative_position_bias_table.device)


# Models of text and images: Llava (Liu et al. 2023), Gemma 3 (Gemma team 2025), Mistral 3 (Mistral AI 2025).


_EMBEDDINGS, _NORM = f"{VISION_TOWER}.embeddings", f"{VISION_TOWER}.pre_layrnorm"
_PARTS = ("self_attn",), ("mlp",)


class Llava(Family):
    """The Llava family: tower and language model are sharded like separate models; the projector is replicated."""

    embedding = (f"{LANGUAGE}.embed_tokens", _EMBEDDINGS, _NORM)
    head = (f"{LANGUAGE}.norm", "lm_head")
    parts = {
        BLOCK: Parts(f"{LANGUAGE}.layers", *_PARTS),
        TOWER: Parts(f"{VISION_TOWER}.encoder.layers", *_PARTS),
        PROJECTOR: Parts("model.multi_modal_projector", (), (), alone=True),
    }
    plan = {
        "lm_head": "colwise_gather_output",  # transformers before 5.20 has no rule for it
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1"), "colwise"),
        **dict.fromkeys(("o_proj", "down_proj", "out_proj", "fc2"), "rowwise"),
        "embed_tokens": "embedding_rowwise",
    }
    shared: Mapping[str, str] = {
        f"post_layernorm.{kind}": f"{VISION_TOWER}.post_layernorm.{kind}" for kind in ("weight", "bias")
    }
    rotary = f"{LANGUAGE}.rotary_emb"
    objective = ImageText
    text: tuple[Any, Facts] = LlamaConfig, LLAMA
    """Configuration class and facts of the language model."""
    towers: Mapping[str, Facts] = TOWERS
    """Facts of the vision towers, by the model_type of a vision_config."""

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return the configuration without unused blocks; it also has the text configuration's attributes."""
        read = self.facts.configured(config)
        if (wrong := self.facts.keys.wrong(read)) is not None:
            raise ValueError(wrong)
        (text_class, text_facts), outer = self.text, dict(config)
        text, vision = part_of(config, TEXT), part_of(config, VISION)
        moved = text_class().to_dict().keys() - self.stock.config_class().to_dict().keys()
        text |= {key: outer.pop(key) for key in moved & outer.keys()}
        tower = self.towers[vision_kind(config, CLIP)] if "model_type" in vision else None
        for part, kind, facts in (
            (text, text_class, text_facts),
            (vision, tower and CONFIG_MAPPING[tower.model_type], tower),
        ):
            if facts is not None:
                parse(kind, part, facts)  # names an unknown key
                check_only(part, facts)
        for part, key in product((text, vision), ("dtype", "torch_dtype")):
            part.pop(key, None)  # The plan says in which format, also if a part of the file does.
        vision["num_hidden_layers"] = self.facts.stacks[0].numbers(read)[0]
        configured = super().configured(outer | {TEXT: text, VISION: vision, **self.normalized(read)})
        of_text = {
            key: x for key, x in vars(configured.text_config).items() if key not in ("model_type", "architectures")
        }
        vars(configured).update({**of_text, **vars(configured)})
        return configured

    def normalized(self, read: Mapping[str, Any]) -> dict[str, Any]:
        """Return changes to a configuration that end its tower with the block whose states are used."""
        return {"vision_feature_layer": -1, "image_seq_length": image_tokens(read)}

    def module(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return the modules of a layer; patch position numbers are not a buffer, which would lose its values."""
        if kind != EMBEDDING:
            return super().module(stock, kind, index)
        paths = self.embedding if hasattr(stock.model.vision_tower, "pre_layrnorm") else self.embedding[:-1]
        pieces = Pieces(stock, paths, self.embed)
        embeddings: Any = pieces.get_submodule(_EMBEDDINGS)
        del embeddings.position_ids
        embeddings.position_ids = torch.arange(embeddings.num_positions, device="cpu")[None]
        return pieces

    def block(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return a stock block, or the projector together with the tower's last norm, which is not used here."""
        block: Any = super().block(stock, kind, index)
        block.of_tower, block.images = kind == TOWER, getattr(stock.config, IMAGES, 1)
        if kind == PROJECTOR:
            if hasattr(stock.model.vision_tower, "post_layernorm"):
                block.post_layernorm = copy.deepcopy(stock.model.vision_tower.post_layernorm).requires_grad_(False)
            block.has_class = getattr(stock.config, "vision_feature_select_strategy", None) == "default"
            block.image_token = stock.config.image_token_index
        return block  # type: ignore[no-any-return]

    def initialize(self, model: Model, module: nn.Module) -> None:
        """Fill a whole layer with the initial weights of transformers; the tower's own class fills its modules."""
        stock = self.stock_model(model)
        within = [part for name, part in module.named_modules() if name == VISION_TOWER]
        within += [module] if getattr(module, "of_tower", False) else []
        tower = {id(part) for root in within for part in root.modules()}

        def start(part: nn.Module) -> None:
            (stock.model.vision_tower if id(part) in tower else stock)._init_weights(part)

        with torch.no_grad():
            module.apply(start)

    def keeps_last_sum(self, kind: str, config: Any, compute: str) -> bool:
        """Return whether the backward pass needs the last sum, as in the projector, which merges it into the text."""
        return kind == PROJECTOR or super().keeps_last_sum(kind, config, compute)

    def may_lack(self, model: Model, name: str) -> bool:
        """Return whether a tensor belongs to a block of the tower after the one whose states are used."""
        blocks = self.parts[TOWER].path
        number = name.removeprefix(f"{blocks}.").partition(".")[0]
        taken = sum(base_type(kind) == TOWER for kind in model.layers)
        return name.startswith(f"{blocks}.") and number.isdecimal() and int(number) >= taken

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """Return the states of the images' patches, which every rank computes completely, and of the tokens."""
        table: Any = pieces.get_submodule(self.embedding[0])
        split, pixels = pieces.tensor_parallel, batch["pixel_values"]
        states = self.patched(pieces.get_submodule(VISION_TOWER), pixels.flatten(0, -4).to(table.weight.dtype))
        states = states.reshape(len(pixels), -1, states.shape[-1])
        held = states[:, split.positions(states.shape[1])].clone()
        return held, token_embedding(table, batch["tokens"], split)

    def patched(self, tower: Any, images: Tensor) -> Tensor:
        """Return the states of images' patches [images, positions, features], as the tower's blocks expect them."""
        embeddings = tower.embeddings
        patches = embeddings.patch_embedding(images).flatten(2).transpose(1, 2)
        if hasattr(embeddings, "class_embedding"):
            patches = torch.cat((embeddings.class_embedding.expand(len(patches), 1, -1), patches), 1)
        states: Tensor = patches + embeddings.position_embedding.weight
        return tower.pre_layrnorm(states) if hasattr(tower, "pre_layrnorm") else states

    def call(self, block: Any, states: States, batch: Batch, constants: dict[str, Any]) -> Any:
        """Run a block: the tower's blocks pass the text's states through, and the projector merges both."""
        if len(states) == 1:
            return super().call(block, states, batch, constants)
        held, text = states
        image = held if block.images == 1 else held.reshape(len(held) * block.images, -1, held.shape[-1])
        if block.of_tower:
            made = block(image, attention_mask=None, **constants["arguments"])
            # A layer that FSDP2 wraps must not return a view.
            return made if block.images == 1 else made.reshape(held.shape).clone(), text
        projected = block(image[:, 1:].contiguous() if block.has_class else image)
        features = projected.reshape(len(held), -1, projected.shape[-1])
        return (placed(features, text, batch["tokens"] == block.image_token),)


def placed(features: Tensor, text: Tensor, inside: Tensor) -> Tensor:
    """Return text states [n, s, h] with images' features [n, t, h], in order, at positions where `inside` [n, s]."""
    index = (inside.cumsum(1) - 1).clamp(0, features.shape[1] - 1)
    rows = features.gather(1, index[..., None].expand(-1, -1, features.shape[-1]))
    return rows.where(inside[..., None], text)


class Gemma3Images(Llava):
    """Llava with Gemma's blocks, scaled embeddings of tokens, and a projector that norms and pools."""

    parts = {
        **dict.fromkeys((SLIDING, FULL), Parts(f"{LANGUAGE}.layers", ("self_attn",), ("mlp",))),
        **{kind: Llava.parts[kind] for kind in (TOWER, PROJECTOR)},
    }
    plan = {**Llava.plan, **dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce")}
    text = Gemma3TextConfig, GEMMA3

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return the configuration, with the number of positions of an image under Llava's name."""
        configured = super().configured({key: x for key, x in config.items() if key != "image_seq_length"})
        configured.image_seq_length = configured.mm_tokens_per_image
        return configured

    def normalized(self, read: Mapping[str, Any]) -> dict[str, Any]:
        """Return no changes: all blocks of the tower are used."""
        return {}

    def module(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return the modules of a layer, with a plain embedding table: `embed` scales its rows."""
        module = super().module(stock, kind, index)
        if kind == EMBEDDING:
            module.set_submodule(self.embedding[0], plain_table(stock.model.language_model.embed_tokens))
        return module

    def block(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return a stock block, or the projector, which norms the output of the tower's last block."""
        block = super().block(stock, kind, index)
        if kind == PROJECTOR:
            block.post_layernorm.requires_grad_(True)
            block.forward = MethodType(_projected, block)
        return block

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """Return the states of patches and of tokens, the latter scaled by the square root of the width."""
        image, text = super().embed(pieces, batch)
        return image, text * torch.tensor(pieces.config.text_config.hidden_size**0.5).to(text.dtype)

    def angles(self, rotary: nn.Module, kind: str, example: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Return the cosines and sines of a type of block."""
        angles: tuple[Tensor, ...] = rotary(example, positions, base_type(kind))
        return angles


class Mistral3(Llava):
    """Llava with Pixtral's tower, which rotates by rows and columns, and a projector that merges patches."""

    embedding = (f"{LANGUAGE}.embed_tokens", f"{VISION_TOWER}.patch_conv", f"{VISION_TOWER}.ln_pre")
    parts = {**Llava.parts, TOWER: Parts(f"{VISION_TOWER}.transformer.layers", ("attention",), ("feed_forward",))}
    shared = {}
    counted_per_rank = ("num_heads",)
    text = MistralConfig, MISTRAL
    towers = {PIXTRAL.facts.model_type: PIXTRAL.facts}

    def normalized(self, read: Mapping[str, Any]) -> dict[str, Any]:
        """Return whether matrices are tied, which may be set in a part of the configuration."""
        return {"tie_word_embeddings": read["tie_word_embeddings"]}

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return the configuration, with the size of the images of samples and the number of their tokens."""
        configured, read = super().configured(config), self.facts.configured(config)
        configured.vision_config.image_size, configured.image_seq_length = PIXTRAL.pixels(read), PIXTRAL.tokens(read)
        return configured

    def module(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return the modules of a layer; the tower has no table of positions."""
        return Family.module(self, stock, kind, index)

    def block(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return a stock block, or the projector, which is called with images of one size."""
        block = super().block(stock, kind, index)
        if kind == PROJECTOR:
            block.forward = MethodType(_merged, block)
        return block

    def patched(self, tower: Any, images: Tensor) -> Tensor:
        """Return the normed states of images' patches."""
        # In the memory layout in which the stock model norms them.
        states: Tensor = tower.ln_pre(tower.patch_conv(images).flatten(2).transpose(1, 2).contiguous())
        return states

    def rotated(self, model: Model, kind: str, places: Places, example: Tensor) -> dict[str, Any]:
        """Return the arguments that rotate queries and keys: in the tower, by rows and columns of patches."""
        if base_type(kind) != TOWER:
            return super().rotated(model, kind, places, example)
        stock = self.stock_model(model).model.vision_tower
        side = stock.config.image_size // stock.config.patch_size
        lines = torch.arange(side, device=example.device)
        rotary = type(stock.patch_positional_embedding)(stock.config).to(example.device)
        return {"arguments": {"position_embeddings": rotary(example, torch.cartesian_prod(lines, lines))}}


def _merged(projector: Any, images: Tensor) -> Tensor:
    """Return images' features [n, tokens, h], each projected from a square of patch states [n, patches, h]."""
    side = isqrt(images.shape[1]) * projector.patch_merger.patch_size
    flat: Tensor = type(projector).forward(projector, images.flatten(0, 1), [(side, side)] * len(images))
    return flat.reshape(len(images), -1, flat.shape[-1])


def _projected(projector: Any, image: Tensor) -> Tensor:
    """Return an image's features, projected from the normed states."""
    features: Tensor = type(projector).forward(projector, projector.post_layernorm(image))
    return features
