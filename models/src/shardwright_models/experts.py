"""Facts of experts: what the keys of a config.json say of the blocks that have some."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from msgspec import UNSET, UnsetType

from shardwright_formats.types import Experts, base_type
from shardwright_models.stacks import Config

DENSE, SPARSE = "dense", "sparse"
"""The types of block, of which each of the second has experts."""


class Routing(NamedTuple):
    """How the experts of a position are chosen by its scores, and weighted."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function that makes scores of what the router gives."""
    normalized: bool = True
    """Whether the weights of a position's experts are divided by their sum."""
    scale: float = 1.0
    """Number that the weights are multiplied by."""
    groups: tuple[int, int] | None = None
    """Groups that the experts are in, and how many of them a position chooses from."""
    best_of_group: int = 1
    """Experts whose scores are added up to that of a group."""
    corrected: bool = False
    """Whether experts are chosen by scores with a correction each, which keeps their loads equal."""


class ExpertKeys(NamedTuple):
    """The keys that say what experts the feed-forward part of some types of block has, and how a router chooses."""

    number: str
    features: str
    """The key of the features between the matrices of one expert."""
    top_k: str = "num_experts_per_tok"
    balance: str = "router_aux_loss_coef"
    """The key of the strength of the balance loss."""
    router: str = "mlp.gate"
    """Path in a block of the module whose matrix [experts, hidden] scores the experts."""
    router_first: bool = False
    """Whether the stock model lists the router's matrix before the experts'."""
    without: str | None = None
    """The key that lists the numbers of blocks without experts."""
    step: str | None = None
    """The key of how many blocks there are for each one with experts, which is the last of them."""
    types: tuple[str, ...] = (SPARSE,)
    """The types of block that have experts."""
    kept: int = 5
    """Numbers kept of a row for each feature: two products, the activation, the gated product, and that weighted."""
    rows: int = 1
    """Copies kept of a row: 2 where it is weighted before the first product."""
    first: str | None = None
    """The key of how many blocks there are before the first one with experts."""
    shared: str | None = None
    """The key of the number of experts that compute every position, as one of as many times the features."""
    balance_of: Literal["model", "layer"] = "model"
    """Whether the balance loss is a mean over layers, or a sum over them divided by the experts of a position."""
    routing: Callable[[Config], Routing] = lambda _: Routing()
    """Function that tells how experts are chosen."""

    def type_at(self, config: Config, index: int) -> str:
        """Return the type of a block by its index."""
        step = 1 if self.step is None else config[self.step]
        if self.first is not None and index < (config[self.first] or 0):
            return DENSE
        return DENSE if index in self._without(config) or (index + 1) % step else SPARSE

    def typed(self, config: Config, layers: Sequence[str]) -> dict[str, Any]:
        """Return the keys that say the types of these layers, where the configuration's rules say others."""
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
        """Return the experts of a type of layer in a configuration; UNSET where it has none."""
        if layer not in self.types:
            return UNSET
        features: int = config[self.features]
        shared = UNSET if self.shared is None else config[self.shared] * features
        return Experts(number=config[self.number], top_k=config[self.top_k], features=features, shared_features=shared)

    def wrong(self, config: Config) -> str | None:
        """Return what is wrong with what a configuration says of experts, whose lengths are lengths."""
        if config[self.top_k] > (number := config[self.number]):
            return f"{self.top_k} {config[self.top_k]} is over {self.number} {number}"
        first = 0 if self.first is None else config[self.first] or 0
        if not isinstance(first, int) or first < 0:
            return f"{self.first} {first!r} is no number of layers"
        listed = self._without(config)
        if not isinstance(listed, list | tuple) or not all(isinstance(index, int) for index in listed):
            return f"{self.without} {listed!r} is no list of numbers of layers"
        return None

    def _without(self, config: Config) -> Sequence[int]:
        return () if self.without is None else config.get(self.without) or ()
