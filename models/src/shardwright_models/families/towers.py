"""Vision towers of models that also read text: CLIP's (Radford et al. 2021) and SigLIP's (Zhai et al. 2023)."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardwright_formats.types import Parameter
from shardwright_models.facts import ATTENDED, Config
from shardwright_models.families.siglip import SIGLIP, VISION
from shardwright_models.parameters import Parameters, linear, norm

CLIP, _SIGLIP = "clip_vision_model", "siglip_vision_model"


def _clip_block(_layer: str, config: Config) -> Parameters:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for name in ("k", "v", "q"):
        yield from linear(f"self_attn.{name}_proj", hidden, hidden, "columns", bias=True)
    yield from linear("self_attn.out_proj", hidden, hidden, "rows", bias=True)
    yield from norm("layer_norm1", hidden)
    yield from linear("mlp.fc1", inner, hidden, "columns", bias=True)
    yield from linear("mlp.fc2", hidden, inner, "rows", bias=True)
    yield from norm("layer_norm2", hidden)


_CLIP_TOWER = replace(
    SIGLIP,
    model_type=CLIP,
    # Published files name the vocabulary of a text tower that is not there.
    ignored=("vocab_size",),
    nested=None,
    parameters=_clip_block,
    defaults={
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"image_size": 224, "patch_size": 32, "num_channels": 3, "attention_dropout": 0.0},
        **{"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    },
)
_SIGLIP_TOWER = replace(SIGLIP, model_type=_SIGLIP, nested=None)
TOWERS = {CLIP: _CLIP_TOWER, _SIGLIP: _SIGLIP_TOWER}
"""Facts of the towers' blocks, by the model_type of a vision_config."""
_LENGTHS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels")
_SIDES = ("image_size", "patch_size")
IMAGES = "images_per_sample"
"""The key of the most images of a sample, which transformers does not have: each sample takes the room of so many."""
_MAX_IMAGES = 1024


def part_of(config: Config, key: str) -> dict[str, Any]:
    """Return the keys that a configuration holds under one, such as vision_config."""
    inner = config.get(key) or {}
    return dict(inner if isinstance(inner, Mapping) else vars(inner))


def vision_kind(config: Config, default: str) -> str:
    """Return the model_type of a model's vision tower."""
    return str(part_of(config, VISION).get("model_type", default))


def vision_of(config: Config, kind: str) -> dict[str, Any]:
    """Return the keys of a model's vision tower of a kind."""
    return TOWERS[kind].configured(part_of(config, VISION))


def patches(vision: Config) -> int:
    """Return the patches of an image."""
    side: int = vision["image_size"] // vision["patch_size"]
    return side * side


def positions(kind: str, vision: Config) -> int:
    """Return the positions of a tower's states: the patches of an image, and with CLIP one for its class."""
    return patches(vision) + (kind == CLIP)


def attended_positions(config: Config, positions: int) -> dict[str, int]:
    """Return the positions of an image where a sample has several: each attends to its image alone."""
    return {ATTENDED: positions} if config[IMAGES] > 1 else {}


def block_shapes(vision: Config) -> dict[str, Any]:
    """Return the keys of a tower's blocks under the names that shapes are read by."""
    heads = vision["num_attention_heads"]
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": vision["hidden_size"] // heads}
    names = ("hidden_size", "intermediate_size", "hidden_act", "attention_dropout")
    return {**shape, **{name: vision[name] for name in names}}


def embedding_parameters(prefix: str, kind: str, vision: Config) -> Parameters:
    """Yield the parameters that make states of an image's patches."""
    hidden, patch = vision["hidden_size"], vision["patch_size"]
    if kind == CLIP:
        yield Parameter(name=f"{prefix}.embeddings.class_embedding", shape=(hidden,))
    projection = f"{prefix}.embeddings.patch_embedding"
    yield Parameter(name=f"{projection}.weight", shape=(hidden, vision["num_channels"], patch, patch))
    if kind == _SIGLIP:
        yield Parameter(name=f"{projection}.bias", shape=(hidden,))
    table = f"{prefix}.embeddings.position_embedding.weight"
    yield Parameter(name=table, shape=(positions(kind, vision), hidden))
    if kind == CLIP:
        yield from norm(f"{prefix}.pre_layrnorm", hidden)


def wrong_tower(kind: str, vision: Config) -> str | None:
    """Return what is wrong with the keys of a vision tower."""
    for key in (*_LENGTHS, *_SIDES):
        if not isinstance(vision[key], int) or isinstance(vision[key], bool) or vision[key] < 1:
            return f"{VISION}: {key} {vision[key]!r} is no length"
    if vision["hidden_size"] % vision["num_attention_heads"]:
        width, heads = vision["hidden_size"], vision["num_attention_heads"]
        return f"{VISION}: hidden_size {width} is no multiple of num_attention_heads {heads}"
    if vision["image_size"] < vision["patch_size"]:
        return f"{VISION}: image_size {vision['image_size']} is under patch_size {vision['patch_size']}"
    return None


def wrong_images(config: Config) -> str | None:
    """Return what is wrong with the number of a sample's images."""
    images = config[IMAGES]
    is_number = isinstance(images, int) and not isinstance(images, bool) and 1 <= images <= _MAX_IMAGES
    return None if is_number else f"{IMAGES} {images!r} is no number from 1 to {_MAX_IMAGES}"
