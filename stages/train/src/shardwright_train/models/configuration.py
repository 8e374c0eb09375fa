"""A published config.json, as the stock class of transformers reads it: whatever would change the model is heeded."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from shardwright_train.models.stock import refusals

_NO_MEANING = frozenset(
    (
        *("model_type", "architectures", "_name_or_path", "transformers_version", "_commit_hash", "finetuning_task"),
        *("torch_dtype", "dtype", "torchscript", "use_bfloat16", "gradient_checkpointing"),  # the plan says
        *("task_specific_params", "prefix", "output_past", "tokenizer_class", "n_special", "predict_special_tokens"),
        *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
        *("pooler_type", "directionality", "pretraining_tp"),
    )
)
"""Keys of published files that say nothing about the model that is trained."""
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_ROPE_KEYS = frozenset(
    (
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
    )
)
_MAX_LENGTH = 2**31 - 1
_MAX_LAYERS = 4096


class Only(NamedTuple):
    """The only value of a key that can be trained, and why."""

    value: object
    reason: str


_EVERYWHERE = {
    "chunk_size_feed_forward": Only(0, "recomputation is the plan's to choose"),
    "cross_attention_hidden_size": Only(None, "there is one stack"),
    "per_layer_config": Only(None, "layers of a type are alike"),
    "problem_type": Only("single_label_classification", "the loss is cross entropy over classes"),
    "pruned_heads": Only({}, "layers of a type are alike"),
    "quantization_config": Only(None, "weights are trained in the plan's precision"),
    "tie_encoder_decoder": Only(False, "the stacks have weights of their own"),
    "use_mrope": Only(False, "positions count tokens"),
}
"""Keys that some file has, whatever its family."""


def parse(config_class: Any, config: Mapping[str, Any], family: str, own_keys: Iterable[str]) -> Any:
    """The transformers configuration of a config.json; raises ValueError for a key that nobody would heed."""
    if unknown := sorted(set(config) - _keys_of(config_class) - set(own_keys)):
        raise ValueError(f"unknown key {unknown[0]!r} for a {family} model")
    for key, value in config.items():
        if isinstance(value, int) and abs(value) > _MAX_LENGTH:
            raise ValueError(f"{key} {value} is over {_MAX_LENGTH}")
    with refusals():
        return config_class(**{key: value for key, value in config.items() if key not in _NO_MEANING})


@cache
def _keys_of(config_class: Any) -> frozenset[str]:
    """The keys of a config.json that a class heeds, or that have no meaning here."""
    default = config_class()
    rotary = ("rope_theta", "rope_scaling") if hasattr(default, "rope_parameters") else ()
    return frozenset({*default.to_dict(), *config_class.attribute_map, *_NO_MEANING, *_EVERYWHERE, *rotary})


def check_only(config: Mapping[str, Any], only: Mapping[str, Only]) -> None:
    """Raise ValueError naming the first key of a config.json whose value cannot be trained, and why."""
    for key, (value, reason) in (_EVERYWHERE | dict(only)).items():
        if (found := config.get(key)) not in (value, None):
            raise ValueError(f"{key} {json.dumps(found)} cannot be trained: {reason}")


def check_sizes(config: Any, counts: Iterable[str], sequence_length: int) -> None:
    """Raise ValueError naming what in a transformers configuration is too small, too large or of an unknown kind."""
    numbers = {key: getattr(config, key) for key in counts}
    if min(numbers.values()) < 1:
        raise ValueError(f"{' and '.join(numbers)} must be 1 or more")
    if max(numbers.values()) > _MAX_LAYERS:
        raise ValueError(f"{' and '.join(numbers)} must be {_MAX_LAYERS} or less")
    if (padding := getattr(config, "pad_token_id", None)) is not None and padding >= config.vocab_size:
        raise ValueError(f"pad_token_id {padding} is not below vocab_size {config.vocab_size}")
    if sequence_length > (longest := getattr(config, "max_position_embeddings", sequence_length)):
        raise ValueError(f"sequence length {sequence_length} is over {longest} positions")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < sequence_length:
        raise ValueError(f"sequence length {sequence_length} is over the sliding_window {window}: attention is whole")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer_types {kind!r} cannot be trained: layers attend to the whole sequence")
    _check_rotary(getattr(config, "rope_parameters", None))


def described_keys(config: Mapping[str, Any], parsed: Any, counts: Iterable[str]) -> dict[str, Any]:
    """What a description keeps of a configuration: the layers are listed there, and classes need no names."""
    long = parsed.attribute_map
    counted = {*counts, *(short for short, key in long.items() if key in counts), *(long.get(key) for key in counts)}
    kept = {key: value for key, value in config.items() if key not in counted | {"layer_types", "label2id"}}
    if kept.pop("id2label", None) is not None:
        kept["num_labels"] = parsed.num_labels
    return kept


def _check_rotary(parameters: Mapping[str, Any] | None) -> None:
    if parameters is None:
        return
    if unknown := sorted(set(parameters) - _ROPE_KEYS):
        raise ValueError(f"rope_parameters: {unknown[0]!r} cannot be trained: it is no key of a rotary embedding here")
    if (kind := parameters.get("rope_type")) not in _ROPE_TYPES:
        raise ValueError(f"rope_type {kind!r} cannot be trained: use one of {', '.join(_ROPE_TYPES)}")
