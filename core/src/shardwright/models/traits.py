"""Traits of model families: groups of facts, of which `facts.Family` consists."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from msgspec import UNSET, UnsetType

from shardwright.types import Attention, Experts, Parameter, base_type

Config = Mapping[str, Any]
"""The keys of a config.json; after `configured`, absent keys have their defaults, under the usual names."""
Layers = Callable[[str, Config], Iterator[Parameter]]
"""Function that returns the parameters of a layer type, with the stock model's names and order."""
Recomputation = Literal["full", "attention", "mlp"]
BLOCK = "block"
"""The layer type in families with only one type of block."""
SLIDING, FULL = "sliding_attention", "full_attention"
"""Block types that differ by a sliding window, by transformers' names."""
DENSE, SPARSE = "dense", "sparse"
"""Block types without and with experts."""
OLDER_NAMES = ("gate", "gate_proj", "up_proj", "down_proj")
"""The value of `ExpertKeys.older_names` for models whose experts are named like feed-forward parts."""
POSITIONS = "positions"
"""The key under which `shapes` returns the number of positions that a layer type passes on."""
ATTENDED = "attended_positions"
"""The key under which `shapes` returns the number of positions that each position of a layer type attends to."""
MULTIPLIED = "multiplied_positions"
"""The key under which `shapes` returns the number of positions that a layer type's matrices multiply; None for all
positions."""
VALUES = "value_head_dim"
"""The key under which `implied` returns the width of a value head, if it differs from a key head's width."""
SINK_FEATURES = 8
"""Number of features added to a head if kernels without sinks compute it: 16 bytes in 16 bits, as GPUs require."""


class Only(NamedTuple):
    """The only value of a key with which models can be trained, and the reason."""

    value: object
    reason: str


class OtherName(NamedTuple):
    """Another model_type, whose models transformers computes in the same way as a family's models."""

    model_type: str
    family: str
    renamed: Mapping[str, str] = {}
    """The family's name of each key in files of this type, if it differs."""
    defaults: Config = {}
    """Values of absent keys, if they differ from the family's defaults."""


class StockModel(NamedTuple):
    """The class of transformers that is trained, and how it names and stores parameters."""

    name: str
    """Name of the class."""
    tied: tuple[tuple[str, str], ...]
    """Pairs of parameters of embedding and head that are the same if the configuration sets tie_word_embeddings."""
    places: Mapping[str, str] = {}
    """Paths of block types, with {} for a block's number; by default model.layers.{}."""
    module: str | None = None
    """The module of transformers.models that contains the class; None if it has the model_type's name."""
    architecture: str | None = None
    """The class that files specify; None if it is the stock class."""
    stacked: Mapping[str, tuple[str, ...]] = {}
    """Matrices of files, by their paths in a block, in which the rows of several matrices are stacked, in this
    order."""
    outputs_last: bool = False
    """Whether the matrices of its blocks are [inputs, outputs], as in a Conv1D of transformers."""
    matrices: tuple[str, ...] = ()
    """Parameters that are used as matrices although they are not modules."""


class Keys(NamedTuple):
    """How a family reads a config.json."""

    defaults: Config
    """Defaults of transformers for keys that published files omit."""
    lengths: tuple[str, ...]
    """Further keys that determine the shapes of parameters, each at least 1."""
    aliases: Mapping[str, str] = {}
    """The family's names of keys, by their usual names."""
    implied: Callable[[Config], Config] = lambda _: {}
    """Function that returns further keys, whose values follow from others."""
    nested: str | None = None
    """The key under which the trained part's keys are nested, such as vision_config; None if they are at the top
    level."""
    wrong: Callable[[Config], str | None] = lambda _: None
    """Function that returns what is wrong with a combination of keys, or with keys that are not lengths, or None."""
    above_zero: tuple[str, ...] = ()
    """Keys whose values must be greater than 0, unless they are null."""
    ignored: tuple[str, ...] = ()
    """Keys of a config.json that transformers does not list and that are read here, or that have no effect."""
    only: Mapping[str, Only] = {}
    """Keys for which only one value is supported in training."""
    rotary: tuple[str, ...] = ()
    """Further keys of the family's rope_parameters."""


class Divided(NamedTuple):
    """The lengths that a strategy's degrees must divide."""

    lengths: tuple[str, ...]
    """Keys of lengths that tensor parallelism must divide: first the heads, which Ulysses must divide, too; last the
    feed-forward width."""
    tensor: Mapping[str, str] = {}
    """Names, by layer type, of something that tensor parallelism cannot divide, so that tp_size must be 1."""
    ulysses: Mapping[str, str] = {}
    """Names, by layer type, of something that Ulysses cannot divide, so that its degree must be 1."""
    sequence: Mapping[str, str] = {}
    """Names, by layer type, of something that requires whole sequences on each rank, such as windows of an image."""


class Mask(StrEnum):
    """The mask of a block's attention."""

    NONE = "none"
    CAUSAL = "causal"
    PADDING = "padding"
    BIAS = "bias"
    """A bias that the block itself adds to its scores."""


class Latents(NamedTuple):
    """The widths of latents, from which each head computes its queries, keys and values (DeepSeek-AI 2024)."""

    queries: int | None
    """Width of the queries' latents, which are normed; None if queries are computed from the hidden states."""
    keys: int
    """Width of the latents of keys and values, which are normed."""
    rotated: int
    """Number of rotated features of keys, which all heads share."""


class AttentionFacts(NamedTuple):
    """Facts of attention: its mask, its positions, and its differences from plain attention."""

    mask: Mask
    positions: Literal["learned_absolute", "relative", "rope"]
    """The encoding of positions, in Megatron-LM's terms."""
    window: Callable[[str, Config], int | None] | None = None
    """Function that returns the sliding window of a block type: how many positions a position attends to, ending with
    itself; None for all of them.

    If attention is not causal, a position attends to as many positions after it. Families without this function require
    samples that are not longer than the configuration's sliding_window.
    """
    latents: Callable[[Config], Latents | None] = lambda _: None
    """Function that returns the latents from which queries, keys and values are computed, or None if they are computed
    from the hidden states."""
    positions_before: Callable[[Config], int] = lambda _: 0
    """Function that returns the number of rows in the table of positions before the row of a sample's first token."""
    alibi: Callable[[Config], bool] = lambda _: False
    """Function that returns whether scores decrease with the distance of positions, with a slope per head (ALiBi, Press
    et al. 2022), by a mask for each head."""
    sinks: bool = False
    """Whether the softmax over a position's scores includes one more learned score per head, which has no value."""
    soft_caps: bool = False
    """Whether logits and attention scores are soft-capped by hyperbolic tangents, which sdpa would ignore."""
    normed_heads: Callable[[str, Config], bool] = lambda _layer, _config: False
    """Function that returns whether a block type norms queries and keys without weights, in float32."""
    images_ahead: bool = False
    """Whether positions of an image attend to the whole image, including later positions."""
    joins_features: bool = False
    """Whether a head's features are joined after some were rotated; attention's output is then kept in two layouts."""
    keeps_unrotated: bool = False
    """Whether queries and keys are also kept unrotated, because one tensor holds them together with the values."""
    without: tuple[Attention, ...] = ()
    """Attention kernels that transformers does not support for the family's blocks."""


class Norm(NamedTuple):
    """The norm of the hidden states."""

    kind: Literal["LayerNorm", "RMSNorm"]
    epsilon: str | None
    """The key of the constant that is added to the variance; None if it is torch's default."""
    ends: tuple[Recomputation, ...]
    """The kinds of recomputation that end with a norm, which keeps its input."""
    in_float32: bool = False
    """Whether the norm multiplies by its weights in float32, whatever the format of its input."""
    of_part: int = 1
    """Number of norms of each part of a block: 2 if there is one before it and one after it."""
    shared: bool = False
    """Whether both parts of a block read the output of one norm, and are added to the residual stream together."""
    of_head: Callable[[Config], bool] = lambda _: False
    """Function that returns whether the rows of the head's matrix are normalized to unit length."""


class FeedForward(NamedTuple):
    """The activation function of a block, by transformers' name, and whether the feed-forward layer is gated."""

    activation: str
    gated: bool


class Dropouts(NamedTuple):
    """The keys of the dropout rates of a block's parts and of the embedding; None without dropout."""

    attention: str
    hidden: str | None
    """The key of the rate for what a block adds to the hidden states."""
    embedding: str | None = None
    path: str | None = None
    """The key of the rate at which a sample skips a whole part of the last block; it is lower for earlier blocks (Huang
    et al. 2016)."""
    ends: tuple[Recomputation, ...] = ()
    """The kinds of recomputation that end with a dropout of hidden states, which keeps its mask."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the configuration keys of dropout rates, each once."""
        rates = self.attention, self.hidden, self.embedding, self.path
        return tuple(dict.fromkeys(key for key in rates if key is not None))


class Routing(NamedTuple):
    """How the experts of a position are chosen by their scores, and weighted."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the router's outputs into scores."""
    normalized: bool = True
    """Whether the weights of a position's experts are divided by their sum."""
    scale: float = 1.0
    """Factor by which the weights are multiplied."""
    groups: tuple[int, int] | None = None
    """The number of groups of experts, and the number of groups from which a position chooses; None without groups."""
    best_of_group: int = 1
    """Number of highest scores in a group whose sum is the group's score."""
    corrected: bool = False
    """Whether each expert has a correction that is added to its scores for the choice, and balances the load."""


class ExpertKeys(NamedTuple):
    """The configuration keys for experts: in which blocks, how many, and how the router chooses them."""

    number: str
    features: str
    """The key of the hidden features of one expert."""
    top_k: str = "num_experts_per_tok"
    balance: str = "router_aux_loss_coef"
    """The key of the strength of the balance loss."""
    router: str = "mlp.gate"
    """Path in a block of the module whose matrix [experts, hidden] scores the experts."""
    router_is_linear: bool = False
    """Whether the stock model's router is a Linear, which also returns scores."""
    older_names: tuple[str, ...] = ()
    """Ends of the names that the router and an expert's matrices (gate, up, down) had in transformers 4.

    If an adapter names one of them, peft adapts the router, or the fused matrices of all experts.
    """
    router_first: bool = False
    """Whether the stock model lists the router's matrix before the experts' matrices."""
    without: str | None = None
    """The key that lists the numbers of blocks without experts."""
    step: str | None = None
    """The key of the interval of blocks with experts: the last block of each interval has them."""
    types: tuple[str, ...] = (SPARSE,)
    """The block types that have experts."""
    kept: int = 5
    """Number of tensors of an expert's width that are kept for a row: 5 for two matrix products, the activation, the
    gated product, and the weighted product."""
    rows: int = 1
    """Number of copies that are kept of a row: 2 if it is weighted before the first matrix product."""
    first: str | None = None
    """The key of the number of blocks before the first one with experts."""
    shared: str | None = None
    """The key of the number of shared experts, which compute every position together as one wider expert."""
    balance_of: Literal["model", "layer"] = "model"
    """Whether the balance loss is a mean over layers, or a sum over layers divided by the number of experts per
    position."""
    routing: Callable[[Config], Routing] = lambda _: Routing()
    """Function that returns how experts are chosen."""

    def type_at(self, config: Config, index: int) -> str:
        """Return the type of a block by its index."""
        step = 1 if self.step is None else config[self.step]
        if self.first is not None and index < (config[self.first] or 0):
            return DENSE
        return DENSE if index in self._without(config) or (index + 1) % step else SPARSE

    def typed(self, config: Config, layers: Sequence[str]) -> dict[str, Any]:
        """Return the keys that state the types of these layers, if the configuration's rules imply other types."""
        types = [base_type(layer) for layer in layers]
        if [self.type_at(config, i) for i in range(len(types))] == types:
            return {}
        if self.first is not None:
            return {self.first: types.count(DENSE)}
        if self.without is None:
            return {}
        dense: dict[str, Any] = {self.without: [i for i, kind in enumerate(types) if kind == DENSE]}
        return dense if self.step is None else {**dense, self.step: 1}

    def read(self, layer: str, config: Config) -> Experts | UnsetType:
        """Return the experts of a layer type under a configuration; UNSET if it has none."""
        if layer not in self.types:
            return UNSET
        features: int = config[self.features]
        shared = UNSET if self.shared is None else config[self.shared] * features
        return Experts(number=config[self.number], top_k=config[self.top_k], features=features, shared_features=shared)

    def wrong(self, config: Config) -> str | None:
        """Return what is wrong with a configuration's experts, or None; lengths were checked before."""
        if config[self.top_k] > (number := config[self.number]):
            return f"{self.top_k} {config[self.top_k]} is over {self.number} {number}"
        first = 0 if self.first is None else config[self.first] or 0
        if not isinstance(first, int) or first < 0:
            return f"{self.first} {first!r} is not a number of layers"
        listed = self._without(config)
        if not isinstance(listed, list | tuple) or not all(isinstance(index, int) for index in listed):
            return f"{self.without} {listed!r} is not a list of numbers of layers"
        return None

    def _without(self, config: Config) -> Sequence[int]:
        return () if self.without is None else config.get(self.without) or ()


class Stack(NamedTuple):
    """A stack of blocks: their number, the type of each, and the hidden states that they pass on."""

    counted_by: str = "num_hidden_layers"
    """The configuration key of the number of blocks."""
    types: tuple[str, ...] = (BLOCK,)
    type_at: Callable[[Config, int], str] = lambda _config, _index: BLOCK
    """Function that returns the type of a block by its index, if no key lists it."""
    state: str = "hidden_states"
    """Name of the boundary tensor that the stack's blocks change."""
    typed_by: str | None = None
    """The configuration key, such as layer_types, that lists the type of each block by the names in `types`."""
    first: str | None = None
    """The type that only the first block has; None if there is no such type."""
    written: Mapping[str, object] = {}
    """The values that the key `typed_by` lists instead of the names of types."""
    inside: str | None = None
    """The key under which the stack's keys are nested, such as vision_config; None if they are with the family's."""
    resets: Mapping[str, object] = {}
    """Top-level keys of the configuration, with values under which only the counted blocks exist."""
    lists: tuple[str, ...] = ()
    """Additional keys that state the types of single blocks, from which `type_at` derives a type."""
    alike_within_window: bool = False
    """Whether the types differ only by their windows: if these cover whole samples, each block is a `BLOCK`."""
    merging: tuple[str, ...] = ()
    """Types without attention that pass on other shapes; every rank computes them for all positions that it holds."""
    joined_by: str | None = None
    """The type whose output joins all states into the last; None if blocks may attend to states of earlier stacks."""
    length: Callable[[Config], int] | None = None
    """Function that returns the positions of the stack's state, such as frames of a spectrogram; None if they are the
    positions of a text sample."""
    features: Callable[[Config], int] | None = None
    """Function that returns the width of the stack's state, if it passes unchanged through layers of another width;
    None if each layer determines the width."""

    @property
    def typing_keys(self) -> tuple[str, ...]:
        """Return the keys that state the types of single blocks."""
        return self.lists if self.typed_by is None else (self.typed_by, *self.lists)

    @property
    def values(self) -> tuple[object, ...]:
        """Return the values that `typed_by` may list."""
        return tuple(self.written.get(kind, kind) for kind in self.types)

    def listed(self, config: Config) -> Sequence[str] | None:
        """Return the types that a configuration lists; None if `type_at` determines them."""
        listed = None if self.typed_by is None else config.get(self.typed_by)
        if not self.written or not isinstance(listed, list | tuple):
            return listed
        return [self._named(each, index) for index, each in enumerate(listed)]

    def layers(self, config: Config) -> Sequence[str]:
        """Return the type of each of the stack's blocks in a configuration, in order."""
        listed = self.listed(config)
        return self._by_rule(config) if listed is None else listed

    def may_be_alike(self, config: Config) -> bool:
        """Return whether a configuration may omit the types of the stack's blocks if they are all equal."""
        return self.alike_within_window and list(self.layers(config)) == self._by_rule(config)

    def has(self, layer: str) -> bool:
        """Return whether the stack has blocks of a type."""
        return layer in self.types or (self.alike_within_window and layer == BLOCK)

    def numbers(self, config: Config) -> Sequence[Any]:
        """Return the numbers of blocks in a configuration."""
        return (config.get(self.counted_by),)

    def counted(self, layers: Sequence[str], config: Config) -> dict[str, Any]:
        """Return the configuration keys that follow from the types of all blocks of a model, with their values."""
        inside = [base for layer in layers if self.has(base := base_type(layer))]
        lists = self.typed_by is not None and not (self.alike_within_window and BLOCK in inside)
        listed = [self.written.get(kind, kind) for kind in inside]
        return {self.counted_by: len(inside)} | ({self.typed_by: listed} if self.typed_by and lists else {})

    def _named(self, value: Any, index: int) -> Any:
        kinds = (kind for kind in self.types if index == 0 or kind != self.first)
        return next((kind for kind in kinds if self.written.get(kind, kind) == value), value)

    def _by_rule(self, config: Config) -> list[str]:
        return [self.type_at(config, i) for i in range(config[self.counted_by])]


Sizes = tuple[Any, ...]
"""Width, layers, heads, key heads (None with latents), feed-forward features, vocabulary, experts (None without)."""


class Torchtitan(NamedTuple):
    """A model of torchtitan 0.2.2, as registered in its `models/*/__init__.py`."""

    name: str
    flavors: Mapping[Sizes, str]
    """Names of the registered sizes."""
    pipelines: bool = True
    """Whether the model has a `pipelining_fn`; `train.py` refuses pipeline stages of a model without one."""
    contexts: bool = True
    """Whether its flavors have `sdpa` attention; flavors with `flex` refuse context parallelism."""
    ties: bool = False
    """Whether embedding and head may share their weights (`enable_weight_tying`)."""
    is_in_0_3: bool = True
    """Whether torchtitan 0.3 has the model and these sizes, too."""


class Systems(NamedTuple):
    """Facts for other systems that train the same model."""

    megatron: Literal["bridged", "alone"] | None = None
    """`alone` if Megatron-LM's GPT computes its blocks exactly, `bridged` if Megatron Bridge also reads its files; None
    if neither."""
    torchtitan: Torchtitan | None = None
