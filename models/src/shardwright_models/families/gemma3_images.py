"""Gemma 3 with images (Gemma team 2025): SigLIP's tower, whose states are pooled, and the blocks of Gemma 3."""

from collections.abc import Sequence
from math import isqrt
from typing import Any

from msgspec.structs import replace

from shardwright_formats.types import EMBEDDING, HEAD, Parameter
from shardwright_models.facts import BLOCK, Config, Stack
from shardwright_models.families.gemma3 import GEMMA3
from shardwright_models.families.llava import (
    IMAGE_STATES,
    LANGUAGE,
    PROJECTOR,
    TEXT,
    TOWER,
    VISION_TOWER,
    Tower,
    multiplied_positions,
)
from shardwright_models.families.siglip import VISION
from shardwright_models.families.towers import (
    IMAGES,
    TOWERS,
    attended_positions,
    block_shapes,
    embedding_parameters,
    part_of,
    patches,
    vision_of,
    wrong_images,
    wrong_tower,
)
from shardwright_models.parameters import Parameters, norm, vocabulary

PROJECTION = "mm_input_projection_weight"
KIND = "siglip_vision_model"
_TOKENS = "mm_tokens_per_image"


class _Tower(Tower):
    """The blocks of the vision tower, and the projector behind them."""

    def taken(self, config: Config) -> int:
        """Return the number of its blocks, all of which compute something."""
        blocks: int = tower_of(config)["num_hidden_layers"]
        return blocks


def tower_of(config: Config) -> dict[str, Any]:
    """Return the keys of the vision tower."""
    return vision_of(config, KIND)


def _parameters(layer: str, config: Config) -> Parameters:
    vision, hidden = tower_of(config), config["hidden_size"]
    if layer == EMBEDDING:
        yield from vocabulary(f"{LANGUAGE}.embed_tokens.weight", config)
        yield from embedding_parameters(VISION_TOWER, KIND, vision)
    elif layer == TOWER:
        yield from TOWERS[KIND].parameters(BLOCK, vision)
    elif layer == PROJECTOR:
        width = vision["hidden_size"]
        yield Parameter(name=PROJECTION, shape=(width, hidden))
        yield from norm("mm_soft_emb_norm", width, bias=False)
        for part in ("weight", "bias"):
            yield Parameter(name=f"post_layernorm.{part}", shape=(width,), shared=True)
    elif layer == HEAD:
        yield from norm(f"{LANGUAGE}.norm", hidden, bias=False)
        yield from vocabulary("lm_head.weight", config)
    else:
        yield from GEMMA3.parameters(layer, config)


def _shapes(layer: str, config: Config) -> Config:
    vision = tower_of(config)
    shapes = multiplied_positions(layer, config, patches(vision), config[_TOKENS])
    if layer == TOWER:
        shapes |= block_shapes(vision) | attended_positions(config, patches(vision))
    return shapes


def _wrong(config: Config) -> str | None:
    """Return what is wrong with the parts of a model, which are other families'."""
    if config.get(VISION) is None:
        return f"{VISION} is missing"
    for key, known in ((TEXT, GEMMA3.model_type), (VISION, KIND)):
        if (kind := part_of(config, key).get("model_type", known)) != known:
            return f"{key}: model_type {kind!r} is none of this family: {known} is"
    words, image = config["vocab_size"], config["image_token_index"]
    if isinstance(words, int) and not (isinstance(image, int) and 0 <= image < words):
        return f"image_token_index {image} is not below vocab_size {words}"
    return wrong_tower(KIND, tower_of(config)) or _wrong_pool(config) or wrong_images(config)


def _wrong_pool(config: Config) -> str | None:
    vision, tokens = tower_of(config), config[_TOKENS]
    side = vision["image_size"] // vision["patch_size"]
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        return f"{_TOKENS} {tokens!r} is no length"
    if isqrt(tokens) ** 2 != tokens or side % isqrt(tokens):
        return f"{_TOKENS} {tokens} are no square that divides the {side} x {side} patches of an image"
    return None


def _stacks(blocks: Sequence[Stack]) -> tuple[Stack, ...]:
    return _Tower(types=(TOWER, PROJECTOR), state=IMAGE_STATES, inside=VISION), *blocks


GEMMA3_IMAGES = replace(
    GEMMA3,
    model_type="gemma3",
    stock="Gemma3ForConditionalGeneration",
    runtime="gemma3_images:Gemma3Images",
    nested=TEXT,
    parameters=_parameters,
    stacks=_stacks(GEMMA3.stacks),
    aliases={name.replace("index", "id"): name for name in ("image_token_index", "boi_token_index", "eoi_token_index")},
    defaults={
        **GEMMA3.defaults,
        **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_key_value_heads": 4},
        **{"image_token_index": 262144, _TOKENS: 256, IMAGES: 1},
    },
    tied=((f"{LANGUAGE}.embed_tokens.weight", "lm_head.weight"),),
    towers=lambda layer, _: TOWERS[KIND] if layer == TOWER else None,
    matrices=(PROJECTION,),
    shapes=_shapes,
    wrong=_wrong,
    merging=(PROJECTOR,),
    undivided_sequence={PROJECTOR: "image_positions"},
    state_lengths=lambda config: {IMAGE_STATES: config[IMAGES] * patches(tower_of(config))},
    state_features=lambda config: {
        IMAGE_STATES: tower_of(config)["hidden_size"],
        "hidden_states": config["hidden_size"],
    },
    joined_by=PROJECTOR,
    images_ahead=True,
    least_positions=lambda config: config[IMAGES] * config[_TOKENS] + 1,
    ignored=(*GEMMA3.ignored, "image_seq_length", IMAGES),
)
