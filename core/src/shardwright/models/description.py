"""A model description from a config.json by its family's facts: equal to what `shardwright train describe` writes.

Values that do not change shapes are not checked: `describe` checks whether the runtime can train the model.
"""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from shardwright.io import BadInput
from shardwright.models.alike import read_config
from shardwright.models.config_keys import is_length, is_number, known_keys, not_a_length, without_notes, wrong_values
from shardwright.models.facts import Family
from shardwright.models.registry import FAMILIES
from shardwright.models.traits import ATTENDED, MULTIPLIED, POSITIONS, VALUES, Config
from shardwright.types.limits import MAX_LAYERS
from shardwright.types.model import EMBEDDING, HEAD, BoundaryTensor, Experts, Heads, LayerType, Model, Parameter, Region

_TABLES = (
    "embed_tokens",
    "wte",
    "wpe",
    "embeddings",
    "position_embedding",
    "pos_embed",
    "embed_positions",
    "shared",
    "relative_attention_bias",
)
"""Modules that are looked up in, not multiplied."""
_HEADS = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_features": "head_dim"}
CHUNK = "attention_chunk_size"
"""The key for the length of chunks across whose borders some blocks do not attend."""
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
"""Keys for the longest sequence of a model without facts."""
USUAL_TOKENS = 4096
"""Default tokens of a sample, as in the training of many models of 2023 to 2025."""
_STRETCHING = ("linear", "dynamic", "yarn")
"""Kinds of rotary scaling that multiply the number of positions by their factor."""


class Contents(NamedTuple):
    """The parameters of a layer type, and the number of elements of its matrices without tables, experts and router."""

    parameters: tuple[Parameter, ...]
    products: int

    @property
    def is_cut(self) -> bool:
        """Return whether tensor parallelism shards any of these parameters."""
        return any(p.tp_dim is not None for p in self.parameters)


def model_of_config(given: Config, name: str, sequence_length: int | None, file: object) -> Model:
    """Return the description of a configuration for samples of `sequence_length` tokens; None: the usual length.

    Raises BadInput, naming `file`, for families without facts, for keys of other models, and for keys that are missing
    or not lengths; and naming --seq for a length that is missing or does not suit the configuration.
    """
    given = read_config(given, file).config
    family = FAMILIES[given["model_type"]]
    config = _checked(family, given, file)
    if sequence_length is None and (sequence_length := usual_length(family, config)) is None:
        raise BadInput("--seq", f"{file} does not state the sample length", "give it, in tokens")
    if (wrong := wrong_length(family, config, sequence_length)) is not None:
        raise BadInput("--seq", f"{wrong} in {file}", "give another")
    try:
        kept, _ = without_notes(family, given)
    except ValueError as error:
        raise BadInput(file, str(error), "correct the configuration") from None

    def contents(layer: str) -> Contents:
        parameters = tuple(family.parameters(layer, config))
        return Contents(parameters, sum(prod(p.shape) for p in parameters if _is_matrix(family, p)))

    return described_model(family, config, kept, name, sequence_length, contents)


def described_model(
    family: Family, config: Config, given: Config, name: str, sequence_length: int, contents: Callable[[str], Contents]
) -> Model:
    """Return a description from the contents of each layer type; `config` is `given` with defaults filled in."""
    layers = family.described_layers(config, sequence_length)
    kinds = (EMBEDDING, *dict.fromkeys(layers), HEAD)
    return Model(
        name=name,
        family=family.model_type,
        config=family.described(given),
        sequence_length=sequence_length,
        layers=layers,
        types={layer: _layer_type(family, config, layer, sequence_length, contents(layer)) for layer in kinds},
        tied=family.stock.tied if config.get("tie_word_embeddings") else (),
    )


def usual_length(family: Family, config: Config) -> int | None:
    """Return the default tokens of a sample: an image's positions, or `USUAL_TOKENS` if that many are possible.

    None if the configuration has no limit.
    """
    if (fixed := family.fixed_positions(config)) is not None:
        return fixed
    longest, _ = _longest(family, config)
    return None if longest is None else min(USUAL_TOKENS, longest)


def stated_length(config: Config) -> int | None:
    """Return the default tokens of a sample of a model without facts; None if its file has no limit."""
    if isinstance(text := config.get("text_config"), Mapping):
        config = {**text, **config}
    longest = next((config[key] for key in _LIMITS if isinstance(config.get(key), int)), None)
    return None if longest is None else min(USUAL_TOKENS, longest)


def wrong_length(family: Family, config: Config, sequence_length: int) -> str | None:
    """Return why a sample length is not possible, or None if it is.

    It may exceed the model's positions, differ from an image's positions, or exceed a window that the family's blocks
    do not implement.
    """
    fixed = family.fixed_positions(config)
    if fixed is not None and sequence_length != fixed:
        return f"sequence length {sequence_length} is not the {fixed} positions of an image"
    if sequence_length < (least := family.least_positions(config)):
        return f"sequence length {sequence_length} is under {least}: those of an image, and of a text"
    longest, why = _longest(family, config)
    if longest is not None and sequence_length > longest:
        return f"sequence length {sequence_length} is over {longest} positions ({why})"
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    reads_window = "sliding_window" in known_keys(family) and family.attention.window is None
    if reads_window and isinstance(window, int) and sequence_length > window:
        return f"sequence length {sequence_length} is over the sliding_window {window}: attention is whole"
    if isinstance(chunk := config.get(CHUNK), int) and sequence_length > chunk:
        return f"sequence length {sequence_length} is over the {CHUNK} {chunk}: attention is whole"
    return None


def _longest(family: Family, config: Config) -> tuple[int | None, str]:
    """Return the largest number of positions that a configuration allows (None: no limit), and the keys that set it.

    Linear, dynamic and YaRN scaling multiply the original positions by their factor; for other kinds of scaling
    max_position_embeddings is already the multiplied number (transformers, modeling_rope_utils).
    """
    key = family.keys.aliases.get("max_position_embeddings", "max_position_embeddings")
    longest = config.get("max_position_embeddings")
    if not isinstance(longest, int):
        return None, key
    if before := family.attention.positions_before(config):
        return longest - before, f"{key} {longest}, of which tokens have none of the first {before}"
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(name)
    if not isinstance(scaling, Mapping) or scaling.get("rope_type", scaling.get("type")) not in _STRETCHING:
        return longest, key
    original, factor = scaling.get("original_max_position_embeddings") or longest, scaling.get("factor", 1)
    if not is_length(original) or not is_number(factor) or original * factor <= longest:
        return longest, key
    return int(original * factor), f"{key} {original} x factor {factor:g} of {name}"


def wrong_types(family: Family, config: Config) -> str | None:
    """Return what is wrong with the blocks' types in a configuration (a list of types, or experts), or None."""
    for stack in family.stacks:
        if (listed := stack.listed(config)) is None:
            continue
        if not isinstance(listed, list | tuple) or len(listed) != config[stack.counted_by]:
            return f"{stack.typed_by} is not a list of the types of {config[stack.counted_by]} layers"
        if unknown := [kind for kind in listed if kind not in stack.types]:
            return f"{stack.typed_by} {unknown[0]!r} is not one of {', '.join(map(str, stack.values))}"
        if stack.first is not None and listed[0] != stack.first:
            return f"{stack.typed_by} {listed[0]!r} cannot be the type of the first block"
    return None if family.experts is None else family.experts.wrong(config)


def wrong_window(family: Family, config: Config) -> str | None:
    """Return a message if the window of one of a configuration's blocks is not a valid length, or None."""
    if (window_of := family.attention.window) is None:
        return None
    for window in (window_of(layer, config) for layer in family.layers(config)):
        if window is not None and not is_length(window):
            return not_a_length("sliding_window", window)
    return None


def _checked(family: Family, given: Config, file: object) -> Config:
    """Return a configuration under the usual keys, with defaults, after checking the values from which shapes are read.

    Raises BadInput, naming `file`, for a value that is missing or invalid.
    """
    configured = family.configured(given)
    if (wrong := wrong_values(family, given) or family.keys.wrong(configured)) is not None:
        raise BadInput(file, wrong, "correct the configuration")
    read = family.of_layer(EMBEDDING, configured)
    for key in ("hidden_size", "num_attention_heads"):
        _length(family, read, key, file)
    if read.get("head_dim") is None and read["hidden_size"] % read["num_attention_heads"]:
        width, heads = (
            f"{family.keys.aliases.get(key, key)} {read[key]}" for key in ("hidden_size", "num_attention_heads")
        )
        raise BadInput(file, f"{width} is not a multiple of {heads}", "correct the configuration")
    config = family.completed(read)
    for key in sorted({*family.divided.lengths, *family.keys.lengths, "head_dim"}):
        _length(family, config, key, file)
    for stack in family.stacks:
        for number in stack.numbers(config):
            _check_length(family, number, stack.counted_by, file)
            if number > MAX_LAYERS:
                raise BadInput(file, f"{stack.counted_by} {number} is over {MAX_LAYERS}", "correct the configuration")
    if (wrong := wrong_types(family, config) or wrong_window(family, config)) is not None:
        raise BadInput(file, wrong, "correct the configuration")
    return config


def _length(family: Family, config: Config, key: str, file: object) -> None:
    _check_length(family, config.get(key), key, file)


def _check_length(family: Family, value: object, key: str, file: object) -> None:
    if not is_length(value):
        named = family.keys.aliases.get(key, key)
        problem = f"{named} is missing" if value is None else not_a_length(named, value)
        raise BadInput(file, problem, "correct the configuration")


def _pairs(positions: int, window: int | None) -> int:
    """Return the number of query-key pairs whose scores are computed: all, as if nothing was masked.

    A window leaves out the pairs before it, and as many after it.
    """
    return positions**2 - (0 if window is None else (positions - window) ** 2)


def _layer_type(family: Family, config: Config, layer: str, sequence_length: int, contents: Contents) -> LayerType:
    widths: Mapping[str, int] = family.state_features(config)
    config = family.of_layer(layer, config)
    states = {**dict.fromkeys(family.states, sequence_length), **family.state_lengths(config)}
    queried, *others = family.attended(layer)
    length: int = config.get(POSITIONS, states[queried])
    inside = layer not in (EMBEDDING, HEAD, *family.merging)
    labels = length if family.labels is None else family.labels
    window = family.effective_window(layer, config, length) if inside else None
    pairs = length * config[ATTENDED] if ATTENDED in config else _pairs(length, window)
    pairs = pairs + sum(length * states[keys] for keys in others) if inside else 0
    values = config.get(VALUES, config["head_dim"])
    scores = 2 * pairs * (config["head_dim"] + values) * config["num_attention_heads"]
    # Keys and values of other states have those states' lengths.
    further = sum(states[keys] - length for keys in others) if inside else 0
    scores += 4 * further * config["hidden_size"] * config["head_dim"] * config["num_key_value_heads"]
    divided = {key: config[key] for key in family.split(layer)} if inside else {}
    experts = family.experts_of(layer, config)
    products = contents.products + _chosen_products(family, config, experts)
    heads = {key: config[key] for key in family.divided.lengths[:1]} if inside else {}
    handed = (
        BoundaryTensor(
            name=name,
            sequence_length=config.get(POSITIONS, states[name]),
            features=widths[name] if name in widths else config["hidden_size"],
        )
        for name in family.handed_on(layer)
    )
    return LayerType(
        parameters=contents.parameters,
        forward_flops_per_sample=2 * products * multiplied_positions(family, config, layer, sequence_length) + scores,
        tp_must_divide=divided | _one_rank(family.divided.tensor, layer),
        ulysses_must_divide=heads | _one_rank(family.divided.ulysses, layer),
        sequence_must_divide=_whole_sequence(family, config, layer) or UNSET,
        outputs=() if layer == HEAD else tuple(handed),
        regions=tuple(_regions(family, config, layer, contents.is_cut, window)),
        labels=labels if layer == HEAD else 0,
        experts=experts,
    )


def multiplied_positions(family: Family, config: Config, layer: str, sequence_length: int) -> int:
    """Return the number of positions per sample that a layer type's matrices multiply; `config`: the type's values."""
    states = {**dict.fromkeys(family.states, sequence_length), **family.state_lengths(config)}
    length: int = config.get(POSITIONS, states[family.attended(layer)[0]])
    if (multiplied := config.get(MULTIPLIED)) or layer not in (EMBEDDING, HEAD):
        return multiplied or length
    if layer == HEAD:
        return length if family.labels is None else family.labels
    embedded: int = config.get(POSITIONS, states[family.states[0]])
    return embedded - (0 if family.vision is None else family.vision.without_input)


def _chosen_products(family: Family, config: Config, experts: Experts | UnsetType) -> int:
    """Return the number of elements of the matrices that multiply each position: the router and the chosen experts."""
    if experts is UNSET:
        return 0
    matrices = 3 if family.feed_forward(config).gated else 2
    hidden: int = config["hidden_size"]
    # Shared experts are matrices like others.
    return hidden * (experts.number + experts.top_k * matrices * experts.features)


def _whole_sequence(family: Family, config: Config, layer: str) -> dict[str, int]:
    """Return the entries that keep sequences whole on each rank, for layers such as attention within an image."""
    apart = {ATTENDED: 1} if ATTENDED in config and layer not in (EMBEDDING, HEAD) else {}
    return _one_rank(family.divided.sequence, layer) or apart


def _one_rank(undivided: Config, layer: str) -> dict[str, int]:
    return {undivided[layer]: 1} if layer in undivided else {}


def _is_matrix(family: Family, parameter: Parameter) -> bool:
    if parameter.name in family.stock.matrices:
        return True
    path, _, kind = parameter.name.rpartition(".")
    others = path.endswith((*_TABLES, "norm")) or (family.experts is not None and path == family.experts.router)
    return kind == "weight" and len(parameter.shape) > 1 and not others


def _regions(family: Family, config: Config, layer: str, is_cut: bool, window: int | None) -> Iterator[Region]:
    stream = family.attended(layer)[0]
    if layer == EMBEDDING:
        looked_up = (name for name in family.states if name not in family.state_lengths(config))
        yield from (Region(name="lookup", leaves=name) for name in looked_up if is_cut)
        return
    if layer in family.merging:
        return
    if layer == HEAD:
        yield Region(name="logits", enters=(stream,))
        return
    replays = family.of_type(layer, config).replays_sum(config)
    shape = {name: config[key] for name, key in _HEADS.items()}
    shape |= {"value_features": config[VALUES]} if config.get(VALUES, config["head_dim"]) != config["head_dim"] else {}
    for keys in family.attended(layer):
        further = {"alibi": family.attention.alibi(config), "sinks": family.attention.sinks}
        attention = Heads(queries=stream, keys=keys, **shape, window=window, **further)
        enters = tuple(dict.fromkeys((stream, keys)))
        yield Region(name="attention", enters=enters, leaves=stream, attention=attention, replays_sum=replays)
    yield Region(name="mlp", enters=(stream,), leaves=stream, replays_sum=replays)
