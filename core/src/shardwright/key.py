"""The key by which a measured or estimated figure of a layer is looked up."""

from collections.abc import Iterable
from typing import Any, Protocol, Self, TypeVar

import msgspec

from shardwright.types.strategy import LayerStrategy, Recompute, SequenceParallel, Strategy


class Key(msgspec.Struct, frozen=True, order=True):
    """The columns that identify a figure in its table, in sort order."""

    @classmethod
    def from_fields(cls, struct: msgspec.Struct, **columns: object) -> Self:
        """Return a key from the fields of a row, a strategy or another key, and from further columns."""
        shared = {name: getattr(struct, name) for name in cls.__struct_fields__ if name in struct.__struct_fields__}
        return cls(**shared | columns)

    def without(self, *names: str) -> Self:
        """Return the narrower key without the named columns; raise KeyError if the key does not have one of them."""
        kept = self.columns
        for name in names:
            del kept[name]
        return type(self)(**kept)

    @property
    def columns(self) -> dict[str, Any]:
        """Return the key's columns by name."""
        return msgspec.structs.asdict(self)


class LayerKey(Key, frozen=True, order=True, kw_only=True):
    """The key of figures of layers; a column that is left open has its default, which no figure has."""

    type: str = ""
    """The layer's type in the model description."""
    tp_size: int = 0
    sequence_parallel: SequenceParallel | None = None
    recompute: Recompute | None = None
    micro_batch_size: int = 0
    sequence_length: int = 0

    @classmethod
    def from_strategy(cls, type_name: str, strategy: Strategy, **columns: object) -> Self:
        """Return the key of a layer under a strategy, with further columns; embedding and head are never recomputed."""
        recompute = strategy.recompute if isinstance(strategy, LayerStrategy) else Recompute.NONE
        return cls.from_fields(strategy, type=type_name, recompute=recompute, **columns)

    def __str__(self) -> str:
        """Return the key in words: the type, and the other columns that are set."""
        named = (f"{name} {value}" for name, value in self.columns.items() if name != "type" and value)
        return " ".join((self.type, *named))


class ExpertKey(Key, frozen=True, order=True, kw_only=True):
    """The key of the figures of a layer's experts on one rank, which do not depend on the rest of the layer."""

    type: str
    """The layer's type in the model description."""
    experts: int
    """Number of the rank's experts."""
    etp_size: int
    """Number of ranks over which each expert's features are sharded."""
    recompute: Recompute
    rows: int = 0
    """Number of rows over all of the rank's experts; 0 if the key is for any number."""

    def __str__(self) -> str:
        """Return the key in words, without the number of rows."""
        return f"{self.experts} experts of {self.type} etp_size {self.etp_size} recompute {self.recompute}"


class HostKey(Key, frozen=True, order=True, kw_only=True):
    """The key of the least times of a layer's passes: the times that the host needs to start their kernels."""

    type: str
    """The layer's type in the model description."""
    recompute: Recompute
    tp_size: int = 0
    """Number of tensor-parallel ranks; 0 if the times do not depend on it."""
    experts: int = 0
    """Number of the rank's experts, if the times are for experts; 0 if they are for the rest of the layer."""
    pipelined: bool = False
    """Whether the times apply only to pipelines between nodes."""


class Keyed(Protocol):
    """A row of a table of layer figures, or any other struct with a layer's key."""

    @property
    def key(self) -> LayerKey:
        """Return the row's key."""


KeyedRow = TypeVar("KeyedRow", bound=Keyed)


def rows_by_key(rows: Iterable[KeyedRow], *open_columns: str) -> dict[LayerKey, list[KeyedRow]]:
    """Group rows that differ only in the named columns; groups are sorted by key, and rows keep their order."""
    groups: dict[LayerKey, list[KeyedRow]] = {}
    for row in rows:
        groups.setdefault(row.key.without(*open_columns), []).append(row)
    return dict(sorted(groups.items(), key=lambda group: group[0]))
