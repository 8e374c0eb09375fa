"""The facts of a model family: what estimates, exports and the runtime must agree on, in one frozen value."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.models.traits import (
    BLOCK,
    AttentionFacts,
    Config,
    Divided,
    Dropouts,
    ExpertKeys,
    FeedForward,
    Keys,
    Layers,
    Mask,
    Norm,
    Recomputation,
    Stack,
    StockModel,
    Systems,
)
from shardwright.types import FUSED_SDPA, Attention, Experts

_NAMES = frozenset(("auto_map", "id2label", "label2id", "transformers.js_config"))
"""Keys of a config.json that descriptions leave out: names of classes and of code, and settings for browsers."""


class Vision(NamedTuple):
    """Images: whole samples with one label each, or parts of samples of text."""

    positions: Callable[[Config], int]
    """Function that returns the number of positions that the images of a sample take."""
    without_input: int = 0
    """Number of positions for which the embedding multiplies nothing: the class token of an image has no patch."""
    tower: Callable[[str, Config], "Family | None"] | None = None
    """Function that returns the facts of a block type of the tower, which is another family's, else None; None if an
    image is a whole sample."""
    assumed: Callable[[Config], str] | None = None
    """Function that returns what is assumed about the images of a sample, in words, if configurations leave their size
    open."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a family, by keys of its config.json; facts that estimates or exports read have no default."""

    model_type: str
    """The family's name in a config.json, in descriptions and in transformers."""
    stock: StockModel
    runtime: str
    """File and class of the runtime that shard and call the stock model's modules, such as `llama:Llama`; empty if
    `untrained` is set."""
    keys: Keys
    parameters: Layers
    stacks: tuple[Stack, ...]
    divided: Divided
    attention: AttentionFacts
    norm: Norm
    feed_forward: Callable[[Config], FeedForward]
    dropouts: Dropouts
    shapes: Callable[[str, Config], Config] = lambda _layer, _config: {}
    """Function that returns, for a layer type, the values of keys that differ from type to type, such as width and
    heads."""
    experts: ExpertKeys | None = None
    vision: Vision | None = None
    systems: Systems = Systems()
    untrained: str | None = None
    """Why the family's models are described, estimated and planned, but not trained; None if they are trained."""
    mtp_trained: tuple[str, ...] = ()
    """Model types whose layers for multi-token prediction (MTP) are trained; they were compared with one process.
    Derived families inherit this value, so it lists model types."""

    @property
    def kernels(self) -> tuple[Attention, ...]:
        """Return the attention kernels that the family's blocks can use.

        Flash kernels cannot add a bias or a sink to the scores, and cuDNN's cannot learn a bias; sdpa kernels cannot
        soft-cap scores, which transformers would ignore.
        """
        facts, biased = self.attention, self.attention.mask is Mask.BIAS
        unfit = {Attention.AUTO, *((Attention.FLASH_ATTENTION_2,) if biased or facts.sinks else ())}
        unfit |= {Attention.SDPA_FLASH, Attention.SDPA_CUDNN} if biased else set()
        if facts.soft_caps:
            unfit |= {*FUSED_SDPA, Attention.SDPA_MATH}
        return tuple(kernel for kernel in Attention if kernel not in unfit.union(facts.without))

    @property
    def states(self) -> tuple[str, ...]:
        """Return the boundary tensors that are passed from each layer to the next, one for each stack."""
        return tuple(stack.state for stack in self.stacks)

    @property
    def counts(self) -> tuple[str, ...]:
        """Return the keys that state the number of layers, one for each stack."""
        return tuple(stack.counted_by for stack in self.stacks)

    @property
    def labels(self) -> int | None:
        """Return the number of labels of a sample; None if each position has a label."""
        return None if self.vision is None or self.vision.tower is not None else 1

    def fixed_positions(self, config: Config) -> int | None:
        """Return the number of positions of each sample if the configuration fixes it; None for texts of any length."""
        return None if self.vision is None or self.vision.tower is not None else self.vision.positions(config)

    def least_positions(self, config: Config) -> int:
        """Return the fewest positions of a sample: the positions of its images, and one of text."""
        return 1 if self.vision is None or self.vision.tower is None else self.vision.positions(config) + 1

    @property
    def merging(self) -> tuple[str, ...]:
        """Return the layer types that merge patches: without attention, and with outputs of another shape."""
        return tuple(kind for stack in self.stacks for kind in stack.merging)

    @property
    def joined_by(self) -> str | None:
        """Return the layer type that joins all states into the last one, or None if there is no such type."""
        return next((stack.joined_by for stack in self.stacks if stack.joined_by is not None), None)

    def state_lengths(self, config: Config) -> dict[str, int]:
        """Return the lengths of boundary tensors that differ from the length of a text sample, by tensor."""
        return {stack.state: stack.length(config) for stack in self.stacks if stack.length is not None}

    def state_features(self, config: Config) -> dict[str, int]:
        """Return the widths of boundary tensors that pass unchanged through layers of another width, by tensor."""
        return {stack.state: stack.features(config) for stack in self.stacks if stack.features is not None}

    def experts_of(self, layer: str, config: Config) -> Experts | UnsetType:
        """Return the experts of a layer type in a configuration; UNSET if it has none."""
        return UNSET if self.experts is None else self.experts.read(layer, config)

    def split(self, layer: str) -> tuple[str, ...]:
        """Return the keys of the lengths of a block type that tensor parallelism must divide, in order."""
        if self.experts is None or layer not in self.experts.types:
            return self.divided.lengths
        return (*self.divided.lengths[:-1], self.experts.features)

    def attended(self, layer: str) -> tuple[str, ...]:
        """Return the hidden states to which each attention of a block attends: its own stack's, then earlier stacks'.

        The head attends to the same states as the last stack.
        """
        number = next((n for n, stack in enumerate(self.stacks) if stack.has(layer)), len(self.stacks) - 1)
        return self.states[number::-1] if self.joined_by is None else self.states[number : number + 1]

    def handed_on(self, layer: str) -> tuple[str, ...]:
        """Return the hidden states that a layer type passes on: all, or only the last one after they are joined."""
        joined = self.joined_by is not None and (layer == self.joined_by or self.stacks[-1].has(layer))
        return self.states[-1:] if joined else self.states

    def of_type(self, layer: str, config: Config) -> "Family":
        """Return the facts for a block type: the vision tower's facts for the tower's blocks, else these facts."""
        tower = None if self.vision is None else self.vision.tower
        return (None if tower is None else tower(layer, config)) or self

    def layers(self, config: Config) -> tuple[str, ...]:
        """Return the type of each block of a configuration, in order."""
        return tuple(layer for stack in self.stacks for layer in stack.layers(config))

    def described_layers(self, config: Config, sequence_length: int) -> tuple[str, ...]:
        """Return the layer types as descriptions list them: blocks that are equal at this length get the same type."""
        return tuple(layer for stack in self.stacks for layer in self._alike(stack, config, sequence_length))

    def effective_window(self, layer: str, config: Config, sequence_length: int) -> int | None:
        """Return the attention window of a block type; None if attention covers whole samples."""
        window_of = self.attention.window
        window = None if window_of is None else window_of(layer, config)
        return window if window is not None and window < sequence_length else None

    def _alike(self, stack: Stack, config: Config, sequence_length: int) -> Sequence[str]:
        layers = stack.layers(config)
        whole = all(self.effective_window(layer, config, sequence_length) is None for layer in {*layers})
        return [BLOCK] * len(layers) if whole and stack.may_be_alike(config) else layers

    def counted(self, layers: Sequence[str], config: Config) -> dict[str, Any]:
        """Return the keys that state the number of layers or their types, with the values for these layers.

        If a configuration states them by rules, the rules are kept.
        """
        configured = self.configured(config)
        counted: dict[str | None, dict[str, Any]] = {None: {}}
        for stack in self.stacks:
            key = stack.inside or self.keys.nested
            inner = counted.setdefault(key, dict(config.get(key) or {}) if key else {})
            inner.update(stack.counted(layers, configured))
            counted[None].update(stack.resets)
        if self.experts is not None:
            counted[self.keys.nested].update(self.experts.typed(configured, layers))
        return counted.pop(None) | {key: inner for key, inner in counted.items() if key is not None}

    def of_layer(self, layer: str, config: Config) -> Config:
        """Return a configuration with the values of a layer type."""
        return {**config, **self.shapes(layer, config)}

    def replays_sum(self, config: Config) -> tuple[Recomputation, ...]:
        """Return the kinds of recomputation that repeat their final sum, because a later operation saves its result."""
        return self.norm.ends or (self.dropouts.ends if self.drops(config) else ())

    def drops(self, config: Config) -> bool:
        """Return whether dropout applies to what blocks add to the hidden states."""
        return self.dropouts.hidden is not None and config[self.dropouts.hidden] > 0

    def configured(self, given: Config) -> dict[str, Any]:
        """Return a configuration with its defaults, under the usual names as well as the family's."""
        given = self.flat(given)
        config = {**self._under_both_names(self.keys.defaults), **self._under_both_names(given)}
        if isinstance(classes := given.get("id2label"), Mapping) and "num_labels" not in given:
            config["num_labels"] = len(classes)
        return config

    def completed(self, config: Config) -> Config:
        """Return a configuration with the keys that follow from the width and the number of heads."""
        usual = {"head_dim": config["hidden_size"] // (n := config["num_attention_heads"]), "num_key_value_heads": n}
        given = {key: value for key, value in config.items() if key not in usual or value is not None}
        return {**usual, **given, **self.keys.implied(config)}

    def described(self, given: Config) -> dict[str, Any]:
        """Return a configuration as descriptions store it: without counts of layers, names of classes, or code."""
        counted = {*self.counts, *(usual for usual, short in self.keys.aliases.items() if short in self.counts)}
        counted |= {"layer_types", *(key for stack in self.stacks for key in stack.typing_keys)}
        reset = {key for stack in self.stacks for key in stack.resets}
        kept = {key: given[key] for key in given if key not in counted | _NAMES | reset}
        for name in (self.keys.nested, *(stack.inside for stack in self.stacks)):
            if name is not None and isinstance(inner := given.get(name), Mapping):
                kept[name] = {key: inner[key] for key in inner if key not in counted}
        named = "num_labels" in self.keys.lengths and isinstance(given.get("id2label"), Mapping)
        return kept | {"num_labels": self.configured(given)["num_labels"]} if named else kept

    def flat(self, config: Config) -> Config:
        """Return the keys of the trained part and of the top level, which take precedence."""
        inner = None if self.keys.nested is None else config.get(self.keys.nested)
        if not isinstance(inner, Mapping):
            return config
        return {**inner, **config}

    def _under_both_names(self, config: Config) -> dict[str, Any]:
        named: dict[str, Any] = {}
        for usual, short in self.keys.aliases.items():
            if (key := short if short in config else usual) in config:
                named |= {usual: config[key], short: config[key]}
        return {**config, **named}
