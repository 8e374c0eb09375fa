"""Llava (Liu et al. 2023): a vision tower, a projector that puts its states among a text's, and Llama's blocks."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from shardwright_formats.types import EMBEDDING, HEAD, Parameter, base_type
from shardwright_models.facts import BLOCK, MULTIPLIED, Config, Stack
from shardwright_models.families.llama import LLAMA
from shardwright_models.families.siglip import VISION
from shardwright_models.families.towers import (
    IMAGES,
    TOWERS,
    attended_positions,
    block_shapes,
    embedding_parameters,
    part_of,
    patches,
    positions,
    vision_kind,
    vision_of,
    wrong_images,
    wrong_tower,
)
from shardwright_models.parameters import Parameters, linear, norm, vocabulary

TEXT = "text_config"
"""The key that holds the keys of the language model."""
TOWER, PROJECTOR = "vision", "projector"
"""Types of the blocks of a vision tower, and of what makes states of a text of theirs."""
IMAGE_STATES = "image_states"
LANGUAGE = "model.language_model"
VISION_TOWER = "model.vision_tower"
_LAYER, _SELECTED = "vision_feature_layer", "vision_feature_select_strategy"
_DEFAULT_KIND = "clip_vision_model"
_TEXT_DEFAULTS = {
    **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "max_position_embeddings": 2048},
}


class Tower(Stack):
    """The blocks of a vision tower up to the one whose states are taken, and the projector behind them."""

    def layers(self, config: Config) -> Sequence[str]:
        """Return the types of its blocks, and that of the projector."""
        return [TOWER] * self.taken(config) + [PROJECTOR]

    def numbers(self, config: Config) -> Sequence[Any]:
        """Return the number of its blocks."""
        return (self.taken(config),)

    def taken(self, config: Config) -> int:
        """Return the number of its blocks that compute something."""
        return taken_blocks(config)

    def counted(self, layers: Sequence[str], config: Config) -> dict[str, Any]:
        """Return the key that counts the blocks of the tower."""
        return {self.counted_by: [base_type(layer) for layer in layers].count(TOWER)}


def taken_blocks(config: Config) -> int:
    """Return the number of the vision tower's blocks up to the one whose states are taken; the rest compute nothing."""
    blocks: int = tower_of(config)["num_hidden_layers"]
    taken: int = config[_LAYER]
    return taken if taken >= 0 else blocks + 1 + taken


def tower_of(config: Config) -> dict[str, Any]:
    """Return the keys of the vision tower."""
    return vision_of(config, vision_kind(config, _DEFAULT_KIND))


def image_tokens(config: Config) -> int:
    """Return the positions of a text that an image takes."""
    kind, vision = vision_kind(config, _DEFAULT_KIND), tower_of(config)
    return patches(vision) if config[_SELECTED] == "default" and _has_class(kind) else positions(kind, vision)


def _has_class(kind: str) -> bool:
    return kind == _DEFAULT_KIND


def _states_positions(config: Config) -> int:
    return positions(vision_kind(config, _DEFAULT_KIND), tower_of(config))


def multiplied_positions(layer: str, config: Config, patches: int, tokens: int) -> dict[str, int | None]:
    """Return the positions that matrices multiply where a sample's images have so many patches and tokens each."""
    each = {EMBEDDING: patches, PROJECTOR: tokens}.get(layer)
    return {MULTIPLIED: None if each is None else config[IMAGES] * each}


def _parameters(layer: str, config: Config) -> Parameters:
    vision, hidden = tower_of(config), config["hidden_size"]
    kind, bias = vision_kind(config, _DEFAULT_KIND), config["multimodal_projector_bias"]
    if layer == EMBEDDING:
        yield from vocabulary(f"{LANGUAGE}.embed_tokens.weight", config)
        yield from embedding_parameters(VISION_TOWER, kind, vision)
    elif layer == TOWER:
        yield from TOWERS[kind].parameters(BLOCK, vision)
    elif layer == PROJECTOR:
        yield from linear("linear_1", hidden, vision["hidden_size"], bias=bias)
        yield from linear("linear_2", hidden, hidden, bias=bias)
        # Of an image's class, which nothing here asks for: files keep it.
        for part in ("weight", "bias"):
            name = f"post_layernorm.{part}"
            yield Parameter(name=name, shape=(vision["hidden_size"],), frozen=True, shared=True)
    elif layer == HEAD:
        yield from norm(f"{LANGUAGE}.norm", hidden, bias=False)
        yield from vocabulary("lm_head.weight", config)
    else:
        yield from LLAMA.parameters(layer, config)


def _shapes(layer: str, config: Config) -> Config:
    vision = tower_of(config)
    shapes = multiplied_positions(layer, config, patches(vision), image_tokens(config))
    if layer == TOWER:
        shapes |= block_shapes(vision) | attended_positions(config, _states_positions(config))
    return shapes


def _wrong(config: Config) -> str | None:
    """Return what is wrong with the parts of a model, which are other families'."""
    if config.get(VISION) is None:
        return f"{VISION} is missing"
    text = part_of(config, TEXT).get("model_type", "llama")
    if text != "llama":
        return f"{TEXT}: model_type {text!r} is no language model of this family: llama is"
    words, image = part_of(config, TEXT).get("vocab_size", _TEXT_DEFAULTS["vocab_size"]), config["image_token_index"]
    if words != config["vocab_size"]:
        return f"vocab_size {config['vocab_size']} is not the {words} of {TEXT}"
    if isinstance(words, int) and not (isinstance(image, int) and 0 <= image < words):
        return f"image_token_index {image} is not below vocab_size {words}"
    kind = vision_kind(config, _DEFAULT_KIND)
    if kind not in TOWERS:
        return f"{VISION}: model_type {kind!r} is none of {', '.join(TOWERS)}"
    if (wrong := wrong_tower(kind, tower_of(config)) or wrong_images(config)) is not None:
        return wrong
    taken, blocks = config[_LAYER], tower_of(config)["num_hidden_layers"]
    if not isinstance(taken, int) or isinstance(taken, bool):
        return f"{_LAYER} {taken!r} is no number of one layer"
    if not 1 <= taken_blocks(config) <= blocks:
        return f"{_LAYER} {taken} takes no states behind one of {blocks} blocks"
    if config[_SELECTED] == "default" and not _has_class(kind):
        return f"{_SELECTED} default leaves out an image's class, which {kind} has not: use full"
    return None


LLAVA = replace(
    LLAMA,
    model_type="llava",
    stock="LlavaForConditionalGeneration",
    runtime="llava:Llava",
    nested=TEXT,
    parameters=_parameters,
    stacks=(
        Tower(types=(TOWER, PROJECTOR), state=IMAGE_STATES, inside=VISION, resets={_LAYER: -1}),
        Stack(types=(BLOCK,)),
    ),
    aliases={"image_token_id": "image_token_index"},
    defaults={
        **LLAMA.defaults,
        **_TEXT_DEFAULTS,
        **{"image_token_index": 32000, "projector_hidden_act": "gelu", "multimodal_projector_bias": True},
        **{_LAYER: -2, _SELECTED: "default", IMAGES: 1},
    },
    tied=((f"{LANGUAGE}.embed_tokens.weight", "lm_head.weight"),),
    towers=lambda layer, config: TOWERS[vision_kind(config, _DEFAULT_KIND)] if layer == TOWER else None,
    shapes=_shapes,
    wrong=_wrong,
    merging=(PROJECTOR,),
    undivided_sequence={PROJECTOR: "image_positions"},
    state_lengths=lambda config: {IMAGE_STATES: config[IMAGES] * _states_positions(config)},
    state_features=lambda config: {
        IMAGE_STATES: tower_of(config)["hidden_size"],
        "hidden_states": config["hidden_size"],
    },
    joined_by=PROJECTOR,
    least_positions=lambda config: config[IMAGES] * image_tokens(config) + 1,
    megatron=None,
    torchtitan=None,
    ignored=("ignore_index", "vocab_size", IMAGES),
    only={},
)
