"""Tiny configurations of models that read images and a text, and what their stock models give."""

from typing import Any

import torch
from torch import Tensor

from shardwright_train.data.share import Batch

MULTI_MODAL: dict[str, dict[str, Any]] = {
    "llava": {
        "model_type": "llava",
        "image_token_index": 60,
        "text_config": {
            "model_type": "llama",
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 12,
            "patch_size": 4,
        },
    },
    "gemma3": {
        "model_type": "gemma3",
        "image_token_index": 60,
        "mm_tokens_per_image": 4,
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 8,
            "rope_local_base_freq": 500.0,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
            "vision_use_head": False,
        },
    },
}

MULTI_MODAL["mistral3"] = {
    "model_type": "mistral3",
    "image_token_index": 60,
    "text_config": {
        **{key: value for key, value in MULTI_MODAL["llava"]["text_config"].items() if key != "model_type"},
        **{"model_type": "mistral", "head_dim": 4, "sliding_window": None},
    },
    "vision_config": {
        **{"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "image_size": 64, "patch_size": 4},
    },
    "pixels_per_side": 16,
}

SEVERAL: dict[str, dict[str, Any]] = {
    "llava": {"images_per_sample": 2, "vision_config": {**MULTI_MODAL["llava"]["vision_config"], "image_size": 8}},
    "gemma3": {"images_per_sample": 3},
    "mistral3": {"images_per_sample": 3},
}
"""Changes to them by which samples have several images."""


def logits_of_images(stock: Any, batch: Batch) -> Tensor:
    """Logits of texts with images: stock takes these for texts that have one, and for no others."""
    inside = batch["tokens"] == stock.config.image_token_index
    pixels, images_of = batch["pixel_values"], inside.any(1, keepdim=True).long()
    is_gemma = stock.config.model_type == "gemma3"
    if pixels.ndim > 4:
        images_of = inside.sum(1, keepdim=True) // (
            stock.config.mm_tokens_per_image if is_gemma else stock.config.image_seq_length
        )
    else:
        pixels = pixels[:, None]
    there = torch.arange(pixels.shape[1]) < images_of
    images = {"pixel_values": pixels[there].to(stock.dtype)} if inside.any() else {}
    if images and stock.config.model_type == "mistral3":
        images["image_sizes"] = torch.tensor([pixels.shape[-2:]] * int(there.sum()))
    if is_gemma:
        images["token_type_ids"] = inside.long()
    logits: Tensor = stock(batch["tokens"], **images).logits
    return logits
