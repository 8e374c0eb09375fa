"""The keys of a config.json as its family reads them, under any of its names, or approximately as another family's."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.io import BadInput, did_you_mean, read_object
from shardwright.models.config_keys import NOTES, changes_nothing, known_keys, wrong_values
from shardwright.models.facts import Family
from shardwright.models.registry import FAMILIES, OTHER_NAMES, TRACED_TOWERS, USUAL, refusal
from shardwright.models.traits import Config, Mask

OPTION = "--as"
QUANTIZED = "quantization_config"
"""The key that describes how the weights of a published file are stored."""
TEXT_KEY, TOWER_KEY = "text_config", "vision_config"
"""The keys under which the keys of a language model, and of a vision tower, are nested."""
_ALIKE = 0.7
"""Lowest similarity, from 0 to 1, of a type's name to the name of its nearest family."""


_WORDS = {
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "n_kv_heads", "multi_query_group_num"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length"),
}
"""Keys of a model's shape, with their other names in configuration classes of transformers."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k")
_INNER = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size")

_TRACES = "pip install '.[train]' traces causal models"
_OF_ENCODERS = "type_vocab_size"
_IMPLIED = ("n_inner", "num_key_value_heads")
"""Lengths that all classes of transformers derive from others if a file does not have them."""
_NULLS = ("attention_chunk_size", "q_lora_rank", "sliding_window")


class Read(NamedTuple):
    """The keys of a config.json that a family reads, and notes on them."""

    config: dict[str, Any]
    """The keys and their values; `model_type` is the family's name."""
    notes: tuple[str, ...] = ()
    """What the user must know about this reading."""
    approximates: str | None = None
    """The family whose shapes represent the model's shapes; None if the shapes are the model's own."""

    def named(self, name: str) -> str:
        """Return a model's name, extended by the family that approximates it, if there is one."""
        return name if self.approximates is None else f"{name} (approximate, as {self.approximates})"


def read_config(given: Config, file: object, taken_as: str | None = None) -> Read:
    """Return the keys of a config.json for a family; `taken_as`: the family that approximates the model, if any.

    Raises BadInput, naming `file`, for a type without a family, and naming --as for a family that does not fit.
    """
    config, notes = without_format(given)
    kind = config.get("model_type")
    if taken_as is None or taken_as == kind:
        config = _as_named(config, file)
        return Read(config, (*notes, *_assumed(config)))
    if taken_as not in priced_families():
        remedy = did_you_mean(taken_as, priced_families(), f"give one of {', '.join(priced_families())}")
        raise BadInput(OPTION, f"{taken_as!r} is not a family of language models", remedy)
    config, told = _approximated(config, FAMILIES[taken_as], file)
    return Read(config, (*notes, f"approximate, as {taken_as}: {told}"), taken_as)


def read_configuration(file: Path) -> dict[str, Any]:
    """Return the object of a config.json; NaN and infinity are only accepted, and tagged, for a type without facts.

    Raises BadInput as `read_object` does.
    """
    config = read_object(file, tagged=True)
    return read_object(file) if is_known(config) else config


def is_known(config: Config) -> bool:
    """Return whether the type of a config.json has a family, under the family's name or another name."""
    kind = config.get("model_type")
    return isinstance(kind, str) and (kind in FAMILIES or kind in OTHER_NAMES)


def has_images(config: Config) -> bool:
    """Return whether a config.json describes a model with a vision tower that only a family could describe."""
    return config.get("model_type") not in TRACED_TOWERS and isinstance(config.get(TOWER_KEY), Mapping)


def same_types(family: str) -> tuple[str, ...]:
    """Return the other model types that are read as this family."""
    return tuple(name for name, other in OTHER_NAMES.items() if other.family == family)


def priced_families() -> tuple[str, ...]:
    """Return the families of causal language models, which may approximate other types."""
    return tuple(name for name, family in FAMILIES.items() if _is_causal(family))


def unknown_type(given: Config, file: object) -> BadInput:
    """Return the error for a type without a family, with the nearest family and what to do."""
    kind = given.get("model_type")
    if not isinstance(kind, str):
        return BadInput(file, "has no model_type", "give the config.json of a model")
    problem = refusal(kind, f"model_type {kind!r} is none of the families known here")
    nearest = nearest_family(given)
    if has_images(given):
        near = "" if nearest is None else f"{OPTION} {nearest} prices its text_config alone, approximately; "
        return BadInput(file, f"{problem}, and has a {TOWER_KEY}", f"{near}docs/add-a-model.md adds a family")
    if nearest is None:
        return BadInput(file, problem, f"{_TRACES}; docs/add-a-model.md adds a family; `shardwright models` lists them")
    near = f"the nearest is {nearest}: {OPTION} {nearest} prices it by its keys, approximately"
    return BadInput(file, problem, f"{near}; {_TRACES}; docs/add-a-model.md adds a family")


def nearest_family(given: Config) -> str | None:
    """Return the family with the most similar name, or else the first usual family that fits; None if none fits."""
    fitting = [name for name in priced_families() if _fits(given, FAMILIES[name])]
    near = get_close_matches(str(given.get("model_type")), fitting, 1, _ALIKE)
    return next((name for name in (*near, *USUAL) if name in fitting), None)


def _is_causal(family: Family) -> bool:
    whole = family.attention.mask is Mask.CAUSAL and len(family.stacks) == 1 and family.keys.nested is None
    return whole and family.vision is None


def without_format(given: Config) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a configuration without the description of how its weights are stored, and a line about that."""
    config, stored = dict(given), given.get(QUANTIZED)
    if not isinstance(stored, Mapping):
        return config, ()
    del config[QUANTIZED]
    method = stored.get("quant_method", "a format that is not named")
    return config, (f"weights are stored in {method} ({QUANTIZED}): the model is that of dequantised weights",)


def _as_named(config: dict[str, Any], file: object) -> dict[str, Any]:
    """Return a configuration under the name of its family; raise BadInput if it has no family."""
    kind = config.get("model_type")
    other = OTHER_NAMES.get(kind) if isinstance(kind, str) else None
    if other is not None:
        renamed = {other.renamed.get(key, key): value for key, value in config.items()}
        return {**other.defaults, **renamed, "model_type": other.family}
    if not is_known(config):
        raise unknown_type(config, file)
    return config


def _assumed(config: Config) -> Iterator[str]:
    """Yield what is assumed about a model's images, if its configuration leaves their size open."""
    family = FAMILIES[config["model_type"]]
    if family.vision is not None and family.vision.assumed is not None:
        configured = family.configured(config)
        if wrong_values(family, config) is None and family.keys.wrong(configured) is None:
            yield family.vision.assumed(configured)


def _fits(given: Config, family: Family) -> bool:
    if _OF_ENCODERS in given:
        return False
    try:
        _approximated(given, family, "")
    except BadInput:
        return False
    return True


def _text_part(given: Config) -> tuple[Config, bool]:
    """Return the keys of the language model, and whether they are nested inside a larger model's keys."""
    inner = given.get(TEXT_KEY)
    is_part = isinstance(inner, Mapping) and not any(word in given for word in ("hidden_size", *_WORDS["hidden_size"]))
    return (inner, True) if is_part and isinstance(inner, Mapping) else (given, False)


def _approximated(given: Config, family: Family, file: object) -> tuple[dict[str, Any], str]:
    """Return the keys that a family reads from another type's configuration, and words on keys left out."""
    flat, is_part = _text_part(given)
    _check_experts(flat, family)
    taken = dict(_taken(flat, family))
    if (lacking := next((key for key in _required(family) if key not in taken), None)) is not None:
        problem = f"{given.get('model_type')!r} has no {lacking}, which {family.model_type} needs"
        raise BadInput(file, problem, f"give {OPTION} the name of another family")
    config = {key: flat[name] for key, name in taken.items()} | {"model_type": family.model_type}
    unread = [key for key in flat if key not in taken.values() and not changes_nothing(key, flat[key])]
    notes = ([f"its {TEXT_KEY} alone"] if is_part else []) + ([f"without {', '.join(unread)}"] if unread else [])
    if "tie_word_embeddings" not in flat:
        tied = bool(family.keys.defaults.get("tie_word_embeddings", False))
        notes.append(f"tie_word_embeddings, which is not in the file, is taken as {str(tied).lower()}")
    return {**_absent(config, family), **config}, "; ".join(notes) or "all its keys are read"


def _taken(flat: Config, family: Family) -> Iterator[tuple[str, str]]:
    """Yield the keys of a family that a configuration contains, each with its name in that configuration."""
    words = {key: (key, *others) for key, others in _WORDS.items()}
    if (experts := family.experts) is not None:
        words[experts.number], words[experts.top_k] = _EXPERTS, _TOP_K
        words[experts.features] = (*_INNER, *words.get(experts.features, ()))
    shaped = set[str]()
    for key, names in words.items():
        own = _own_name(family, key)
        shaped |= {own, *names}
        name = next((name for name in (*names, own) if flat.get(name) is not None), None)
        if name is not None and own in _known(family):
            yield own, name
    known = known_keys(family) - shaped - NOTES - {"model_type"} - _wrongly_typed(flat, family)
    yield from ((key, key) for key in flat if key in known)


def _wrongly_typed(flat: Config, family: Family) -> set[str]:
    """Return the keys that list block types, if the family does not have all of these types."""
    (stack,) = family.stacks
    listed = flat.get(stack.typed_by) if stack.typed_by else None
    fits = isinstance(listed, list) and all(kind in stack.values for kind in listed)
    return set() if fits else {*stack.typing_keys}


def _known(family: Family) -> set[str]:
    return {*family.keys.defaults, *known_keys(family)}


def _own_name(family: Family, key: str) -> str:
    """Return a family's name for a key of a model's shape."""
    usual = family.keys.aliases.get(key, key)
    known = _known(family)
    return usual if usual in known else next((name for name in _WORDS.get(key, ()) if name in known), usual)


def _required(family: Family) -> Iterator[str]:
    """Yield the keys that a configuration must have, so that a family's defaults are not used for its shapes."""
    first = () if family.experts is None or family.experts.first is None else (family.experts.first,)
    shapes = ("hidden_size", "num_hidden_layers", "num_attention_heads", *family.keys.lengths, *first)
    for key in (*shapes, *family.divided.lengths):
        if (own := _own_name(family, key)) not in _IMPLIED:
            yield own


def _absent(config: Config, family: Family) -> dict[str, Any]:
    """Return values for keys that a file does not have, as most classes of transformers set them.

    They replace a family's defaults: as many key heads as query heads, all equally wide, no query latents, and no
    window.
    """
    usual: dict[str, Any] = dict.fromkeys(_NULLS)
    heads, hidden = (config.get(family.keys.aliases.get(key, key)) for key in ("num_attention_heads", "hidden_size"))
    if isinstance(heads, int) and isinstance(hidden, int) and heads and "kv_lora_rank" not in family.keys.lengths:
        usual |= {"num_key_value_heads": heads, "head_dim": hidden // heads}
    return {key: value for key, value in usual.items() if key in known_keys(family)}


def _check_experts(flat: Config, family: Family) -> None:
    """Raise BadInput if a file has experts but the family does not."""
    if family.experts is not None:
        return
    for key in _EXPERTS:
        if isinstance(number := flat.get(key), int) and number > 1:
            problem = f"{family.model_type} has no experts, and the model has {number} ({key})"
            raise BadInput(OPTION, problem, "give a family with experts; without the option, the nearest is named")
