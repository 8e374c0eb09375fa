"""A grid: many searches of one model on one cluster, and what came of each."""

from typing import Annotated

from msgspec import Meta

from shardwright_formats.io import Document, Value
from shardwright_formats.types import Sha256
from shardwright_search.space.request import SearchRequest


class Grid(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A grid file: searches that share a model, a cluster and profiles."""

    FORMAT = "shardwright.grid"

    searches: Annotated[tuple[SearchRequest, ...], Meta(min_length=1, max_length=100_000)]
    """The cells, each with a name of its own."""

    def __post_init__(self) -> None:
        names = [search.name for search in self.searches]
        if len(set(names)) < len(names):
            twice = next(name for place, name in enumerate(names) if name in names[:place])
            raise ValueError(f"searches: two are named {twice!r}")


class CellAnswer(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came of one cell."""

    name: str
    """Of its search."""
    key: Sha256
    """SHA-256 of all that the answer rests on; KEY.json and KEY.prediction.json are the plan, if there is one."""
    reason: str | None
    """Why there is no plan; null where there is one."""


class GridAnswers(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came of every cell of a grid, in its order."""

    FORMAT = "shardwright.grid_answers"

    cells: tuple[CellAnswer, ...]
    """One for each search."""
