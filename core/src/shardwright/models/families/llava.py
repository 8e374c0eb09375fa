"""Models of text and images: a vision tower, a projector that inserts image states into the text, and text blocks.

Llava (Liu et al. 2023) has the tower of CLIP (Radford et al. 2021) or SigLIP (Zhai et al. 2023), and Llama's blocks.
Gemma 3 (Gemma team 2025) has SigLIP's tower, whose states are pooled.
"""

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

from msgspec.structs import replace

from shardwright.models import traits
from shardwright.models.config_keys import not_a_length
from shardwright.models.facts import Vision
from shardwright.models.families.gemma import GEMMA3
from shardwright.models.families.images import SIGLIP, VISION
from shardwright.models.families.llama import LLAMA
from shardwright.models.parameters import Parameters, linear, norm, vocabulary
from shardwright.models.traits import ATTENDED, BLOCK, FULL, MULTIPLIED, SLIDING, Config, Stack
from shardwright.types import EMBEDDING, HEAD, Parameter, base_type

CLIP, SIGLIP_TOWER = "clip_vision_model", "siglip_vision_model"


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
    keys=traits.Keys(
        {
            **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
            **{"image_size": 224, "patch_size": 32, "num_channels": 3, "attention_dropout": 0.0},
            **{"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
        },
        lengths=SIGLIP.keys.lengths,
        # Published files state the vocabulary of a text tower that they do not have.
        ignored=("vocab_size",),
    ),
    parameters=_clip_block,
)
_SIGLIP_TOWER = replace(SIGLIP, model_type=SIGLIP_TOWER, keys=SIGLIP.keys._replace(nested=None))
TOWERS = {CLIP: _CLIP_TOWER, SIGLIP_TOWER: _SIGLIP_TOWER}
"""Facts of the towers' blocks, by the model_type of a vision_config."""
_LENGTHS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels")
_SIDES = ("image_size", "patch_size")
IMAGES = "images_per_sample"
"""The key, which transformers does not have, of the largest number of images in a sample; each sample has room for that
many."""
_MAX_IMAGES = 1024


def part_of(config: Config, key: str) -> dict[str, Any]:
    """Return the keys that are nested under a key of a configuration, such as vision_config."""
    inner = config.get(key) or {}
    return dict(inner if isinstance(inner, Mapping) else vars(inner))


def vision_kind(config: Config, default: str) -> str:
    """Return the model_type of a model's vision tower."""
    return str(part_of(config, VISION).get("model_type", default))


def vision_of(config: Config, kind: str) -> dict[str, Any]:
    """Return the keys of a model's vision tower, with the defaults of a kind of tower."""
    return TOWERS[kind].configured(part_of(config, VISION))


def patches(vision: Config) -> int:
    """Return the number of patches of an image."""
    side: int = vision["image_size"] // vision["patch_size"]
    return side * side


def positions(kind: str, vision: Config) -> int:
    """Return the number of positions of a tower's states: an image's patches, and with CLIP one for its class."""
    return patches(vision) + (kind == CLIP)


def attended_positions(config: Config, positions: int) -> dict[str, int]:
    """Return the entry that limits attention to one image's positions; empty if a sample has only one image."""
    return {ATTENDED: positions} if config[IMAGES] > 1 else {}


def block_shapes(vision: Config) -> dict[str, Any]:
    """Return the keys of a tower's blocks under the names by which shapes are read."""
    heads = vision["num_attention_heads"]
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": vision["hidden_size"] // heads}
    names = ("hidden_size", "intermediate_size", "hidden_act", "attention_dropout")
    return {**shape, **{name: vision[name] for name in names}}


def embedding_parameters(prefix: str, kind: str, vision: Config) -> Parameters:
    """Yield the parameters that compute states from an image's patches."""
    hidden, patch = vision["hidden_size"], vision["patch_size"]
    if kind == CLIP:
        yield Parameter(name=f"{prefix}.embeddings.class_embedding", shape=(hidden,))
    projection = f"{prefix}.embeddings.patch_embedding"
    yield Parameter(name=f"{projection}.weight", shape=(hidden, vision["num_channels"], patch, patch))
    if kind == SIGLIP_TOWER:
        yield Parameter(name=f"{projection}.bias", shape=(hidden,))
    table = f"{prefix}.embeddings.position_embedding.weight"
    yield Parameter(name=table, shape=(positions(kind, vision), hidden))
    if kind == CLIP:
        yield from norm(f"{prefix}.pre_layrnorm", hidden)


def wrong_tower(kind: str, vision: Config) -> str | None:
    """Return what is wrong with a vision tower's keys, or None."""
    for key in (*_LENGTHS, *_SIDES):
        if not isinstance(vision[key], int) or isinstance(vision[key], bool) or vision[key] < 1:
            return f"{VISION}: {not_a_length(key, vision[key])}"
    if vision["hidden_size"] % vision["num_attention_heads"]:
        width, heads = vision["hidden_size"], vision["num_attention_heads"]
        return f"{VISION}: hidden_size {width} is not a multiple of num_attention_heads {heads}"
    if vision["image_size"] < vision["patch_size"]:
        return f"{VISION}: image_size {vision['image_size']} is under patch_size {vision['patch_size']}"
    return None


def wrong_images(config: Config) -> str | None:
    """Return a message if the number of images of a sample is not valid, or None."""
    images = config[IMAGES]
    is_number = isinstance(images, int) and not isinstance(images, bool) and 1 <= images <= _MAX_IMAGES
    return None if is_number else f"{IMAGES} {images!r} is not a number from 1 to {_MAX_IMAGES}"


TEXT = "text_config"
"""The key under which the language model's keys are nested."""
TOWER, PROJECTOR = "vision", "projector"
"""Layer types of a vision tower's blocks, and of the projector that turns their states into states of a text."""
IMAGE_STATES = "image_states"
LANGUAGE = "model.language_model"
VISION_TOWER = "model.vision_tower"
PLACES = {TOWER: f"{VISION_TOWER}.encoder.layers.{{}}", PROJECTOR: "model.multi_modal_projector"}
"""Paths of a tower's blocks, and of a projector, in the stock model."""
_LAYER, _SELECTED = "vision_feature_layer", "vision_feature_select_strategy"
_TEXT_DEFAULTS = {
    **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "max_position_embeddings": 2048},
}


class Tower(Stack):
    """The vision tower's blocks up to the one whose hidden states are used, and the projector after them."""

    def layers(self, config: Config) -> Sequence[str]:
        """Return the types of the tower's blocks and of the projector."""
        return [TOWER] * self.taken(config) + [PROJECTOR]

    def numbers(self, config: Config) -> Sequence[Any]:
        """Return the number of the stack's blocks."""
        return (self.taken(config),)

    def taken(self, config: Config) -> int:
        """Return the number of tower blocks up to the one whose hidden states are used; later ones are not run."""
        return taken_blocks(config)

    def counted(self, layers: Sequence[str], config: Config) -> dict[str, Any]:
        """Return the key that counts the blocks of the tower, with its value."""
        return {self.counted_by: [base_type(layer) for layer in layers].count(TOWER)}


def taken_blocks(config: Config) -> int:
    """Return the number of tower blocks up to the one whose hidden states are used; later ones are not run."""
    blocks: int = _llava_tower(config)["num_hidden_layers"]
    taken: int = config[_LAYER]
    return taken if taken >= 0 else blocks + 1 + taken


def _llava_tower(config: Config) -> dict[str, Any]:
    return vision_of(config, vision_kind(config, CLIP))


def image_tokens(config: Config) -> int:
    """Return the number of a text's positions that an image takes."""
    kind, vision = vision_kind(config, CLIP), _llava_tower(config)
    return patches(vision) if config[_SELECTED] == "default" and kind == CLIP else positions(kind, vision)


def _states_positions(config: Config) -> int:
    return positions(vision_kind(config, CLIP), _llava_tower(config))


def multiplied_positions(layer: str, config: Config, patches: int, tokens: int) -> dict[str, int | None]:
    """Return the entry for the positions that a layer type's matrices multiply; `patches`, `tokens`: of one image."""
    each = {EMBEDDING: patches, PROJECTOR: tokens}.get(layer)
    return {MULTIPLIED: None if each is None else config[IMAGES] * each}


def _llava_parameters(layer: str, config: Config) -> Parameters:
    vision, hidden = _llava_tower(config), config["hidden_size"]
    kind, bias = vision_kind(config, CLIP), config["multimodal_projector_bias"]
    if layer == EMBEDDING:
        yield from vocabulary(f"{LANGUAGE}.embed_tokens.weight", config)
        yield from embedding_parameters(VISION_TOWER, kind, vision)
    elif layer == TOWER:
        yield from TOWERS[kind].parameters(BLOCK, vision)
    elif layer == PROJECTOR:
        yield from linear("linear_1", hidden, vision["hidden_size"], bias=bias)
        yield from linear("linear_2", hidden, hidden, bias=bias)
        # The norm of an image's class, which is not used here: files contain it.
        for part in ("weight", "bias"):
            name = f"post_layernorm.{part}"
            yield Parameter(name=name, shape=(vision["hidden_size"],), frozen=True, shared=True)
    elif layer == HEAD:
        yield from norm(f"{LANGUAGE}.norm", hidden, bias=False)
        yield from vocabulary("lm_head.weight", config)
    else:
        yield from LLAMA.parameters(layer, config)


def _llava_shapes(layer: str, config: Config) -> Config:
    vision = _llava_tower(config)
    shapes = multiplied_positions(layer, config, patches(vision), image_tokens(config))
    if layer == TOWER:
        shapes |= block_shapes(vision) | attended_positions(config, _states_positions(config))
    return shapes


def _wrong_llava(config: Config) -> str | None:
    """Return what is wrong with a model's parts (text and vision configurations), or None."""
    if config.get(VISION) is None:
        return f"{VISION} is missing"
    text = part_of(config, TEXT).get("model_type", "llama")
    if text != "llama":
        return f"{TEXT}: model_type {text!r} is not a language model of this family, only llama is"
    words, image = part_of(config, TEXT).get("vocab_size", _TEXT_DEFAULTS["vocab_size"]), config["image_token_index"]
    if words != config["vocab_size"]:
        return f"vocab_size {config['vocab_size']} is not the {words} of {TEXT}"
    if isinstance(words, int) and not (isinstance(image, int) and 0 <= image < words):
        return f"image_token_index {image} is not below vocab_size {words}"
    kind = vision_kind(config, CLIP)
    if kind not in TOWERS:
        return f"{VISION}: model_type {kind!r} is not one of {', '.join(TOWERS)}"
    if (wrong := wrong_tower(kind, _llava_tower(config)) or wrong_images(config)) is not None:
        return wrong
    taken, blocks = config[_LAYER], _llava_tower(config)["num_hidden_layers"]
    if not isinstance(taken, int) or isinstance(taken, bool):
        return f"{_LAYER} {taken!r} is not the number of one layer"
    if not 1 <= taken_blocks(config) <= blocks:
        return f"{_LAYER} {taken} does not take the states of one of {blocks} blocks"
    if config[_SELECTED] == "default" and not kind == CLIP:
        return f"{_SELECTED} default leaves out an image's class, which {kind} has not: use full"
    return None


_TIED = ((f"{LANGUAGE}.embed_tokens.weight", "lm_head.weight"),)
_WHOLE = {PROJECTOR: "image_positions"}
LLAVA = replace(
    LLAMA,
    model_type="llava",
    stock=traits.StockModel("LlavaForConditionalGeneration", _TIED, PLACES | {BLOCK: f"{LANGUAGE}.layers.{{}}"}),
    runtime="images:Llava",
    keys=traits.Keys(
        {
            **LLAMA.keys.defaults,
            **_TEXT_DEFAULTS,
            **{"image_token_index": 32000, "projector_hidden_act": "gelu", "multimodal_projector_bias": True},
            **{_LAYER: -2, _SELECTED: "default", IMAGES: 1},
        },
        lengths=LLAMA.keys.lengths,
        aliases={"image_token_id": "image_token_index"},
        nested=TEXT,
        wrong=_wrong_llava,
        ignored=("ignore_index", "vocab_size", IMAGES),
    ),
    parameters=_llava_parameters,
    stacks=(
        Tower(
            types=(TOWER, PROJECTOR),
            state=IMAGE_STATES,
            inside=VISION,
            resets={_LAYER: -1},
            merging=(PROJECTOR,),
            joined_by=PROJECTOR,
            length=lambda config: config[IMAGES] * _states_positions(config),
            features=lambda config: _llava_tower(config)["hidden_size"],
        ),
        Stack(features=lambda config: config["hidden_size"]),
    ),
    divided=LLAMA.divided._replace(sequence=_WHOLE),
    shapes=_llava_shapes,
    vision=Vision(
        lambda config: config[IMAGES] * image_tokens(config),
        tower=lambda layer, config: TOWERS[vision_kind(config, CLIP)] if layer == TOWER else None,
    ),
    systems=traits.Systems(),
)

PROJECTION = "mm_input_projection_weight"
_TOKENS = "mm_tokens_per_image"


class _WholeTower(Tower):
    """All blocks of the vision tower, and the projector after them."""

    def taken(self, config: Config) -> int:
        """Return the number of blocks that are used: all of them."""
        blocks: int = _gemma3_tower(config)["num_hidden_layers"]
        return blocks


def _gemma3_tower(config: Config) -> dict[str, Any]:
    return vision_of(config, SIGLIP_TOWER)


def _gemma3_parameters(layer: str, config: Config) -> Parameters:
    vision, hidden = _gemma3_tower(config), config["hidden_size"]
    if layer == EMBEDDING:
        yield from vocabulary(f"{LANGUAGE}.embed_tokens.weight", config)
        yield from embedding_parameters(VISION_TOWER, SIGLIP_TOWER, vision)
    elif layer == TOWER:
        yield from TOWERS[SIGLIP_TOWER].parameters(BLOCK, vision)
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


def _gemma3_shapes(layer: str, config: Config) -> Config:
    vision = _gemma3_tower(config)
    shapes = multiplied_positions(layer, config, patches(vision), config[_TOKENS])
    if layer == TOWER:
        shapes |= block_shapes(vision) | attended_positions(config, patches(vision))
    return shapes


def _wrong_gemma3(config: Config) -> str | None:
    """Return what is wrong with a model's parts (text and vision configurations), or None."""
    if config.get(VISION) is None:
        return f"{VISION} is missing"
    for key, known in ((TEXT, GEMMA3.model_type), (VISION, SIGLIP_TOWER)):
        if (kind := part_of(config, key).get("model_type", known)) != known:
            return f"{key}: model_type {kind!r} does not belong to this family, only {known} does"
    words, image = config["vocab_size"], config["image_token_index"]
    if isinstance(words, int) and not (isinstance(image, int) and 0 <= image < words):
        return f"image_token_index {image} is not below vocab_size {words}"
    return wrong_tower(SIGLIP_TOWER, _gemma3_tower(config)) or _wrong_pool(config) or wrong_images(config)


def _wrong_pool(config: Config) -> str | None:
    vision, tokens = _gemma3_tower(config), config[_TOKENS]
    side = vision["image_size"] // vision["patch_size"]
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        return not_a_length(_TOKENS, tokens)
    if isqrt(tokens) ** 2 != tokens or side % isqrt(tokens):
        return f"{_TOKENS} {tokens} are not a square that divides the {side} x {side} patches of an image"
    return None


GEMMA3_IMAGES = replace(
    GEMMA3,
    model_type="gemma3",
    stock=traits.StockModel(
        "Gemma3ForConditionalGeneration",
        _TIED,
        PLACES | dict.fromkeys((SLIDING, FULL), f"{LANGUAGE}.layers.{{}}"),
        matrices=(PROJECTION,),
    ),
    runtime="images:Gemma3Images",
    keys=GEMMA3.keys._replace(
        defaults={
            **GEMMA3.keys.defaults,
            **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_key_value_heads": 4},
            **{"image_token_index": 262144, _TOKENS: 256, IMAGES: 1},
        },
        aliases={
            name.replace("index", "id"): name for name in ("image_token_index", "boi_token_index", "eoi_token_index")
        },
        nested=TEXT,
        wrong=_wrong_gemma3,
        ignored=(*GEMMA3.keys.ignored, "image_seq_length", IMAGES),
    ),
    parameters=_gemma3_parameters,
    stacks=(
        _WholeTower(
            types=(TOWER, PROJECTOR),
            state=IMAGE_STATES,
            inside=VISION,
            merging=(PROJECTOR,),
            joined_by=PROJECTOR,
            length=lambda config: config[IMAGES] * patches(_gemma3_tower(config)),
            features=lambda config: _gemma3_tower(config)["hidden_size"],
        ),
        *(stack._replace(features=lambda config: config["hidden_size"]) for stack in GEMMA3.stacks),
    ),
    divided=GEMMA3.divided._replace(sequence=_WHOLE),
    attention=GEMMA3.attention._replace(images_ahead=True),
    shapes=_gemma3_shapes,
    vision=Vision(
        lambda config: config[IMAGES] * config[_TOKENS],
        tower=lambda layer, _: TOWERS[SIGLIP_TOWER] if layer == TOWER else None,
    ),
)
