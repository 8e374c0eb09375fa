"""Gemma 3n with images: a trace of its text model and its embedders, and stored figures of its convolutional tower.

The tower (MobileNet-V5, Gemma team 2025) comes from the package timm, which is not needed here. It is one layer before
the blocks, together with the modules that embed images, and tokens in the places of images and sound.
"""

from collections.abc import Mapping
from typing import Any

import torch
from msgspec import UNSET
from msgspec.structs import replace
from torch import Tensor, nn
from transformers import Gemma3nAudioConfig, Gemma3nConfig, Gemma3nTextConfig, Gemma3nVisionConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nMultimodalEmbedder

from shardwright.models.alike import TEXT_KEY, TOWER_KEY
from shardwright.models.families.llava import IMAGES, LANGUAGE, TOWER, VISION_TOWER, wrong_images
from shardwright.types import EMBEDDING, LayerType, Model, Parameter
from shardwright.types.model import Traced
from shardwright_train.models.configuration import keys_of
from shardwright_train.models.operators import Trace
from shardwright_train.models.stock import refusals
from shardwright_train.models.traced import UNDIVIDED, check_keys, describe_by_trace
from shardwright_train.parallel.data import default_dtype
from shardwright_train.torch_private import FakeTensorMode

GEMMA3N = "gemma3n"
_AUDIO, _TOKENS = "audio_config", "vision_soft_tokens_per_image"
_FIXED = {"architecture": "mobilenetv5_300m_enc", "hidden_size": 2048, "model_args": None}
"""Keys of a vision_config that decide the tower's shapes, with their values in all published models."""
IMAGE_TOKENS, SIDE = 256, 768
"""Number of tokens of an image, and its height and width in pixels."""
TOWER_PARTS: Mapping[str, int] = {
    "conv_stem": 1_856,
    "blocks.0": 1_492_608,
    "blocks.1": 2_439_168,
    "blocks.2": 63_407_744,
    "blocks.3": 211_540_480,
    "msfa": 15_245_056,
}
"""Number of parameters of each part of the tower (timm 1.0.31, `mobilenetv5_300m_enc`), described as one column."""
TOWER_TRACED = Traced(
    product_flops=775_676_657_664,
    attention_flops=95_806_291_968,
    multiplied=293_841_536,
    kept=1_765_577_731,
    kept_bytes=1_474_117_632,
    products=842_158_080,
    widest=29_203_200,
    kernels=2_134,
)
"""A trace of the tower of timm 1.0.31 for one image; its attention to keys of one head has no fused kernel."""


def describe_gemma3n(config: Mapping[str, Any], name: str, sequence_length: int) -> tuple[Model, tuple[str, ...]]:
    """Return a description of a config.json's model, for samples of a length including images, and what it assumes.

    Raises ValueError saying what does not fit, or what cannot be built or traced.
    """
    config = {IMAGES: 1, **config}
    _check(config, sequence_length)
    images = config[IMAGES]
    text = describe_by_trace({"model_type": "gemma3n_text", **config[TEXT_KEY]}, name, sequence_length)
    layer = _vision(config, text, images)
    types = {kind: _within(each) for kind, each in text.types.items()}
    model = replace(
        text,
        family=GEMMA3N,
        config={**config, TEXT_KEY: text.config},
        layers=(TOWER, *text.layers),
        types={EMBEDDING: types.pop(EMBEDDING), TOWER: layer, **types},
        tied=tuple((_renamed(one), _renamed(other)) for one, other in text.tied),
    )
    return model, (
        f"images are taken to have {SIDE} x {SIDE} pixels: {IMAGE_TOKENS} tokens of the text; {images} in each sample "
        f"({IMAGES}); the tower is one layer",
        f"samples have no sound: the tower of {_AUDIO} is left out",
        "inputs of each block, and keys and values that blocks share, are not in messages between pipeline stages",
    )


def _check(config: Mapping[str, Any], length: int) -> None:
    """Raise ValueError if a part of a configuration is missing, or belongs to a model without stored figures."""
    check_keys(config, keys_of(Gemma3nConfig) | {IMAGES})
    parts = {TEXT_KEY: "gemma3n_text", TOWER_KEY: "gemma3n_vision", _AUDIO: "gemma3n_audio"}
    for key, kind in parts.items():
        if not isinstance(part := config.get(key, None if key == TEXT_KEY else {}), Mapping):
            raise ValueError(f"{key} is missing, or not an object")
        if (given := part.get("model_type", kind)) != kind:
            raise ValueError(f"{key}: model_type {given!r} does not belong to this family, only {kind} does")
    vision = config.get(TOWER_KEY, {})
    check_keys(vision, keys_of(Gemma3nVisionConfig))
    for key, known in _FIXED.items():
        if (given := vision.get(key, known)) not in (known, {}):
            raise ValueError(f"{TOWER_KEY}: {key} {given!r} is not supported, only {known!r} is")
    if (tokens := config.get(_TOKENS, IMAGE_TOKENS)) != IMAGE_TOKENS:
        raise ValueError(f"{_TOKENS} {tokens!r} is not {IMAGE_TOKENS}, the number of tokens that the tower outputs")
    if (problem := wrong_images(config)) is not None:
        raise ValueError(problem)
    if length < (least := config[IMAGES] * IMAGE_TOKENS + 1):
        raise ValueError(f"sequence length {length} is under {least}: those of images, and of a text")


class Embedders(nn.Module):
    """What the stock model does with states of tokens [samples, positions, features] before its text model's layers."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        text = Gemma3nTextConfig(**_keys(config, TEXT_KEY))
        self.embed_vision = Gemma3nMultimodalEmbedder(Gemma3nVisionConfig(**_keys(config, TOWER_KEY)), text)
        self.embed_audio = Gemma3nMultimodalEmbedder(Gemma3nAudioConfig(**_keys(config, _AUDIO)), text)

    def forward(self, tokens: Tensor, states: Tensor, images: Tensor, places: Tensor) -> Tensor:
        """Return the states with the states of `images` [images, tokens of each, features] in their places."""
        for embedder in (self.embed_vision, self.embed_audio):
            # A token that is not this embedder's looks up the last row, whose result is dropped.
            is_own = tokens >= embedder.vocab_offset
            row = torch.where(is_own, tokens, embedder.vocab_offset + embedder.vocab_size - 1)
            states = torch.where(is_own.unsqueeze(-1), embedder(input_ids=row), states)
        found = self.embed_vision(inputs_embeds=images * images.shape[-1] ** 0.5)
        return states.masked_scatter(places.unsqueeze(-1), found)


def _keys(config: Mapping[str, Any], part: str) -> dict[str, Any]:
    return {key: value for key, value in config.get(part, {}).items() if key not in ("model_type", "dtype")}


def _vision(config: Mapping[str, Any], text: Model, images: int) -> LayerType:
    """Return the layer of the tower and the embedders, which passes on the text's states."""
    length, (outputs,) = text.sequence_length, text.types[EMBEDDING].outputs
    trace = Trace()
    with default_dtype(torch.bfloat16), FakeTensorMode(), refusals():
        module = Embedders(config)
        states = torch.zeros(1, length, module.embed_vision.text_hidden_size, requires_grad=True)
        found = torch.zeros(images, IMAGE_TOKENS, module.embed_vision.multimodal_hidden_size, requires_grad=True)
        tokens = torch.zeros(1, length, dtype=torch.long)
        places = torch.zeros(1, length, dtype=torch.bool)
        trace.begin(TOWER, module)
        with trace.watching():
            module(tokens, states, found, places)
        seen = trace.seen[TOWER].counted()
        own = tuple(Parameter(name=f"model.{key}", shape=tuple(p.shape)) for key, p in module.named_parameters())
    tower = tuple(
        Parameter(name=f"{VISION_TOWER}.timm_model.{part}", shape=(size, 1)) for part, size in TOWER_PARTS.items()
    )
    traced = _together(TOWER_TRACED, images, seen)
    one_rank = {UNDIVIDED: 1}
    return LayerType(
        parameters=(*tower, *own),
        forward_flops_per_sample=traced.product_flops + traced.attention_flops,
        tp_must_divide=one_rank,
        ulysses_must_divide=one_rank,
        sequence_must_divide=one_rank,
        outputs=(outputs,),
        traced=traced,
    )


def _together(tower: Traced, images: int, embedders: Traced) -> Traced:
    """Return the sum of the figures of a tower's pass over `images` images, and of the embedders after it."""
    each = ("product_flops", "attention_flops", "kept", "kept_bytes", "products")
    sums = {key: images * getattr(tower, key) + getattr(embedders, key) for key in each}
    sums |= {key: getattr(tower, key) + getattr(embedders, key) for key in ("multiplied", "kernels")}
    return Traced(**sums, widest=max(images * tower.widest, embedders.widest))


def _within(layer: LayerType) -> LayerType:
    """Return a layer of the text model, with its parameters and its path named as in the whole model."""
    traced = layer.traced if layer.traced is UNSET else replace(layer.traced, path=_renamed(layer.traced.path))
    parameters = tuple(replace(p, name=_renamed(p.name)) for p in layer.parameters)
    return replace(layer, parameters=parameters, traced=traced)


def _renamed(name: str) -> str:
    return name.replace("model.", f"{LANGUAGE}.", 1) if name.startswith("model.") else name
