"""Image classifiers: patches instead of tokens, and one class for each image.

ViT (Dosovitskiy et al. 2021) predicts the class from an additional position; SigLIP's vision tower (Zhai et al. 2023)
from the mean of all patches.
"""

from collections.abc import Sequence

from shardwright.models import traits
from shardwright.models.facts import Family, Vision
from shardwright.models.parameters import Parameters, linear, norm
from shardwright.models.traits import BLOCK, Config, Stack
from shardwright.types import EMBEDDING, HEAD, Parameter


def _vit_parameters(layer: str, config: Config) -> Parameters:
    hidden, inner, patch = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    if layer == EMBEDDING:
        yield Parameter(name="vit.embeddings.cls_token", shape=(1, 1, hidden))
        yield Parameter(name="vit.embeddings.position_embeddings", shape=(1, _patches(config) + 1, hidden))
        projection = "vit.embeddings.patch_embeddings.projection"
        yield Parameter(name=f"{projection}.weight", shape=(hidden, config["num_channels"], patch, patch))
        yield Parameter(name=f"{projection}.bias", shape=(hidden,))
    elif layer == HEAD:
        yield from norm("vit.layernorm", hidden)
        yield from linear("classifier", config["num_labels"], hidden, "columns", bias=True)
    else:
        for name in ("q", "k", "v"):
            yield from linear(f"attention.{name}_proj", hidden, hidden, "columns", config["qkv_bias"])
        yield from linear("attention.o_proj", hidden, hidden, "rows", bias=True)
        for name in ("layernorm_before", "layernorm_after"):
            yield from norm(name, hidden)
        yield from linear("mlp.fc1", inner, hidden, "columns", bias=True)
        yield from linear("mlp.fc2", hidden, inner, "rows", bias=True)


def grid(config: Config) -> tuple[int, int]:
    """Return the height and width of an image in patches; its size is one length, or height and width."""
    (height, width), (patch_height, patch_width) = sides(config["image_size"]), sides(config["patch_size"])
    return height // patch_height, width // patch_width


def _patches(config: Config) -> int:
    height, width = grid(config)
    return height * width


def sides(size: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width; a single number is used for both."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width


VIT = Family(
    model_type="vit",
    stock=traits.StockModel("ViTForImageClassification", tied=(), places={BLOCK: "vit.layers.{}"}),
    runtime="images:ViT",
    keys=traits.Keys(
        {"hidden_act": "gelu", "hidden_dropout_prob": 0.0, "num_channels": 3, "num_labels": 2, "qkv_bias": True},
        lengths=("image_size", "patch_size", "num_channels", "num_labels"),
        ignored=("num_labels",),
    ),
    parameters=_vit_parameters,
    stacks=(Stack(),),
    # The head uses position 0, which only one rank has under Ulysses.
    divided=traits.Divided(("num_attention_heads", "intermediate_size"), ulysses={HEAD: "pooled_positions"}),
    attention=traits.AttentionFacts(traits.Mask.NONE, "learned_absolute"),
    norm=traits.Norm("LayerNorm", "layer_norm_eps", ends=()),
    feed_forward=lambda config: traits.FeedForward(config["hidden_act"], gated=False),
    dropouts=traits.Dropouts(attention="attention_probs_dropout_prob", hidden="hidden_dropout_prob", ends=("full",)),
    vision=Vision(lambda config: _patches(config) + 1, without_input=1),
)

VISION = "vision_config"
"""The key under which the vision tower's keys are nested; keys of a text tower are not used."""


def _siglip_parameters(layer: str, config: Config) -> Parameters:
    hidden, inner, embeddings = config["hidden_size"], config["intermediate_size"], "vision_model.embeddings"
    if layer == EMBEDDING:
        shape = (hidden, config["num_channels"], *sides(config["patch_size"]))
        yield Parameter(name=f"{embeddings}.patch_embedding.weight", shape=shape)
        yield Parameter(name=f"{embeddings}.patch_embedding.bias", shape=(hidden,))
        yield Parameter(name=f"{embeddings}.position_embedding.weight", shape=(_patches(config), hidden))
    elif layer == HEAD:
        yield from norm("vision_model.post_layernorm", hidden)
        yield from linear("classifier", config["num_labels"], hidden, "columns", bias=True)
    else:
        yield from norm("layer_norm1", hidden)
        for name in ("k", "v", "q"):
            yield from linear(f"self_attn.{name}_proj", hidden, hidden, "columns", bias=True)
        yield from linear("self_attn.out_proj", hidden, hidden, "rows", bias=True)
        yield from norm("layer_norm2", hidden)
        yield from linear("mlp.fc1", inner, hidden, "columns", bias=True)
        yield from linear("mlp.fc2", hidden, inner, "rows", bias=True)


SIGLIP = Family(
    model_type="siglip",
    stock=traits.StockModel("SiglipForImageClassification", tied=(), places={BLOCK: "vision_model.encoder.layers.{}"}),
    runtime="images:Siglip",
    keys=traits.Keys(
        {
            **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
            **{"image_size": 224, "patch_size": 16, "num_channels": 3, "num_labels": 2, "attention_dropout": 0.0},
            **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
        },
        lengths=("image_size", "patch_size", "num_channels", "num_labels"),
        nested=VISION,
        ignored=("num_labels", "vision_use_head"),  # the last one up to transformers 5.22
    ),
    parameters=_siglip_parameters,
    stacks=(Stack(),),
    # The head uses the mean of all patches.
    divided=traits.Divided(("num_attention_heads", "intermediate_size"), sequence={HEAD: "pooled_positions"}),
    attention=traits.AttentionFacts(traits.Mask.NONE, "learned_absolute"),
    norm=traits.Norm("LayerNorm", "layer_norm_eps", ends=()),
    feed_forward=lambda config: traits.FeedForward(config["hidden_act"], gated=False),
    dropouts=traits.Dropouts(attention="attention_dropout", hidden=None),
    vision=Vision(_patches),
)
