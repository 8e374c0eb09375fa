"""Traits of model families: values of facts that belong together, which `facts.Family` is made of."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from msgspec import UNSET, UnsetType

from shardwright.types import Attention, Experts, Parameter, base_type

Config = Mapping[str, Any]
"""The keys of a config.json; after `configured`, absent keys have their defaults, under the usual names."""
Layers = Callable[[str, Config], Iterator[Parameter]]
"""The parameters of a layer type, in the stock model's names and order."""
Recomputation = Literal["full", "attention", "mlp"]
BLOCK = "block"
"""The layer type of families that have one."""
SLIDING, FULL = "sliding_attention", "full_attention"
"""Types of block that differ by a sliding window, by transformers' names."""
DENSE, SPARSE = "dense", "sparse"
"""Types of block without and with experts."""
OLDER_NAMES = ("gate", "gate_proj", "up_proj", "down_proj")
"""The names of `ExpertKeys.older_names` in models whose experts are named as feed-forward parts are."""
POSITIONS = "positions"
"""The key under which `shapes` gives the positions that a layer type hands on."""
ATTENDED = "attended_positions"
"""The key under which `shapes` gives the positions that each position of a layer type attends to."""
MULTIPLIED = "multiplied_positions"
"""The key under which `shapes` gives the positions that a layer type's matrices multiply; None: all of its
positions."""
VALUES = "value_head_dim"
"""The key under which `implied` gives the width of a value head, if it differs from a key head's."""
SINK_FEATURES = 8
"""Further features of a head when kernels without sinks compute them: 16 bytes of 16 bits, as GPUs need."""


class Only(NamedTuple):
    """The only value of a key that can be trained, and why."""

    value: object
    reason: str


class OtherName(NamedTuple):
    """Another model_type whose models transformers computes in the same way as a family."""

    model_type: str
    family: str
    renamed: Mapping[str, str] = {}
    """The family's keys by those of the type's files."""
    defaults: Config = {}
    """Values of absent keys, where they differ from the family's."""


class StockModel(NamedTuple):
    """The class of transformers that is trained, and how it names and stores parameters."""

    name: str
    """Its class."""
    tied: tuple[tuple[str, str], ...]
    """Parameters of embedding and head that are one parameter if the configuration sets tie_word_embeddings."""
    places: Mapping[str, str] = {}
    """Paths of types of block, with {} for a block's number; by default model.layers.{}."""
    module: str | None = None
    """The module of transformers.models with the class; None: the model_type's."""
    architecture: str | None = None
    """The class that files name; None: the stock class."""
    stacked: Mapping[str, tuple[str, ...]] = {}
    """Matrices of files, by their paths in a block, in which the rows of several matrices are stacked in this order."""
    outputs_last: bool = False
    """Whether the matrices of its blocks are [inputs, outputs], as in a Conv1D of transformers."""
    matrices: tuple[str, ...] = ()
    """Parameters that are used as matrices although they are not modules."""


class Keys(NamedTuple):
    """How a family reads a config.json."""

    defaults: Config
    """Defaults of transformers for keys that published files omit."""
    lengths: tuple[str, ...]
    """Further keys that parameters take their shapes from, each 1 or more."""
    aliases: Mapping[str, str] = {}
    """The family's words for keys, by the usual ones."""
    implied: Callable[[Config], Config] = lambda _: {}
    """Further keys that follow from others."""
    nested: str | None = None
    """The key under which the trained part's keys are nested, such as vision_config; None: they are at the top
    level."""
    wrong: Callable[[Config], str | None] = lambda _: None
    """Names a fault in a combination of keys, or in keys that are not lengths; None: there is none."""
    above_zero: tuple[str, ...] = ()
    """Keys whose numbers, unless they are null, must be above 0."""
    ignored: tuple[str, ...] = ()
    """Keys of a config.json that mean something here, or nothing, and that transformers does not list."""
    only: Mapping[str, Only] = {}
    """Keys of which only one value is supported in training."""
    rotary: tuple[str, ...] = ()
    """Further keys of its rope_parameters."""


class Divided(NamedTuple):
    """The lengths that a strategy's degrees must divide."""

    lengths: tuple[str, ...]
    """Keys that tensor parallelism must divide: the heads first, which Ulysses must divide too, the feed-forward
    last."""
    tensor: Mapping[str, str] = {}
    """Names, by layer type, of what tensor parallelism cannot divide, so that tp_size must be 1."""
    ulysses: Mapping[str, str] = {}
    """Names, by layer type, of something that the Ulysses degree cannot divide."""
    sequence: Mapping[str, str] = {}
    """Names, by layer type, of what needs a whole sequence on each rank, as windows of an image do."""


class Mask(StrEnum):
    """Positions that a block's attention leaves out."""

    NONE = "none"
    CAUSAL = "causal"
    PADDING = "padding"
    BIAS = "bias"
    """A bias that the block itself adds to its scores."""


class Latents(NamedTuple):
    """The features of latents, from which each head has its queries, keys and values (DeepSeek-AI 2024)."""

    queries: int | None
    """Width of the queries' latents, which are normed; None: queries come from the hidden states."""
    keys: int
    """Width of the latents of keys and values, which are normed."""
    rotated: int
    """Features of keys that are rotated, and that all heads share."""


class AttentionFacts(NamedTuple):
    """Facts of attention: its mask, its positions, and its differences from plain attention."""

    mask: Mask
    positions: Literal["learned_absolute", "relative", "rope"]
    """The encoding of positions, in Megatron-LM's words."""
    window: Callable[[str, Config], int | None] | None = None
    """The largest number of positions to which a position of this type of block attends, itself the last; None: all
    before it.

    If attention is not causal, they attend to as many after them. Without this fact, samples must be no longer than
    the configuration's sliding_window.
    """
    latents: Callable[[Config], Latents | None] = lambda _: None
    """The latents that queries, keys and values come from; None: they come from the hidden states."""
    positions_before: Callable[[Config], int] = lambda _: 0
    """Rows of the table of positions before the row of a sample's first token."""
    alibi: Callable[[Config], bool] = lambda _: False
    """Whether scores fall with the distance of positions, by heads' slopes (Press et al. 2022), in a mask of each."""
    sinks: bool = False
    """Whether softmax over a position's scores has a further, learned score of each head, which weighs nothing."""
    soft_caps: bool = False
    """Whether hyperbolic tangents bound the logits, and attention scores: sdpa would ignore it."""
    normed_heads: Callable[[str, Config], bool] = lambda _layer, _config: False
    """Whether a type of block norms queries and keys without weights, in float32."""
    images_ahead: bool = False
    """Whether positions of an image attend to all of it, later ones included."""
    joins_features: bool = False
    """Whether a head's features are joined after some were rotated; attention's output is then kept in two layouts."""
    keeps_unrotated: bool = False
    """Whether queries and keys are kept unrotated, too: one tensor holds them and the values."""
    without: tuple[Attention, ...] = ()
    """Attention kernels that transformers does not support for its blocks."""


class Norm(NamedTuple):
    """The norm of the hidden states."""

    kind: Literal["LayerNorm", "RMSNorm"]
    epsilon: str | None
    """The key of the constant that is added to the variance; None: torch's default."""
    ends: tuple[Recomputation, ...]
    """The kinds of recomputation whose end is a norm, which keeps its input."""
    in_float32: bool = False
    """Whether it multiplies by its weights in float32, whatever the format of its input."""
    of_part: int = 1
    """Number of norms of each part of a block: 2 if there is one before it and one after it."""
    shared: bool = False
    """Whether both parts of a block read the output of one norm, and are added to the stream together."""
    of_head: Callable[[Config], bool] = lambda _: False
    """Whether the rows of the head's matrix are made unit vectors."""


class FeedForward(NamedTuple):
    """The activation function of a block, by transformers' name, and whether the feed-forward layer is gated."""

    activation: str
    gated: bool


class Dropouts(NamedTuple):
    """The keys of the dropout rates of a block's parts and of the embedding; None: no dropout."""

    attention: str
    hidden: str | None
    """The rate for the sums that a block adds to the hidden states."""
    embedding: str | None = None
    path: str | None = None
    """The rate at which a sample skips a whole part of a block (Huang et al. 2016), for the last block."""
    ends: tuple[Recomputation, ...] = ()
    """The kinds of recomputation whose end is a dropout of hidden states, which keeps its mask."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the configuration keys of dropout rates, each once."""
        rates = self.attention, self.hidden, self.embedding, self.path
        return tuple(dict.fromkeys(key for key in rates if key is not None))


class Routing(NamedTuple):
    """How the experts of a position are chosen by its scores, and weighted."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the router's outputs into scores."""
    normalized: bool = True
    """Whether the weights of a position's experts are divided by their sum."""
    scale: float = 1.0
    """Number that the weights are multiplied by."""
    groups: tuple[int, int] | None = None
    """The number of groups of experts, and the number of groups from which a position chooses."""
    best_of_group: int = 1
    """Number of the highest scores whose sum is the score of a group."""
    corrected: bool = False
    """Whether experts are chosen by scores with a correction each, which keeps their loads equal."""


class ExpertKeys(NamedTuple):
    """The configuration keys for experts: in which blocks, how many, and how the router chooses them."""

    number: str
    features: str
    """The key of the features between the matrices of one expert."""
    top_k: str = "num_experts_per_tok"
    balance: str = "router_aux_loss_coef"
    """The key of the strength of the balance loss."""
    router: str = "mlp.gate"
    """Path in a block of the module whose matrix [experts, hidden] scores the experts."""
    router_is_linear: bool = False
    """Whether the stock model's router is a Linear, which also returns scores."""
    older_names: tuple[str, ...] = ()
    """Ends of the names that the router and an expert's matrices (gate, up, down) had in transformers 4.

    peft adapts the router and the fused matrices of all experts where one of them is named.
    """
    router_first: bool = False
    """Whether the stock model lists the router's matrix before the experts'."""
    without: str | None = None
    """The key that lists the numbers of blocks without experts."""
    step: str | None = None
    """The key of the interval of blocks with experts: one in each interval, the last of it."""
    types: tuple[str, ...] = (SPARSE,)
    """The types of block that have experts."""
    kept: int = 5
    """Numbers kept of a row for each feature: two products, the activation, the gated product, and that weighted."""
    rows: int = 1
    """Number of copies kept of a row: 2 if it is weighted before the first product."""
    first: str | None = None
    """The key of the number of blocks before the first one with experts."""
    shared: str | None = None
    """The key of the number of shared experts, which compute every position as one expert that many times as wide."""
    balance_of: Literal["model", "layer"] = "model"
    """Whether the balance loss is a mean over layers, or a sum over them divided by the experts of a position."""
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
        """Return the experts of a type of layer under a configuration; UNSET if it has none."""
        if layer not in self.types:
            return UNSET
        features: int = config[self.features]
        shared = UNSET if self.shared is None else config[self.shared] * features
        return Experts(number=config[self.number], top_k=config[self.top_k], features=features, shared_features=shared)

    def wrong(self, config: Config) -> str | None:
        """Return the problem of a configuration's experts, or None; lengths were checked before."""
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
    """The key of the configuration with the number of blocks."""
    types: tuple[str, ...] = (BLOCK,)
    type_at: Callable[[Config, int], str] = lambda _config, _index: BLOCK
    """The type of a block by its index, if no key lists it."""
    state: str = "hidden_states"
    """The boundary tensor that its blocks change."""
    typed_by: str | None = None
    """The key of the configuration, such as layer_types, that lists the type of each block by the names in `types`."""
    first: str | None = None
    """The type of the first block, and of no other; None: no block is special."""
    written: Mapping[str, object] = {}
    """The values that that key lists instead of the names of types."""
    inside: str | None = None
    """The key under which its keys are nested, such as vision_config; None: they are next to the family's."""
    resets: Mapping[str, object] = {}
    """Top-level keys of the configuration, with values under which it has only the counted blocks."""
    lists: tuple[str, ...] = ()
    """Additional keys that state the types of single blocks, from which `type_at` derives a type."""
    alike_within_window: bool = False
    """Whether its types differ only by their windows: if these hold whole samples, each block is a BLOCK."""
    merging: tuple[str, ...] = ()
    """Types that attend to nothing and hand on other shapes; every rank computes all that it has."""
    joined_by: str | None = None
    """The type whose output joins all states into the last; None: blocks may attend to states of earlier stacks."""
    length: Callable[[Config], int] | None = None
    """Positions of its state, such as frames of a spectrogram; None: the positions of a text sample."""
    features: Callable[[Config], int] | None = None
    """Width of its state if it passes unchanged through layers of another width; None: each layer's."""

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
        """Return the type of each of its blocks in a configuration, in order."""
        listed = self.listed(config)
        return self._by_rule(config) if listed is None else listed

    def may_be_alike(self, config: Config) -> bool:
        """Return whether a configuration may omit the types of its blocks if they are all equal."""
        return self.alike_within_window and list(self.layers(config)) == self._by_rule(config)

    def has(self, layer: str) -> bool:
        """Return whether the stack has blocks of a type."""
        return layer in self.types or (self.alike_within_window and layer == BLOCK)

    def numbers(self, config: Config) -> Sequence[Any]:
        """Return the numbers of blocks in a configuration."""
        return (config.get(self.counted_by),)

    def counted(self, layers: Sequence[str], config: Config) -> dict[str, Any]:
        """Return the keys of a configuration that follow from the types of all blocks of a model."""
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
    """Whether it has a `pipelining_fn`; `train.py` refuses pipeline stages of a model without one."""
    contexts: bool = True
    """Whether its flavors have `sdpa` attention; flavors with `flex` refuse context parallelism."""
    ties: bool = False
    """Whether embedding and head may share their weights (`enable_weight_tying`)."""
    is_in_0_3: bool = True
    """Whether torchtitan 0.3 has the model and these sizes, too."""


class Systems(NamedTuple):
    """Facts for other systems that train the same model."""

    megatron: Literal["bridged", "alone"] | None = None
    """Whether Megatron-LM's GPT computes its blocks exactly, and Megatron Bridge reads its files; None: neither."""
    torchtitan: Torchtitan | None = None
