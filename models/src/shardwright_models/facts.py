"""The facts of a model family: what estimates, exports and the runtime must agree on, in one frozen value."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from shardwright_formats.types import Attention, Experts, Parameter
from shardwright_models.experts import DENSE, SPARSE, ExpertKeys
from shardwright_models.latents import Latents
from shardwright_models.stacks import BLOCK, FULL, SLIDING, Config, Stack
from shardwright_models.torchtitan import Torchtitan

__all__ = [
    "BLOCK",
    "DENSE",
    "FULL",
    "SLIDING",
    "SPARSE",
    "Config",
    "Dropouts",
    "ExpertKeys",
    "Family",
    "FeedForward",
    "Layers",
    "Mask",
    "Norm",
    "Only",
    "Recomputation",
    "Stack",
]

Layers = Callable[[str, Config], Iterator[Parameter]]
"""The parameters of a layer type, in the stock model's names and order."""
_NAMES = frozenset(("auto_map", "id2label", "label2id", "transformers.js_config"))
"""Keys of a config.json that descriptions leave out: names of classes, of code, and of files for browsers."""
Recomputation = Literal["full", "attention", "mlp"]
POSITIONS = "positions"
"""The key under which `shapes` gives the positions that a layer type hands on."""
ATTENDED = "attended_positions"
"""The key under which `shapes` gives the positions that each position of a layer type attends to."""
MULTIPLIED = "multiplied_positions"
"""The key under which `shapes` gives the positions that the matrices of a layer type multiply; None: all its own."""


class Mask(StrEnum):
    """Positions that a block's attention leaves out."""

    NONE = "none"
    CAUSAL = "causal"
    PADDING = "padding"
    BIAS = "bias"
    """A bias that the block itself adds to its scores."""


class Norm(NamedTuple):
    """The norm of the hidden states."""

    kind: Literal["LayerNorm", "RMSNorm"]
    epsilon: str | None
    """The key of what it adds to the variance; None: torch's default."""
    in_float32: bool = False
    """Whether it multiplies by its weights in float32, whatever the format of its input."""


class FeedForward(NamedTuple):
    """The activation function of a block, by transformers' name, and whether a second matrix gates it."""

    activation: str
    gated: bool


class Dropouts(NamedTuple):
    """The keys of the rates at which parts of a block or of the embedding are dropped; None: never."""

    attention: str
    hidden: str | None
    """The rate for the sums that a block adds to the hidden states."""
    embedding: str | None = None
    path: str | None = None
    """The rate at which a sample leaves out a whole part of a block (Huang et al. 2016), of the last block."""
    ends: tuple[Recomputation, ...] = ()
    """The kinds of recomputation whose end is a dropout of hidden states, which keeps its mask."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys, each once."""
        rates = self.attention, self.hidden, self.embedding, self.path
        return tuple(dict.fromkeys(key for key in rates if key is not None))


class Only(NamedTuple):
    """The only value of a key that can be trained, and why."""

    value: object
    reason: str


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a family, by keys of its config.json; those that estimates or exports read have no default."""

    model_type: str
    """Its name in a config.json, in descriptions and in transformers."""
    stock: str
    """The class of transformers that is trained."""
    runtime: str
    """File and class of the runtime that cut and call the stock model's modules, such as `llama:Llama`."""
    parameters: Layers
    stacks: tuple[Stack, ...]
    defaults: Config
    """Values that transformers gives to absent keys, for those that published files leave out."""
    lengths: tuple[str, ...]
    """Further keys that parameters take their shapes from, each 1 or more."""
    divided: tuple[str, ...]
    """Lengths that tensor parallelism must divide: first the heads, as Ulysses does, last those of the feed-forward."""
    tied: tuple[tuple[str, str], ...]
    """Parameters of embedding and head that are one where the configuration says tie_word_embeddings."""
    mask: Mask
    norm: Norm
    positions: Literal["learned_absolute", "relative", "rope"]
    """The encoding of positions, in Megatron-LM's words."""
    feed_forward: Callable[[Config], FeedForward]
    dropouts: Dropouts
    ends_in_norm: tuple[Recomputation, ...]
    """The kinds of recomputation whose end is a norm, which keeps its input."""
    modeling: str | None = None
    """The module of transformers.models that the stock class lives in; None: that of its model_type."""
    nested: str | None = None
    """The key that holds the keys of the part of a model that is trained, such as vision_config; None: they are top."""
    norms: int = 1
    """Norms of each part of a block: one before or behind it, or both."""
    parallel_parts: bool = False
    """Whether both parts of a block take in the output of one norm, and are added to the stream together."""
    joins_features: bool = False
    """Whether a head's features are joined after some were rotated; attention's output is then kept in two layouts."""
    keeps_unrotated: bool = False
    """Whether queries and keys are kept unrotated, too: one tensor holds them and the values."""
    latents: Callable[[Config], Latents | None] = lambda _: None
    """Function that tells of the latents that queries, keys and values come from (DeepSeek-AI 2024); None: of none."""
    normed_heads: Callable[[str, Config], bool] = lambda _layer, _config: False
    """Whether a type of block norms queries and keys without weights, in float32."""
    experts: ExpertKeys | None = None
    """The keys that tell of its experts; None: it has none."""
    soft_caps: bool = False
    """Whether hyperbolic tangents bound the logits, and attention scores: sdpa would ignore it."""
    without: tuple[Attention, ...] = ()
    """Kernels that transformers does not give its blocks."""
    sinks: bool = False
    """Whether softmax over a position's scores has a further, learned score of each head, which weighs nothing."""
    above_zero: tuple[str, ...] = ()
    """Keys whose numbers, where they are not null, must be above 0."""
    aliases: Mapping[str, str] = {}
    """The family's words for keys, by the usual ones."""
    implied: Callable[[Config], Config] = lambda _: {}
    """Further keys that follow from others."""
    window: Callable[[str, Config], int | None] | None = None
    """Positions that those of a type of block attend to at most, each its own the last; None: all before it.

    Where attention is not causal, they attend to as many behind them. Without this fact, samples must be no longer than
    the configuration's sliding_window.
    """
    shapes: Callable[[str, Config], Config] = lambda _layer, _config: {}
    """Keys whose values differ from layer type to layer type, such as width and heads, with those of one type."""
    merging: tuple[str, ...] = ()
    """Layer types that attend to nothing and hand on other shapes; every rank computes all that it has."""
    towers: Callable[[str, Config], "Family | None"] = lambda _layer, _config: None
    """Facts of a type of block that are another family's; None: they are these."""
    wrong: Callable[[Config], str | None] = lambda _: None
    """Function that names the fault of keys taken together, or of those that are no lengths; None: there is none."""
    alibi: Callable[[Config], bool] = lambda _: False
    """Whether scores fall with the distance of positions, by heads' slopes (Press et al. 2022), in a mask of each."""
    normed_head: Callable[[Config], bool] = lambda _: False
    """Whether the head multiplies with its matrix's rows made unit vectors."""
    undivided: Mapping[str, str] = {}
    """Names, by layer type, of something that tensor parallelism cannot divide: one rank has all of it."""
    undivided_by_ulysses: Mapping[str, str] = {}
    """Names, by layer type, of something that the Ulysses degree cannot divide."""
    undivided_sequence: Mapping[str, str] = {}
    """Names, by layer type, of something that takes a whole sequence on each rank, as windows of an image do."""
    state_lengths: Callable[[Config], Mapping[str, int]] = lambda _: {}
    """Positions of those boundary tensors that have others than a sample of text, such as frames of a spectrogram."""
    state_features: Callable[[Config], Mapping[str, int]] = lambda _: {}
    """Features of those boundary tensors that pass through layers of other widths unchanged."""
    joined_by: str | None = None
    """The type of layer that joins all states into the last; None: blocks may attend to those of stacks before."""
    images_ahead: bool = False
    """Whether positions of an image attend to all of it, those behind them included."""
    matrices: tuple[str, ...] = ()
    """Parameters that multiply without a module of their own."""
    least_positions: Callable[[Config], int] = lambda _: 1
    """The fewest positions of a sample, such as those of the image in it and one of text."""
    fixed_positions: Callable[[Config], int | None] = lambda _: None
    """Positions of each sample where the configuration tells them; None: samples of text are as long as is asked."""
    positions_before: Callable[[Config], int] = lambda _: 0
    """Rows of the table of positions before that of a sample's first token."""
    positions_without_input: int = 0
    """Positions that the embedding multiplies nothing for: a class of an image has no patch."""
    labels: int | None = None
    """Labels of a sample; None: one of each position."""
    megatron: Literal["bridged", "alone"] | None = None
    """Whether Megatron-LM's GPT runs its blocks exactly, and Megatron Bridge reads its files; None: neither."""
    torchtitan: Torchtitan | None = None
    """Its model in torchtitan; None: it has none."""
    architecture: str | None = None
    """The class that files name; None: `stock`."""
    ignored: tuple[str, ...] = ()
    """Keys of a config.json that mean something here, or nothing, and that transformers does not list."""
    only: Mapping[str, Only] = {}
    """Keys of which but one value can be trained."""
    rotary_keys: tuple[str, ...] = ()
    """Further keys of its rope_parameters."""

    @property
    def kernels(self) -> tuple[Attention, ...]:
        """Return the attention kernels that its blocks can use.

        flash_attention_2 cannot add a bias to the scores, nor a sink, and sdpa cannot bound them: transformers would
        ignore it.
        """
        unfit = {Attention.AUTO}
        if self.mask is Mask.BIAS or self.sinks:
            unfit.add(Attention.FLASH_ATTENTION_2)
        if self.soft_caps:
            unfit |= {Attention.SDPA, Attention.SDPA_MATH}
        return tuple(kernel for kernel in Attention if kernel not in unfit.union(self.without))

    @property
    def states(self) -> tuple[str, ...]:
        """Return the boundary tensors that cross from each layer to the next, one for each stack."""
        return tuple(stack.state for stack in self.stacks)

    @property
    def counts(self) -> tuple[str, ...]:
        """Return the keys that number the layers, one for each stack."""
        return tuple(stack.counted_by for stack in self.stacks)

    def experts_of(self, layer: str, config: Config) -> Experts | UnsetType:
        """Return the experts of a type of layer in a configuration; UNSET where it has none."""
        return UNSET if self.experts is None else self.experts.read(layer, config)

    def split(self, layer: str) -> tuple[str, ...]:
        """Return the keys of the lengths that tensor parallelism must divide in a type of block, as `divided` does."""
        if self.experts is None or layer not in self.experts.types:
            return self.divided
        return (*self.divided[:-1], self.experts.features)

    def attended(self, layer: str) -> tuple[str, ...]:
        """Return the states that each attention of a block attends to: its stack's, then those of stacks before.

        The head has those of the last stack.
        """
        number = next((n for n, stack in enumerate(self.stacks) if stack.has(layer)), len(self.stacks) - 1)
        return self.states[number::-1] if self.joined_by is None else self.states[number : number + 1]

    def handed_on(self, layer: str) -> tuple[str, ...]:
        """Return the states that a type of layer hands on: all, or the last alone once they are joined."""
        joined = self.joined_by is not None and (layer == self.joined_by or self.stacks[-1].has(layer))
        return self.states[-1:] if joined else self.states

    def of_type(self, layer: str, config: Config) -> "Family":
        """Return the facts of a type of block."""
        return self.towers(layer, config) or self

    def layers(self, config: Config) -> tuple[str, ...]:
        """Return the type of each block of a configuration, in order."""
        return tuple(layer for stack in self.stacks for layer in stack.layers(config))

    def described_layers(self, config: Config, sequence_length: int) -> tuple[str, ...]:
        """Return the types as descriptions list them: blocks that samples of a length make alike are of one."""
        return tuple(layer for stack in self.stacks for layer in self._alike(stack, config, sequence_length))

    def effective_window(self, layer: str, config: Config, sequence_length: int) -> int | None:
        """Return the window of a type of block; None where it holds a whole sample."""
        window = None if self.window is None else self.window(layer, config)
        return window if window is not None and window < sequence_length else None

    def _alike(self, stack: Stack, config: Config, sequence_length: int) -> Sequence[str]:
        layers = stack.layers(config)
        whole = all(self.effective_window(layer, config, sequence_length) is None for layer in {*layers})
        return [BLOCK] * len(layers) if whole and stack.may_be_alike(config) else layers

    def counted(self, layers: Sequence[str], config: Config) -> dict[str, Any]:
        """Return the keys that number the layers or list their types, with the values that say these layers.

        A configuration that says them by rules keeps these.
        """
        configured = self.configured(config)
        counted: dict[str | None, dict[str, Any]] = {None: {}}
        for stack in self.stacks:
            key = stack.inside or self.nested
            inner = counted.setdefault(key, dict(config.get(key) or {}) if key else {})
            inner.update(stack.counted(layers, configured))
            counted[None].update(stack.resets)
        if self.experts is not None:
            counted[self.nested].update(self.experts.typed(configured, layers))
        return counted.pop(None) | {key: inner for key, inner in counted.items() if key is not None}

    def of_layer(self, layer: str, config: Config) -> Config:
        """Return a configuration with the values that a layer type has."""
        return {**config, **self.shapes(layer, config)}

    def replays_sum(self, config: Config) -> tuple[Recomputation, ...]:
        """Return the kinds of recomputation that repeat the sum at their end, since something behind it is kept."""
        return self.ends_in_norm or (self.dropouts.ends if self.drops(config) else ())

    def drops(self, config: Config) -> bool:
        """Return whether blocks drop some of what they add to the hidden states."""
        return self.dropouts.hidden is not None and config[self.dropouts.hidden] > 0

    def configured(self, given: Config) -> dict[str, Any]:
        """Return a configuration with its defaults, under the usual names as well as the family's."""
        given = self._flat(given)
        config = {**self._under_both_names(self.defaults), **self._under_both_names(given)}
        if isinstance(classes := given.get("id2label"), Mapping) and "num_labels" not in given:
            config["num_labels"] = len(classes)
        return config

    def completed(self, config: Config) -> Config:
        """Return a configuration with the keys that follow from the width and the number of heads."""
        usual = {"head_dim": config["hidden_size"] // (n := config["num_attention_heads"]), "num_key_value_heads": n}
        given = {key: value for key, value in config.items() if key not in usual or value is not None}
        return {**usual, **given, **self.implied(config)}

    def described(self, given: Config) -> dict[str, Any]:
        """Return a configuration as descriptions keep it: with neither counts of layers, names of classes nor code."""
        counted = {*self.counts, *(usual for usual, short in self.aliases.items() if short in self.counts)}
        counted |= {"layer_types", *(key for stack in self.stacks for key in stack.typing_keys)}
        reset = {key for stack in self.stacks for key in stack.resets}
        kept = {key: given[key] for key in given if key not in counted | _NAMES | reset}
        for name in (self.nested, *(stack.inside for stack in self.stacks)):
            if name is not None and isinstance(inner := given.get(name), Mapping):
                kept[name] = {key: inner[key] for key in inner if key not in counted}
        named = isinstance(given.get("id2label"), Mapping)
        return kept | {"num_labels": self.configured(given)["num_labels"]} if named else kept

    def _flat(self, config: Config) -> Config:
        """Return the keys of the part that is trained with those beside it, which come first."""
        inner = None if self.nested is None else config.get(self.nested)
        if not isinstance(inner, Mapping):
            return config
        return {**inner, **config}

    def _under_both_names(self, config: Config) -> dict[str, Any]:
        named: dict[str, Any] = {}
        for usual, short in self.aliases.items():
            if (key := short if short in config else usual) in config:
                named |= {usual: config[key], short: config[key]}
        return {**config, **named}
