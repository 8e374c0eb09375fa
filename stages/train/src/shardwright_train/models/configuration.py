"""A published config.json as a configuration of transformers; no key that changes the model is ignored."""

import json
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from shardwright.models.description import wrong_length, wrong_types, wrong_window
from shardwright.models.facts import Family
from shardwright.models.traits import Only
from shardwright_train.models.stock import refusals

_NO_MEANING = frozenset(
    (
        *("model_type", "architectures", "_name_or_path", "transformers_version", "_commit_hash", "finetuning_task"),
        *("torch_dtype", "dtype", "torchscript", "use_bfloat16", "gradient_checkpointing"),  # the plan says
        "transformers.js_config",  # which of its files a browser loads
        "auto_map",  # Code that comes with a folder is never run: the model is transformers' own, or this runtime's.
        *("task_specific_params", "prefix", "output_past", "tokenizer_class", "n_special", "predict_special_tokens"),
        *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
        *("pooler_type", "directionality", "pretraining_tp"),
    )
)
"""Keys of published files that do not affect the trained model."""
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_ROPE_KEYS = frozenset(
    (
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
    )
)
_PARTIAL = "partial_rotary_factor"
"""Key of the fraction of a head's features that is rotated, for classes whose default configuration has one."""
_MAX_LENGTH = 2**31 - 1
MAX_BUILT_LAYERS = 4096
"""Largest number of layers of a stock model that is built."""

_EVERYWHERE = {
    "chunk_size_feed_forward": Only(0, "recomputation is the plan's to choose"),
    "cross_attention_hidden_size": Only(None, "there is one stack"),
    "per_layer_config": Only(None, "all layers of a type are identical"),
    "problem_type": Only("single_label_classification", "the loss is cross entropy over classes"),
    "pruned_heads": Only({}, "all layers of a type are identical"),
    "tie_encoder_decoder": Only(False, "the two stacks have separate weights"),
    "use_mrope": Only(False, "positions count tokens"),
}
"""Keys of any family's files whose value is restricted."""


def parse(config_class: Any, config: Mapping[str, Any], family: Family) -> Any:
    """Return the transformers configuration of a config.json; raise ValueError for an unknown key."""
    if unknown := sorted(set(config) - keys_of(config_class) - set(family.keys.ignored)):
        raise ValueError(f"unknown key {unknown[0]!r} for models of the family {family.model_type}")
    for key, value in config.items():
        if isinstance(value, int) and abs(value) > _MAX_LENGTH:
            raise ValueError(f"{key} {value} is over {_MAX_LENGTH}")
    with refusals():
        # transformers completes the rotary parameters that it is given.
        return config_class(**{key: deepcopy(value) for key, value in config.items() if key not in _NO_MEANING})


@cache
def keys_of(config_class: Any) -> frozenset[str]:
    """Return the keys of a config.json that a configuration class reads, or that have no meaning here."""
    default = config_class()
    rotary = ("rope_theta", "rope_scaling") if hasattr(default, "rope_parameters") else ()
    partly = (_PARTIAL,) if _rotates_partly(config_class) else ()
    return frozenset({*default.to_dict(), *config_class.attribute_map, *_NO_MEANING, *_EVERYWHERE, *rotary, *partly})


def _rotates_partly(config_class: Any) -> bool:
    """Return whether models of a configuration class may rotate only a configured fraction of the features."""
    return _PARTIAL in (getattr(config_class(), "rope_parameters", None) or {})


def check_only(config: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError naming the first key of a config.json whose value cannot be trained, and why."""
    for key, (value, reason) in {**_EVERYWHERE, **family.keys.only}.items():
        if key == "problem_type" and family.labels is None:
            continue  # it says how a classification head was trained, which this model does not have
        if (given := config.get(key)) not in (value, None):
            raise ValueError(f"{key} {json.dumps(given)} cannot be trained: {reason}")


def check_sizes(config: Any, family: Family, sequence_length: int) -> None:
    """Raise ValueError naming a value of a transformers configuration that is too small, too large or unknown."""
    configured, keys = family.configured(vars(config)), " and ".join(family.counts)
    if (wrong := family.keys.wrong(configured)) is not None:
        raise ValueError(wrong)
    numbers = [number for stack in family.stacks for number in stack.numbers(configured)]
    if min(numbers) < 1:
        raise ValueError(f"{keys} must be 1 or more")
    if max(numbers) > MAX_BUILT_LAYERS:
        raise ValueError(f"{keys} must be {MAX_BUILT_LAYERS} or less")
    if (padding := getattr(config, "pad_token_id", None)) is not None and padding >= config.vocab_size:
        raise ValueError(f"pad_token_id {padding} is not below vocab_size {config.vocab_size}")
    for key in family.keys.above_zero:
        if (value := getattr(config, key)) is not None and not value > 0:
            raise ValueError(f"{key} {value} must be above 0, or null")
    if (wrong := wrong_length(family, configured, sequence_length)) is not None:
        raise ValueError(wrong)
    if (wrong := wrong_types(family, vars(config)) or wrong_window(family, vars(config))) is not None:
        raise ValueError(wrong)
    listed = any("layer_types" in stack.typing_keys for stack in family.stacks)
    for kind in () if listed else getattr(config, "layer_types", None) or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer_types {kind!r} cannot be trained: layers attend to the whole sequence")
    further = {*family.keys.rotary, *((_PARTIAL,) if _rotates_partly(type(config)) else ())}
    _check_rotary(getattr(config, "rope_parameters", None), further)


def _check_rotary(parameters: Mapping[str, Any] | None, further: set[str]) -> None:
    """Raise ValueError naming a rotary key that is neither common to all families nor a `further` one."""
    if parameters is None:
        return
    if parameters and all(isinstance(each, Mapping) for each in parameters.values()):  # one of each type of block
        for each in parameters.values():
            _check_rotary(each, further)
        return
    if unknown := sorted(set(parameters) - _ROPE_KEYS - further):
        raise ValueError(
            f"rope_parameters: {unknown[0]!r} cannot be trained: it is not a known key of a rotary embedding"
        )
    if (kind := parameters.get("rope_type")) not in _ROPE_TYPES:
        raise ValueError(f"rope_type {kind!r} cannot be trained: use one of {', '.join(_ROPE_TYPES)}")
