"""Models of images and text: a vision tower's blocks, a merger of neighbouring patches, and a language model's blocks.

Mistral Small 3.1 (Mistral AI 2025), Llama 4 (Meta 2025), Qwen3-VL (Qwen team 2025), GLM-4.1V (GLM-V team 2025). Most of
their towers accept images of any size; here all images of a model have one size, which `pixels_per_side` sets.
"""

from collections.abc import Callable, Mapping
from math import isqrt
from typing import Any, NamedTuple

from msgspec.structs import replace

from shardwright.models import traits
from shardwright.models.config_keys import is_length, is_number, not_a_length
from shardwright.models.facts import Family, Vision
from shardwright.models.families.images import SIGLIP, VISION
from shardwright.models.families.llama import MISTRAL, QWEN3
from shardwright.models.families.llama4 import LLAMA4
from shardwright.models.families.llava import (
    IMAGE_STATES,
    IMAGES,
    LANGUAGE,
    PROJECTOR,
    TEXT,
    TOWER,
    Tower,
    attended_positions,
    block_shapes,
    multiplied_positions,
    part_of,
    wrong_images,
    wrong_tower,
)
from shardwright.models.families.stacked import GLM4
from shardwright.models.parameters import Parameters, gated, linear, norm
from shardwright.models.traits import BLOCK, Config, Keys, Only, Stack
from shardwright.types import EMBEDDING, HEAD, Parameter

SIDE = "pixels_per_side"
"""The key, which transformers does not have, of the height and width of every image, in pixels."""
_MAX_SIDE = 1 << 14
_VISUAL = "model.visual"
_RATIO, _DEEPSTACK = "pixel_shuffle_ratio", "deepstack_visual_indexes"
Parts = Callable[[Config], Parameters]


class Merged(NamedTuple):
    """A vision tower in which each square of neighbouring patches becomes one token of the text."""

    facts: Family
    """Facts of the tower's blocks, by the keys of the vision_config."""
    place: str
    """Path of the tower's blocks in the stock model."""
    projector: str
    """Path that precedes the names in `merger`."""
    embedding: Parts
    """Function that returns the tower's parameters before its blocks, from the keys of the vision_config."""
    merger: Callable[[Config, Config], Parameters]
    """Function that returns the tower's parameters after its blocks, from the keys of the vision_config and of the
    model."""
    side: Callable[[Config], int]
    """Function that returns an image's height and width in pixels if the file does not state them."""
    merged: Callable[[Config, Config], int]
    """Function that returns the side of the square in patches, from the keys of the vision_config and of the model."""
    further: int = 0
    """Number of positions in addition to the patches."""
    inner: str = "intermediate_size"
    """The key of a block's feed-forward features."""
    is_fixed: bool = False
    """Whether the tower accepts images of one size only."""

    def vision(self, config: Config) -> dict[str, Any]:
        """Return the keys of the tower's configuration, with defaults."""
        return self.facts.configured(part_of(config, VISION))

    def pixels(self, config: Config) -> int:
        """Return the height and width of an image in pixels."""
        side: int = config.get(SIDE) or self.side(self.vision(config))
        return side

    def patches(self, config: Config) -> int:
        """Return the number of patches of an image."""
        side: int = self.pixels(config) // self.vision(config)["patch_size"]
        return side * side

    def tokens(self, config: Config) -> int:
        """Return the number of a text's positions that an image takes."""
        return self.patches(config) // self.merged(self.vision(config), config) ** 2

    def positions(self, config: Config) -> int:
        """Return the number of positions of an image's states in the tower."""
        return self.patches(config) + self.further

    def assumed(self, config: Config) -> str:
        """Return what a plan assumes about the images of a sample, in words."""
        side, keys = self.pixels(config), IMAGES if self.is_fixed else f"{SIDE}, {IMAGES}"
        return (
            f"images are taken to have {side} x {side} pixels: {self.patches(config)} patches in the tower, "
            f"{self.tokens(config)} tokens of the text; {config[IMAGES]} in each sample ({keys})"
        )

    def wrong(self, config: Config) -> str | None:
        """Return what is wrong with a model's tower and images, or None."""
        if config.get(VISION) is None:
            return f"{VISION} is missing"
        vision, kind = self.vision(config), self.facts.model_type
        if (given := part_of(config, VISION).get("model_type", kind)) not in (kind, config.get("model_type")):
            return f"{VISION}: model_type {given!r} does not belong to this family, only {kind} does"
        for key, default in self.facts.keys.defaults.items():
            if isinstance(default, int) and not isinstance(default, bool) and not is_length(vision[key]):
                return f"{VISION}: {not_a_length(key, vision[key])}"
        sizes = {"image_size": vision["patch_size"], **vision, "num_channels": 1}
        if (problem := wrong_tower(kind, sizes) or wrong_images(config)) is not None:
            return problem
        if not isinstance(blocks := vision.get(_DEEPSTACK, ()), list | tuple):
            return f"{VISION}: {_DEEPSTACK} {blocks!r} is not a list of blocks"
        if not is_length(pixels := config.get(SIDE, 1)) or pixels > _MAX_SIDE:
            return not_a_length(SIDE, pixels)
        if self.is_fixed and SIDE in config and config[SIDE] != self.side(vision):
            return f"{SIDE} {config[SIDE]} is not the {self.side(vision)} of {VISION}, which its positions are of"
        if not is_number(ratio := vision.get(_RATIO, 1)) or not 0 < ratio <= 1:
            return f"{VISION}: {_RATIO} {ratio!r} is not a part of 1"
        if not is_length(merged := self.merged(vision, config)):
            return not_a_length("spatial_merge_size", merged)
        if (side := self.pixels(config)) % (unit := vision["patch_size"] * merged):
            return f"{SIDE} {side} is not a multiple of {unit}, the pixels of a token"
        return None


def _blocks(tower: Merged, counted_by: str) -> Tower:
    """Return the stack of all blocks of a tower, followed by its merger."""

    class Blocks(Tower):
        def taken(self, config: Config) -> int:
            blocks: int = tower.vision(config)["num_hidden_layers"]
            return blocks

    return Blocks(
        counted_by=counted_by,
        types=(TOWER, PROJECTOR),
        state=IMAGE_STATES,
        inside=VISION,
        merging=(PROJECTOR,),
        joined_by=PROJECTOR,
        length=lambda config: config[IMAGES] * tower.positions(config),
        features=lambda config: tower.vision(config)["hidden_size"],
    )


def _facts(
    kind: str, block: Parts, *, gates: bool, rms: bool, defaults: Config, aliases: Config | None = None
) -> Family:
    """Return the facts of a tower's blocks, whose queries and keys are rotated by the positions of patches."""
    return replace(
        SIGLIP,
        model_type=kind,
        keys=Keys({"attention_dropout": 0.0, **defaults}, lengths=(), aliases=aliases or {}),
        parameters=lambda _layer, config: block(config),
        attention=SIGLIP.attention._replace(positions="rope"),
        norm=traits.Norm("RMSNorm" if rms else "LayerNorm", None, ends=()),
        feed_forward=lambda config: traits.FeedForward(config["hidden_act"], gated=gates),
    )


def _with_tower(
    text: Family,
    tower: Merged,
    *,
    model_type: str,
    stock: str,
    defaults: Config,
    aliases: Config | None = None,
    language: str = LANGUAGE,
    head: str = "lm_head",
    ignored: tuple[str, ...] = (),
    only: Mapping[str, Only] | None = None,
    runtime: str = "",
    untrained: str | None = None,
    **changed: Any,
) -> Family:
    """Return the facts of a model whose text uses a family's blocks, and whose images go through a tower.

    `language` and `head`: paths of the language model and of its last matrix in the stock model.
    """

    def parameters(layer: str, config: Config) -> Parameters:
        vision = tower.vision(config)
        if layer == TOWER:
            yield from tower.facts.parameters(BLOCK, vision)
        elif layer == PROJECTOR:
            yield from tower.merger(vision, config)
        else:
            for p in text.parameters(layer, config):
                yield replace(p, name=_renamed(p.name, language, head)) if layer in (EMBEDDING, HEAD) else p
            yield from tower.embedding(vision) if layer == EMBEDDING else ()

    def shapes(layer: str, config: Config) -> Config:
        given = dict(multiplied_positions(layer, config, tower.patches(config), tower.tokens(config)))
        given |= text.shapes(layer, config)
        if layer == TOWER:
            vision = tower.vision(config)
            inner = dict.fromkeys({"intermediate_size", text.divided.lengths[-1]}, vision[tower.inner])
            given |= block_shapes(vision) | inner | attended_positions(config, tower.positions(config))
        return given

    # The tower's lengths have the names of the text's lengths.
    of_tower = replace(tower.facts, divided=text.divided)
    places = {TOWER: f"{tower.place}.{{}}", PROJECTOR: tower.projector}
    places |= dict.fromkeys((kind for stack in text.stacks for kind in stack.types), f"{language}.layers.{{}}")
    counted_by = tower.facts.keys.aliases.get("num_hidden_layers", "num_hidden_layers")
    tied = tuple((_renamed(one, language, head), _renamed(other, language, head)) for one, other in text.stock.tied)
    return replace(
        text,
        model_type=model_type,
        stock=text.stock._replace(name=stock, tied=tied, places=places, module=None),
        runtime=runtime,
        untrained=untrained,
        keys=text.keys._replace(
            defaults={**text.keys.defaults, **defaults, IMAGES: 1},
            nested=TEXT,
            aliases=aliases or {},
            wrong=lambda config: text.keys.wrong(config) or tower.wrong(config),
            ignored=(*text.keys.ignored, *ignored, IMAGES, SIDE),
            only={**text.keys.only, **(only or {})},
        ),
        parameters=parameters,
        stacks=(
            _blocks(tower, counted_by),
            *(stack._replace(features=lambda config: config["hidden_size"]) for stack in text.stacks),
        ),
        divided=text.divided._replace(sequence=dict.fromkeys((TOWER, PROJECTOR), "image_positions")),
        shapes=shapes,
        vision=Vision(
            lambda config: config[IMAGES] * tower.tokens(config),
            tower=lambda layer, _: of_tower if layer == TOWER else None,
            assumed=tower.assumed,
        ),
        systems=traits.Systems(),
        **changed,
    )


def _renamed(name: str, language: str, head: str) -> str:
    """Return a parameter's name in a model of which the text is a part."""
    first, _, rest = name.partition(".")
    return f"{ {'model': language, 'lm_head': head}[first] }.{rest}"


def _image_size(vision: Config) -> int:
    side: int = vision["image_size"]
    return side


def _pixtral_block(vision: Config) -> Parameters:
    hidden = vision["hidden_size"]
    yield from norm("attention_norm", hidden, bias=False)
    yield from gated("feed_forward", hidden, vision["intermediate_size"])
    for name in ("k", "v", "q"):
        yield from linear(f"attention.{name}_proj", hidden, hidden, "columns")
    yield from linear("attention.o_proj", hidden, hidden, "rows")
    yield from norm("ffn_norm", hidden, bias=False)


def _pixtral_patches(vision: Config) -> Parameters:
    hidden, patch = vision["hidden_size"], vision["patch_size"]
    yield Parameter(name="model.vision_tower.patch_conv.weight", shape=(hidden, vision["num_channels"], patch, patch))
    yield from norm("model.vision_tower.ln_pre", hidden, bias=False)


def _mistral3_projector(vision: Config, config: Config) -> Parameters:
    width, hidden, bias = vision["hidden_size"], config["hidden_size"], config["multimodal_projector_bias"]
    yield from norm("norm", width, bias=False)
    yield from linear("patch_merger.merging_layer", width, width * config["spatial_merge_size"] ** 2)
    yield from linear("linear_1", hidden, width, bias=bias)
    yield from linear("linear_2", hidden, hidden, bias=bias)


PIXTRAL = Merged(
    _facts(
        "pixtral",
        _pixtral_block,
        gates=True,
        rms=True,
        defaults={
            **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
            **{"num_channels": 3, "image_size": 1540, "patch_size": 14, "hidden_act": "gelu"},
        },
    ),
    "model.vision_tower.transformer.layers",
    "model.multi_modal_projector",
    _pixtral_patches,
    _mistral3_projector,
    side=_image_size,
    merged=lambda _, config: config["spatial_merge_size"],
)
# Mistral Small 3.1, 3.2 and models of their form.
MISTRAL3 = _with_tower(
    MISTRAL,
    PIXTRAL,
    model_type="mistral3",
    stock="Mistral3ForConditionalGeneration",
    defaults={
        **{"vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072},
        **{"rms_norm_eps": 1e-5, "sliding_window": None, "tie_word_embeddings": True},
        **{"image_token_index": 10, "projector_hidden_act": "gelu", "multimodal_projector_bias": False},
        **{"spatial_merge_size": 2, "vision_feature_layer": -1},
    },
    aliases={"image_token_id": "image_token_index"},
    runtime="images:Mistral3",
    only={"vision_feature_layer": Only(-1, "the states of all blocks are projected")},
)


def _llama4_block(vision: Config) -> Parameters:
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    for name in ("q", "k", "v"):
        yield from linear(f"self_attn.{name}_proj", hidden, hidden, "columns", bias=True)
    yield from linear("self_attn.o_proj", hidden, hidden, "rows", bias=True)
    yield from linear("mlp.fc1", inner, hidden, "columns", bias=True)
    yield from linear("mlp.fc2", hidden, inner, "rows", bias=True)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield from norm(name, hidden)


def _llama4_patches(vision: Config) -> Parameters:
    hidden, side = vision["hidden_size"], vision["image_size"] // vision["patch_size"]
    yield Parameter(name="vision_model.class_embedding", shape=(hidden,))
    yield Parameter(name="vision_model.positional_embedding_vlm", shape=(side * side + 1, hidden))
    pixels = vision["num_channels"] * vision["patch_size"] ** 2
    yield from linear("vision_model.patch_embedding.linear", hidden, pixels)
    yield from norm("vision_model.layernorm_pre", hidden)


def _llama4_adapter(vision: Config, config: Config) -> Parameters:
    inner, outputs = vision["projector_input_dim"], vision["projector_output_dim"]
    yield from norm("vision_model.layernorm_post", vision["hidden_size"])
    yield from linear("vision_model.vision_adapter.mlp.fc1", inner, vision["intermediate_size"])
    yield from linear("vision_model.vision_adapter.mlp.fc2", outputs, outputs)
    yield from linear("multi_modal_projector.linear_1", config["hidden_size"], vision["vision_output_dim"])


LLAMA4_IMAGES = _with_tower(
    LLAMA4,
    Merged(
        _facts(
            "llama4_vision_model",
            _llama4_block,
            gates=False,
            rms=False,
            defaults={
                **{"hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16},
                **{"num_channels": 3, "image_size": 448, "patch_size": 14, "hidden_act": "gelu"},
                **{_RATIO: 0.5, "vision_output_dim": 7680},
                **{"projector_input_dim": 4096, "projector_output_dim": 4096},
            },
        ),
        "vision_model.model.layers",
        "",
        _llama4_patches,
        _llama4_adapter,
        side=_image_size,
        merged=lambda vision, _: round(1 / vision[_RATIO]),
        further=1,
        is_fixed=True,
    ),
    model_type="llama4",
    stock="Llama4ForConditionalGeneration",
    defaults={
        **{"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "image_token_index": 200092},
        "use_qk_norm": True,
    },
    aliases={name.replace("index", "id"): name for name in ("image_token_index", "boi_token_index", "eoi_token_index")},
    language="language_model.model",
    head="language_model.lm_head",
    ignored=("vision_feature_layer",),
    untrained="its tower's class position, adapter and complex rotations have no runtime here",
)
_DEPTH = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
_PATCHES = {"in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}


def _fused(name: str, hidden: int, bias: bool) -> Parameters:
    """Yield the parameters of queries, keys and values in one matrix."""
    yield Parameter(name=f"{name}.weight", shape=(3, hidden, hidden), tp_dim=1)
    if bias:
        yield Parameter(name=f"{name}.bias", shape=(3, hidden), tp_dim=1)


def _qwen3_block(vision: Config) -> Parameters:
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    for name in ("norm1", "norm2"):
        yield from norm(name, hidden)
    yield from _fused("attn.qkv", hidden, bias=True)
    yield from linear("attn.proj", hidden, hidden, "rows", bias=True)
    yield from linear("mlp.linear_fc1", inner, hidden, "columns", bias=True)
    yield from linear("mlp.linear_fc2", hidden, inner, "rows", bias=True)


def _volumes(vision: Config, name: str) -> Parameters:
    """Yield the parameters of the convolution over patches of consecutive images."""
    hidden, patch = vision["hidden_size"], vision["patch_size"]
    shape = (hidden, vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    yield Parameter(name=f"{name}.weight", shape=shape)
    yield Parameter(name=f"{name}.bias", shape=(hidden,))


def _qwen3_patches(vision: Config) -> Parameters:
    yield from _volumes(vision, f"{_VISUAL}.patch_embed.proj")
    shape = (vision["num_position_embeddings"], vision["hidden_size"])
    yield Parameter(name=f"{_VISUAL}.pos_embed.weight", shape=shape)


def _qwen3_mergers(vision: Config, _config: Config) -> Parameters:
    """Yield the parameters of the merger after the last block, and of mergers after earlier blocks (deepstack)."""
    hidden = vision["hidden_size"]
    width = hidden * vision["spatial_merge_size"] ** 2
    further = tuple(f"deepstack_merger_list.{i}" for i in range(len(vision[_DEEPSTACK])))
    for path in ("merger", *further):
        yield from norm(f"{path}.norm", hidden if path == "merger" else width)
        yield from linear(f"{path}.linear_fc1", width, width, bias=True)
        yield from linear(f"{path}.linear_fc2", vision["out_hidden_size"], width, bias=True)


def _square(vision: Config) -> int:
    """Return the side in pixels of a square image whose patches each have a row in the table of positions."""
    side: int = isqrt(vision["num_position_embeddings"]) * vision["patch_size"]
    return side


QWEN3_VL = _with_tower(
    replace(QWEN3, stacks=(Stack(),), attention=QWEN3.attention._replace(window=None)),
    Merged(
        _facts(
            "qwen3_vl_vision",
            _qwen3_block,
            gates=False,
            rms=False,
            defaults={
                **{"hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16, "patch_size": 16},
                **{"hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 2304, "out_hidden_size": 3584},
                **{**_PATCHES, _DEEPSTACK: (8, 16, 24)},
            },
            aliases=_DEPTH,
        ),
        f"{_VISUAL}.blocks",
        _VISUAL,
        _qwen3_patches,
        _qwen3_mergers,
        side=_square,
        merged=lambda vision, _: vision["spatial_merge_size"],
    ),
    model_type="qwen3_vl",
    stock="Qwen3VLForConditionalGeneration",
    defaults={
        **{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 128000},
    },
    untrained="states of several of its tower's blocks are added to those of the text's first blocks (deepstack)",
)


def _glm4v_block(vision: Config) -> Parameters:
    hidden = vision["hidden_size"]
    for name in ("norm1", "norm2"):
        yield from norm(name, hidden, bias=False)
    yield from _fused("attn.qkv", hidden, bias=vision["attention_bias"])
    yield from linear("attn.proj", hidden, hidden, "rows")
    yield from gated("mlp", hidden, vision["out_hidden_size"])


def _glm4v_patches(vision: Config) -> Parameters:
    hidden, side = vision["hidden_size"], vision["image_size"] // vision["patch_size"]
    yield Parameter(name=f"{_VISUAL}.embeddings.position_embedding.weight", shape=(side * side, hidden))
    yield from _volumes(vision, f"{_VISUAL}.patch_embed.proj")
    yield from norm(f"{_VISUAL}.post_conv_layernorm", hidden, bias=False)


def _glm4v_merger(vision: Config, _config: Config) -> Parameters:
    hidden, outputs, inner = vision["hidden_size"], vision["out_hidden_size"], vision["intermediate_size"]
    merged = vision["spatial_merge_size"]
    yield from linear("merger.proj", outputs, outputs)
    yield from norm("merger.post_projection_norm", outputs)
    for name in ("gate_proj", "up_proj"):
        yield from linear(f"merger.{name}", inner, outputs)
    yield from linear("merger.down_proj", outputs, inner)
    yield Parameter(name="downsample.weight", shape=(outputs, hidden, merged, merged))
    yield Parameter(name="downsample.bias", shape=(outputs,))
    yield from norm("post_layernorm", hidden, bias=False)


GLM4V = _with_tower(
    GLM4,
    Merged(
        _facts(
            "glm4v_vision",
            _glm4v_block,
            gates=True,
            rms=True,
            defaults={
                **{"hidden_size": 1536, "intermediate_size": 13696, "depth": 24, "num_heads": 12, "image_size": 336},
                **{"patch_size": 14, "hidden_act": "silu", "attention_bias": False, "out_hidden_size": 4096},
                **_PATCHES,
            },
            aliases=_DEPTH,
        ),
        f"{_VISUAL}.blocks",
        _VISUAL,
        _glm4v_patches,
        _glm4v_merger,
        side=_image_size,
        merged=lambda vision, _: vision["spatial_merge_size"],
        inner="out_hidden_size",
    ),
    model_type="glm4v",
    stock="Glm4vForConditionalGeneration",
    defaults={
        **{"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40},
        **{"num_attention_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "head_dim": None},
    },
    ignored=("partial_rotary_factor",),
    untrained="positions of its text have three numbers, which depend on where each image lies",
)
