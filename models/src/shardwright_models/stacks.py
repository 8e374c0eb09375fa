"""The lists of blocks of a model family: how many there are, which type each has, and what they hand on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shardwright_formats.types import base_type

Config = Mapping[str, Any]
"""The keys of a config.json; once `configured` has read it, also those that are absent, and under the usual names."""
BLOCK = "block"
"""The layer type of families that have one."""
SLIDING, FULL = "sliding_attention", "full_attention"
"""Types of block that differ by a sliding window, by transformers' names."""
SINK_FEATURES = 8
"""Features of a head beside its own where kernels without sinks compute them: 16 bytes of 16 bits, as GPUs need."""


class Stack(NamedTuple):
    """A list of blocks: how many there are, which type each has, and what they hand on."""

    counted_by: str = "num_hidden_layers"
    """The key of the configuration that says how many there are."""
    types: tuple[str, ...] = (BLOCK,)
    type_at: Callable[[Config, int], str] = lambda _config, _index: BLOCK
    """The type of a block by its index, where no key lists it."""
    state: str = "hidden_states"
    """The boundary tensor that its blocks change."""
    typed_by: str | None = None
    """The key of the configuration, such as layer_types, that lists the type of each block by the names in `types`."""
    first: str | None = None
    """The type of the first block, and of no other; None: of any."""
    written: Mapping[str, object] = {}
    """The values that that key lists in place of the names of types."""
    inside: str | None = None
    """The key that holds its keys, such as vision_config; None: they stand with those of the family."""
    resets: Mapping[str, object] = {}
    """Top keys of the configuration, with the values by which it has no more blocks than those counted."""
    lists: tuple[str, ...] = ()
    """Further keys that say the types of single blocks, of which `type_at` makes one."""
    alike_within_window: bool = False
    """Whether its types differ by their windows alone: where these hold whole samples, each block is a BLOCK."""

    @property
    def typing_keys(self) -> tuple[str, ...]:
        """Return the keys that say the types of single blocks."""
        return self.lists if self.typed_by is None else (self.typed_by, *self.lists)

    @property
    def values(self) -> tuple[object, ...]:
        """Return what that key may list."""
        return tuple(self.written.get(kind, kind) for kind in self.types)

    def listed(self, config: Config) -> Sequence[str] | None:
        """Return the types that a configuration lists; None where `type_at` tells them."""
        listed = None if self.typed_by is None else config.get(self.typed_by)
        if not self.written or not isinstance(listed, list | tuple):
            return listed
        return [self._named(each, index) for index, each in enumerate(listed)]

    def layers(self, config: Config) -> Sequence[str]:
        """Return the type of each of its blocks in a configuration, in order."""
        listed = self.listed(config)
        return self._by_rule(config) if listed is None else listed

    def may_be_alike(self, config: Config) -> bool:
        """Return whether a configuration need not list the types of its blocks, should these be alike."""
        return self.alike_within_window and list(self.layers(config)) == self._by_rule(config)

    def has(self, layer: str) -> bool:
        """Return whether it has blocks of a type."""
        return layer in self.types or (self.alike_within_window and layer == BLOCK)

    def numbers(self, config: Config) -> Sequence[Any]:
        """Return the numbers of blocks that a configuration gives."""
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
