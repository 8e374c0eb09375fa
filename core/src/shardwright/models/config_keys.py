"""Checks of a config.json's keys and values, made before anything is computed from them.

A model is what transformers would build. A key that no configuration class of transformers declares cannot change the
model: it is ignored, and the user is told; notes of the tools that wrote a file, and settings of generation, are
ignored in the same way. A key that another class declares, or that looks like a misspelled key, is refused, because its
author meant another model than would be trained.
"""

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, TypeGuard

from shardwright.models.facts import Family
from shardwright.models.traits import Config

FILE = "config_keys.json"
NOTES = frozenset(
    (
        # Heads and labels of other tasks.
        *("finetuning_task", "id2label", "label2id", "loss_type", "num_labels", "problem_type", "task_specific_params"),
        # Settings of how transformers calls the model.
        *("attn_implementation", "output_attentions", "output_hidden_states", "output_past", "return_dict"),
        *(
            "tf_legacy_loss",
            "torchscript",
            "use_bfloat16",
            "use_return_dict",
            "trust_remote_code",
            "is_encoder_decoder",
        ),
        # Settings of a training run.
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "use_reentrant", "neftune_noise_alpha"),
        *("use_cache", "model_name", "max_seq_length", "model_max_length", "padding_side", "prefix", "tokenizer_class"),
        # Settings of generation.
        *("bad_words_ids", "begin_suppress_tokens", "cache_config", "cache_implementation", "constraints"),
        *("decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size"),
        *("encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty"),
        *("force_words_ids", "forced_bos_token_id", "forced_decoder_ids", "forced_eos_token_id", "generation_config"),
        *("guidance_scale", "length_penalty", "low_memory", "max_length", "max_new_tokens", "max_time", "min_length"),
        *("min_new_tokens", "min_p", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences"),
        *("output_scores", "penalty_alpha", "remove_invalid_values", "renormalize_logits", "repetition_penalty"),
        *("return_dict_in_generate", "sep_token_id", "sequence_bias", "stop_strings", "suppress_tokens", "temperature"),
        *("top_k", "top_p", "typical_p", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"),
    )
)
"""Keys that change neither the weights nor the computation of a sample in training, if a family does not read them."""
_TOOLS = ("_", "unsloth", "axolotl", "trl_", "llamafactory", "nemo_", "mergekit", "transformers.js")
"""Beginnings of keys that transformers reserves for itself, or by which tools note that they wrote a file."""
_OFF = ("add_cross_attention", "is_decoder", "use_qk_norm")
"""Keys that are off unless a file sets them, except in classes that require them."""
ALIKE = 0.8
"""Lowest similarity, from 0 to 1, of a key to the key that it misspells."""
_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers")
"""Keys of a window. A class of transformers that does not declare them ignores them: its attention has no window."""
_CODE = "auto_map"
_OF_FILES = (_CODE, "architectures", "dtype", "model_type", "pretraining_tp", "torch_dtype", "transformers_version")
"""Keys that name the model, its code and the format of its file."""
PARTS = ("text_config", "vision_config")
"""Keys whose values are the keys of a part of a model."""


class StockKeys(NamedTuple):
    """The keys that the configuration classes of transformers declare."""

    families: Mapping[str, frozenset[str]]
    """The keys that each family reads, including nested ones."""
    others: frozenset[str]
    """The keys of all configuration classes."""
    off: frozenset[str]
    """The keys, of all configuration classes, that are off by default in every class."""


@cache
def read_keys() -> StockKeys:
    """Return the keys, which were written by `tests/models/stock_keys.py`."""
    read = json.loads((files("shardwright.models") / FILE).read_text(encoding="utf-8"))
    common, off = read["common"].split(), frozenset(read["others_off"].split())
    families = {name: frozenset((*common, *keys.split())) for name, keys in read["families"].items()}
    return StockKeys(families, frozenset(read["others"].split()) | off, off)


def known_keys(family: Family) -> frozenset[str]:
    """Return the keys that have a meaning for a family."""
    typed = (key for stack in family.stacks for key in stack.typing_keys)
    declared = read_keys().families.get(family.model_type, frozenset())
    return declared.union(family.keys.ignored, family.keys.only, family.counts, typed)


def without_notes(family: Family, config: Config) -> tuple[dict[str, Any], str | None]:
    """Return a configuration without keys that have no effect, and a line that names these, or None if there are none.

    A family that is not in the list of stock keys, because it is being added, counts as reading every key. Raises
    ValueError with the first key that the family does not read and that may change a model.
    """
    if family.model_type not in read_keys().families:
        return dict(config), None
    known = known_keys(family)
    kept, aside = _sorted(family, known, config, has_code=_CODE in config)
    for name, part in kept.items():
        if isinstance(part, Mapping) and name in (family.keys.nested, *PARTS):
            kept[name], inside = _sorted(family, known, part, has_code=_CODE in config)
            aside += [f"{name}.{key}" for key in inside]
    named = f"{', '.join(aside)}: ignored, a model of the family {family.model_type} is the same without"
    return kept, named if aside else None


def _sorted(
    family: Family, known: frozenset[str], config: Config, *, has_code: bool
) -> tuple[dict[str, Any], list[str]]:
    aside = [key for key in config if key not in known]
    for key in sorted(aside):
        if (reason := _meaning(known, key, config[key], has_code=has_code)) is not None:
            raise ValueError(f"unknown key {key!r} for models of the family {family.model_type}: {reason}")
    return {key: value for key, value in config.items() if key in known}, aside


def _meaning(known: frozenset[str], key: str, value: object, *, has_code: bool) -> str | None:
    """Return why a key that a family does not read may change the model, or None if it has no effect."""
    if key in NOTES or key in _WINDOW or key.startswith(_TOOLS) or value is None:
        return None
    keys = read_keys()
    if not value and (key in keys.off or key in _OFF or "drop" in key):
        return None
    if key in keys.others:
        return "it changes other models of transformers"
    if near := get_close_matches(key, known, 1, ALIKE):
        return f"did you mean {near[0]}?"
    return "it may be read by the code that auto_map names, which is not run" if has_code and value else None


def changes_nothing(key: str, value: object) -> bool:
    """Return whether a key cannot change any model, because of its name or because it is off."""
    return key in NOTES or key.startswith(_TOOLS) or not value or key in _OF_FILES


_MAX_LENGTH = 2**31 - 1
_MAX_NUMBER = 1e15
_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_hidden_layers", "max_position_embeddings", "vocab_size"),
)
"""Keys whose value is a length in every family, if they have one."""
_SIDES = ("image_size", "patch_size")
"""Lengths for which the stock models also accept height and width."""
_MAY_BE_NULL = frozenset(
    (
        *("attention_chunk_size", "attention_dropout", "attn_logit_softcapping", "aux_loss_alpha", "layer_norm_eps"),
        *("logit_scale", "norm_topk_prob", "num_key_value_heads", "pad_token_id", "q_lora_rank", "sliding_window"),
        "use_qk_norm",
    )
)
"""Keys whose defaults are not null, but for which transformers also accepts null in some families."""


def wrong_values(family: Family, given: Config) -> str | None:
    """Return a message about the first unusable value of a configuration, or None if all can be used."""
    return next(_wrong_values(family, given), None)


def is_length(value: object) -> TypeGuard[int]:
    """Return whether a value can be a number of things in a model: a whole number from 1 to 2^31 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MAX_LENGTH


def not_a_length(named: str, value: object) -> str:
    """Return the message for a named value for which `is_length` is false."""
    return f"{named} must be a whole number from 1 to {_MAX_LENGTH}, not {value!r}"


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number that is small enough to be multiplied without overflow."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_NUMBER


def _wrong_values(family: Family, given: Config) -> Iterator[str]:
    for key in PARTS:
        if not isinstance(part := given.get(key) or {}, Mapping):
            yield f"{key} {part!r} is not an object"
            return
    config = family.flat(given)
    yield from _wrong_nulls(family, config)
    yield from _wrong_kinds(family, family.configured(given))
    yield from _wrong_sizes(family, config)


def _wrong_nulls(family: Family, config: Config) -> Iterator[str]:
    """Yield a message for each key that is null although a model needs a value, under any of its names."""
    needed = {key for key, default in family.keys.defaults.items() if default is not None}.union(family.keys.lengths)
    needed |= {family.keys.aliases[key] for key in ("hidden_size", "num_attention_heads") if key in family.keys.aliases}
    needed |= {family.keys.aliases.get("num_hidden_layers", "")} & {*family.counts}
    known = known_keys(family)
    for key, value in config.items():
        if value is None and key in known and (needed - _MAY_BE_NULL).intersection(_names(family, key)):
            yield f"{key} is null"


def _wrong_kinds(family: Family, config: Config) -> Iterator[str]:
    """Yield a message for each key whose value has another type than its default, or is too large."""
    for key, default in family.keys.defaults.items():
        if (value := config[key]) is None:
            continue
        if isinstance(default, bool | str) and not isinstance(value, type(default)):
            yield f"{key} must be {'a string' if isinstance(default, str) else 'true or false'}, not {value!r}"
        if isinstance(default, int | float) and not isinstance(default, bool) and not is_number(value):
            yield f"{key} must be a number up to {_MAX_NUMBER:.0e}, not {value!r}"
    for name in ("rope_scaling", "rope_parameters"):
        scaling = config.get(name)
        factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
        if factor is not None and not is_number(factor):
            yield f"factor of {name} must be a number up to {_MAX_NUMBER:.0e}, not {factor!r}"


def _wrong_sizes(family: Family, config: Config) -> Iterator[str]:
    for size in dict.fromkeys((*_SIZES, *family.keys.lengths)):
        for key in _names(family, size):
            is_list = isinstance(family.keys.defaults.get(key), tuple)
            is_pair = key in _SIDES and isinstance(pair := config.get(key), list) and all(map(is_length, pair))
            if not (is_list or is_pair) and (value := config.get(key)) is not None and not is_length(value):
                yield not_a_length(key, value)


def _names(family: Family, key: str) -> tuple[str, ...]:
    """Return a key and its other names in a family."""
    usual = (name for name, short in family.keys.aliases.items() if short == key)
    return tuple(dict.fromkeys((key, family.keys.aliases.get(key, key), *usual)))
