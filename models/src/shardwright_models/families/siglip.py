"""SigLIP's vision tower (Zhai et al. 2023), trained to classify images by the mean of their patches."""

from shardwright_formats.types import EMBEDDING, HEAD, Parameter
from shardwright_models.facts import Config, Dropouts, Family, FeedForward, Mask, Norm, Stack
from shardwright_models.families.vit import grid, sides
from shardwright_models.parameters import Parameters, linear, norm

VISION = "vision_config"
"""The key that holds the keys of the vision tower; what files say beside it of a text tower is not trained."""


def _parameters(layer: str, config: Config) -> Parameters:
    hidden, inner, embeddings = config["hidden_size"], config["intermediate_size"], "vision_model.embeddings"
    if layer == EMBEDDING:
        shape = (hidden, config["num_channels"], *sides(config["patch_size"]))
        yield Parameter(name=f"{embeddings}.patch_embedding.weight", shape=shape)
        yield Parameter(name=f"{embeddings}.patch_embedding.bias", shape=(hidden,))
        yield Parameter(name=f"{embeddings}.position_embedding.weight", shape=(_positions(config), hidden))
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


def _positions(config: Config) -> int:
    height, width = grid(config)
    return height * width


SIGLIP = Family(
    model_type="siglip",
    stock="SiglipForImageClassification",
    runtime="siglip:Siglip",
    nested=VISION,
    parameters=_parameters,
    stacks=(Stack(),),
    defaults={
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"image_size": 224, "patch_size": 16, "num_channels": 3, "num_labels": 2, "attention_dropout": 0.0},
        **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    },
    lengths=("image_size", "patch_size", "num_channels", "num_labels"),
    divided=("num_attention_heads", "intermediate_size"),
    tied=(),
    mask=Mask.NONE,
    norm=Norm("LayerNorm", "layer_norm_eps"),
    positions="learned_absolute",
    feed_forward=lambda config: FeedForward(config["hidden_act"], gated=False),
    dropouts=Dropouts(attention="attention_dropout", hidden=None),
    ends_in_norm=(),
    # The mean of all patches.
    undivided_sequence={HEAD: "pooled_positions"},
    fixed_positions=_positions,
    labels=1,
    ignored=("num_labels",),
)
