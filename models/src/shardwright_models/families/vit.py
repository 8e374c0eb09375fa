"""ViT (Dosovitskiy et al. 2021): patches of an image instead of tokens, and a class instead of the next token."""

from collections.abc import Sequence

from shardwright_formats.types import EMBEDDING, HEAD, Parameter
from shardwright_models.facts import Config, Dropouts, Family, FeedForward, Mask, Norm, Stack
from shardwright_models.parameters import Parameters, linear, norm


def _parameters(layer: str, config: Config) -> Parameters:
    hidden, inner, patch = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    if layer == EMBEDDING:
        yield Parameter(name="vit.embeddings.cls_token", shape=(1, 1, hidden))
        yield Parameter(name="vit.embeddings.position_embeddings", shape=(1, _positions(config), hidden))
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
    """Return how many patches high and wide an image is, whose size is a length or height and width."""
    (height, width), (patch_height, patch_width) = sides(config["image_size"]), sides(config["patch_size"])
    return height // patch_height, width // patch_width


def _positions(config: Config) -> int:
    """Return the patches of an image, and one position for its class."""
    height, width = grid(config)
    return height * width + 1


def sides(size: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width; a single number gives both."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width


VIT = Family(
    model_type="vit",
    stock="ViTForImageClassification",
    runtime="vit:ViT",
    parameters=_parameters,
    stacks=(Stack(),),
    defaults={"hidden_act": "gelu", "hidden_dropout_prob": 0.0, "num_channels": 3, "num_labels": 2, "qkv_bias": True},
    lengths=("image_size", "patch_size", "num_channels", "num_labels"),
    divided=("num_attention_heads", "intermediate_size"),
    tied=(),
    mask=Mask.NONE,
    norm=Norm("LayerNorm", "layer_norm_eps"),
    positions="learned_absolute",
    feed_forward=lambda config: FeedForward(config["hidden_act"], gated=False),
    dropouts=Dropouts(attention="attention_probs_dropout_prob", hidden="hidden_dropout_prob", ends=("full",)),
    ends_in_norm=(),
    # The head uses position 0, which under Ulysses only one rank has.
    undivided_by_ulysses={HEAD: "pooled_positions"},
    fixed_positions=_positions,
    positions_without_input=1,
    labels=1,
    ignored=("num_labels",),
)
