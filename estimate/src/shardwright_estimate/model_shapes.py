"""A model description from a config.json by its family's shapes: equal to what `shardwright-train describe` writes.

Keys that change no shape are not judged: whether the runtime can train the model is for `describe` to say.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from shardwright_estimate.families import FAMILIES, Config, Family
from shardwright_formats.io.errors import BadInput
from shardwright_formats.types.limits import MAX_LAYERS
from shardwright_formats.types.model import EMBEDDING, HEAD, BoundaryTensor, Heads, LayerType, Model, Parameter, Region

_TABLES = ("embed_tokens", "wte", "wpe", "embeddings", "shared", "relative_attention_bias")
"""Modules that are looked up in: nothing is multiplied."""
_MAX_LENGTH = 2**31 - 1


def model_of_config(given: Mapping[str, Any], name: str, sequence_length: int, file: object) -> Model:
    """The description of a configuration for samples of a length in tokens, positions of images included.

    Raises BadInput, naming `file`, for families without shapes here, and for keys that are missing or no lengths.
    """
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise BadInput(file, f"model_type {kind!r} has no shapes here", f"use a model of {known}")
    family = FAMILIES[kind]
    config = _Keys(family, given, file).read()
    _check_length(config, sequence_length, file)
    counts = {block: config[key] for block, key in family.counts.items()}
    return Model(
        name=name,
        family=kind,
        config=_described(family, given),
        sequence_length=sequence_length,
        layers=tuple(block for block, count in counts.items() for _ in range(count)),
        types={
            layer: _layer_type(family, config, layer, sequence_length) for layer in (EMBEDDING, *family.counts, HEAD)
        },
        tied=family.tied if family.always_tied or config.get("tie_word_embeddings") else (),
    )


class _Keys:
    """The keys of a configuration under their usual names, and under the family's own."""

    def __init__(self, family: Family, given: Mapping[str, Any], file: object) -> None:
        self.family, self.given, self.file = family, given, file

    def read(self) -> Config:
        own = {short: self.given[long] for short, long in self.family.names.items() if long in self.given}
        config = {**self.family.defaults, **self.given, **own}
        if isinstance(classes := self.given.get("id2label"), Mapping):
            config["num_labels"] = len(classes)
        if self.family.defaults.get("attention_bias") == "inputs":
            config["attention_bias"] = "inputs"
        hidden, heads = self._length(config, "hidden_size"), self._length(config, "num_attention_heads")
        if config.get("head_dim") is None:
            config["head_dim"] = hidden // heads
        if config.get("num_key_value_heads") is None:
            config["num_key_value_heads"] = heads
        if config["model_type"] == "gpt2":
            config["n_inner"] = config.get("n_inner") or 4 * hidden
        if config["model_type"] == "t5" and config.get("num_decoder_layers") is None:
            config["num_decoder_layers"] = config.get("num_hidden_layers")
        lengths = {*self.family.counts.values(), *self.family.divided, "head_dim", *_LENGTHS[config["model_type"]]}
        for key in sorted(lengths):
            config.setdefault(key, self._usual(config, key))
            self._length(config, key)
        for key in self.family.counts.values():
            if config[key] > MAX_LAYERS:
                raise BadInput(self.file, f"{key} {config[key]} is over {MAX_LAYERS}", "correct the configuration")
        return config

    def _usual(self, config: Config, key: str) -> object:
        """The value of a family's own word for a key."""
        return next((config.get(usual) for usual, own in self.family.names.items() if own == key), None)

    def _length(self, config: Config, key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_LENGTH:
            told = self.family.names.get(key, key)
            what = f"{told} is missing" if value is None else f"{told} {value!r} is no length"
            raise BadInput(self.file, what, "correct the configuration")
        return value


_LENGTHS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ("vocab_size",)),
    "gpt2": ("vocab_size", "max_position_embeddings"),
    "bert": ("vocab_size", "max_position_embeddings", "type_vocab_size"),
    "t5": ("vocab_size", "relative_attention_num_buckets"),
    "vit": ("image_size", "patch_size", "num_channels", "num_labels"),
}


def _check_length(config: Config, sequence_length: int, file: object) -> None:
    """As the runtime refuses them: positions that the model has not, and attention over a window."""
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and sequence_length > longest:
        raise BadInput(file, f"sequence length {sequence_length} is over {longest} positions", "lower --seq")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if isinstance(window, int) and sequence_length > window:
        what = f"sequence length {sequence_length} is over the sliding_window {window}: attention is whole"
        raise BadInput(file, what, "lower --seq")


def _described(family: Family, given: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as descriptions keep it: the layers are listed there, and classes need no names."""
    usual = set(family.counts.values())
    counted = usual | {own for short, own in family.names.items() if short in usual}
    kept = {key: value for key, value in given.items() if key not in counted | {"layer_types", "label2id"}}
    if (classes := kept.pop("id2label", None)) is not None:
        kept["num_labels"] = len(classes)
    return kept


def _layer_type(family: Family, config: Config, layer: str, sequence_length: int) -> LayerType:
    parameters, inside = tuple(family.layers(layer, config)), layer in family.counts
    labels = sequence_length if family.labels is None else family.labels
    positions = {EMBEDDING: sequence_length - family.positions_without_input, HEAD: labels}
    attended = sequence_length * len(_keys(family, layer)) if inside else 0
    products = 2 * sum(prod(p.shape) for p in parameters if _is_matrix(p))
    scores = 4 * attended * config["head_dim"] * config["num_attention_heads"]
    divided = family.divided if inside else ()
    outputs = (
        BoundaryTensor(name=name, sequence_length=sequence_length, features=config["hidden_size"])
        for name in family.states
    )
    return LayerType(
        parameters=parameters,
        forward_flops_per_sample=(products + scores) * positions.get(layer, sequence_length),
        tp_must_divide={key: config[key] for key in divided},
        ulysses_must_divide={"pooled_positions": 1}
        if layer == HEAD and family.whole_pool
        else {key: config[key] for key in divided[:1]},
        outputs=() if layer == HEAD else tuple(outputs),
        regions=tuple(_regions(family, config, layer, any(p.tp_dim is not None for p in parameters))),
        labels=labels if layer == HEAD else 0,
    )


def _is_matrix(parameter: Parameter) -> bool:
    *_, module, kind = parameter.name.split(".")
    return kind == "weight" and len(parameter.shape) > 1 and not module.endswith(_TABLES)


def _keys(family: Family, layer: str) -> tuple[str, ...]:
    """The states that each attention of a block attends to: its type's own, then those before."""
    number = list(family.counts).index(layer) if layer in family.counts else len(family.states) - 1
    return family.states[number::-1]


def _regions(family: Family, config: Config, layer: str, is_cut: bool) -> Iterator[Region]:
    own = _keys(family, layer)[0]
    if layer == EMBEDDING:
        yield from (Region(name="lookup", leaves=name) for name in family.states if is_cut)
        return
    if layer == HEAD:
        yield Region(name="logits", enters=(_keys(family, HEAD)[0],))
        return
    replays = family.replays if family.dropout is None or config[family.dropout] > 0 else ()
    for keys in _keys(family, layer):
        attention = Heads(
            queries=own,
            keys=keys,
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_features=config["head_dim"],
        )
        enters = tuple(dict.fromkeys((own, keys)))
        yield Region(name="attention", enters=enters, leaves=own, attention=attention, replays_sum=replays)
    yield Region(name="mlp", enters=(own,), leaves=own, replays_sum=replays)
