"""Swin (Liu et al. 2021): stages of blocks with windowed attention, between which patches are merged."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from shardwright.models import traits
from shardwright.models.config_keys import is_length, not_a_length
from shardwright.models.facts import Family, Vision
from shardwright.models.families.images import grid, sides
from shardwright.models.parameters import Parameters, linear, norm
from shardwright.models.traits import ATTENDED, POSITIONS, Config, Stack
from shardwright.types import EMBEDDING, HEAD, Parameter, base_type

_TYPES = ("stage1", "merge1", "stage2", "merge2", "stage3", "merge3", "stage4")
STAGES, MERGES = _TYPES[::2], _TYPES[1::2]
"""Types of the blocks of each stage, and of the patch merging after it; published models have four stages."""


class _Pyramid(Stack):
    """The blocks of all stages, whose numbers one key lists, with patch merging between stages."""

    def layers(self, config: Config) -> Sequence[str]:
        """Return the types of blocks and merges, in order."""
        depths = config[self.counted_by]
        levels = ((STAGES[i : i + 1] * depth, MERGES[i : i + 1]) for i, depth in enumerate(depths))
        return list(chain.from_iterable(blocks + merge for blocks, merge in levels))[: sum(depths) + len(depths) - 1]

    def numbers(self, config: Config) -> Sequence[Any]:
        """Return the number of blocks of each stage."""
        return tuple(config[self.counted_by])

    def counted(self, layers: Sequence[str], config: Config) -> dict[str, Any]:
        """Return the configuration key that lists the number of blocks per stage, with its value for these layers."""
        bases = [base_type(layer) for layer in layers]
        return {self.counted_by: [bases.count(stage) for stage in STAGES[: len(config["num_heads"])]]}


def level(layer: str, config: Config) -> int:
    """Return how many times patches were merged before the output of a layer type, or before the head."""
    if layer in (EMBEDDING, HEAD):
        return 0 if layer == EMBEDDING else len(config["num_heads"]) - 1
    return STAGES.index(layer) if layer in STAGES else MERGES.index(layer) + 1


def side_patches(layer: str, config: Config) -> tuple[int, int]:
    """Return the height and width, in patches, of the image that a layer type passes on."""
    height, width = grid(config)
    return height >> level(layer, config), width >> level(layer, config)


def _shapes(layer: str, config: Config) -> Config:
    number, (height, width) = level(layer, config), side_patches(layer, config)
    hidden, heads = config["embed_dim"] << number, config["num_heads"][number]
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "head_dim": hidden // heads,
        "num_key_value_heads": heads,
        "intermediate_size": int(config["mlp_ratio"] * hidden),
        POSITIONS: height * width,
        ATTENDED: config["window_size"] ** 2,
    }


def _parameters(layer: str, config: Config) -> Parameters:
    shapes = _shapes(layer, config)
    hidden, inner, patch = shapes["hidden_size"], shapes["intermediate_size"], sides(config["patch_size"])
    if layer == EMBEDDING:
        if config["use_absolute_embeddings"]:
            yield Parameter(name="swin.embeddings.position_embeddings", shape=(1, shapes[POSITIONS], hidden))
        projection = "swin.embeddings.patch_embeddings.projection"
        yield Parameter(name=f"{projection}.weight", shape=(hidden, config["num_channels"], *patch))
        yield Parameter(name=f"{projection}.bias", shape=(hidden,))
        yield from norm("swin.embeddings.norm", hidden)
    elif layer == HEAD:
        yield from norm("swin.layernorm", hidden)
        yield from linear("classifier", config["num_labels"], hidden, "columns", bias=True)
    elif layer in MERGES:
        yield from linear("reduction", hidden, 2 * hidden)
        yield from norm("norm", 2 * hidden)
    else:
        yield from _block(hidden, inner, shapes["num_attention_heads"], config)


def _block(hidden: int, inner: int, heads: int, config: Config) -> Parameters:
    for name in ("q", "k", "v"):
        yield from linear(f"attention.{name}_proj", hidden, hidden, "columns", config["qkv_bias"])
    yield from linear("attention.o_proj", hidden, hidden, "rows", bias=True)
    table = "attention.relative_position_bias.relative_position_bias_table"
    yield Parameter(name=table, shape=((2 * config["window_size"] - 1) ** 2, heads), tp_dim=1)
    for name in ("layernorm_before", "layernorm_after"):
        yield from norm(name, hidden)
    yield from linear("mlp.fc1", inner, hidden, "columns", bias=True)
    yield from linear("mlp.fc2", hidden, inner, "rows", bias=True)


def _wrong(config: Config) -> str | None:
    """Return what is wrong with the stages: their lists, heads that do not divide a width, or window sizes; or None."""
    depths, heads = config["depths"], config["num_heads"]
    for key, listed in (("depths", depths), ("num_heads", heads)):
        if not isinstance(listed, list | tuple) or not all(is_length(each) for each in listed):
            return f"{key} {listed!r} is not a list of numbers, one for each stage"
    if len(depths) != len(heads) or not 1 <= len(depths) <= len(STAGES):
        return f"depths and num_heads list {len(depths)} and {len(heads)} stages: give as many, {len(STAGES)} at most"
    for key in ("image_size", "patch_size"):
        pair = config[key] if isinstance(config[key], list | tuple) else (config[key],) * 2
        if len(pair) != 2 or not all(is_length(each) for each in pair):
            return f"{not_a_length(key, config[key])}, or two of them: height and width"
    for key in ("embed_dim", "window_size"):
        if not is_length(config[key]):
            return not_a_length(key, config[key])
    if not isinstance(config["mlp_ratio"], int | float) or config["mlp_ratio"] * config["embed_dim"] < 1:
        return f"mlp_ratio {config['mlp_ratio']!r} leaves no features"
    return next((wrong for each in STAGES[: len(depths)] if (wrong := _wrong_stage(each, config)) is not None), None)


def _wrong_stage(stage: str, config: Config) -> str | None:
    number, (height, width), window = level(stage, config), side_patches(stage, config), config["window_size"]
    hidden, heads = config["embed_dim"] << number, config["num_heads"][number]
    if hidden % heads:
        return f"num_heads {heads} of {stage} does not divide its {hidden} features"
    whole = grid(config) == (height << number, width << number)
    if not whole or height < window or width < window or height % window or width % window:
        return f"window_size {window}: the {height} x {width} patches of {stage} do not divide into windows"
    return None


SWIN = Family(
    model_type="swin",
    stock=traits.StockModel(
        "SwinForImageClassification",
        tied=(),
        places={
            **{stage: f"swin.encoder.layers.{i}.blocks.{{}}" for i, stage in enumerate(STAGES)},
            **{merge: f"swin.encoder.layers.{i}.downsample" for i, merge in enumerate(MERGES)},
        },
    ),
    runtime="images:Swin",
    keys=traits.Keys(
        {
            **{"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24), "window_size": 7},
            # Height and width, for which files may contain one number.
            **{"image_size": (224, 224), "patch_size": (4, 4), "num_channels": 3, "num_labels": 2, "mlp_ratio": 4.0},
            **{"hidden_act": "gelu", "hidden_dropout_prob": 0.0, "drop_path_rate": 0.1, "qkv_bias": True},
            "use_absolute_embeddings": False,
        },
        lengths=("num_channels", "num_labels"),
        aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
        wrong=_wrong,
        ignored=("num_labels", "path_norm"),
    ),
    parameters=_parameters,
    stacks=(_Pyramid("depths", types=_TYPES, merging=MERGES),),
    divided=traits.Divided(
        ("num_attention_heads", "intermediate_size"),
        # Windows, and the patches that are merged, extend across the parts of a sequence.
        sequence={
            **dict.fromkeys(STAGES, "windows_across_positions"),
            **dict.fromkeys(MERGES, "merged_positions"),
            HEAD: "pooled_positions",
        },
    ),
    attention=traits.AttentionFacts(traits.Mask.BIAS, "relative"),
    norm=traits.Norm("LayerNorm", "layer_norm_eps", ends=()),
    feed_forward=lambda config: traits.FeedForward(config["hidden_act"], gated=False),
    dropouts=traits.Dropouts(
        attention="attention_probs_dropout_prob",
        hidden="hidden_dropout_prob",
        embedding="hidden_dropout_prob",
        path="drop_path_rate",
        ends=("full",),
    ),
    shapes=_shapes,
    vision=Vision(lambda config: _shapes(EMBEDDING, config)[POSITIONS]),
)
