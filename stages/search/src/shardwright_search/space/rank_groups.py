"""The groups that a rank of a pipeline stage is in: those of a layer's strategy, and those in which layouts change.

The first rank of a stage stands for all: along each axis of a strategy every rank has one group.
"""

from functools import lru_cache
from typing import NamedTuple

from shardwright.plan.axes import Layout
from shardwright.plan.layout import closed_groups
from shardwright.plan.process_groups import Purpose, strategy_axes
from shardwright.types import EMBEDDING, HEAD, Model, Strategy


class RankGroup(NamedTuple):
    """A group of the first rank of a pipeline stage, by its purpose and ranks, counted in the stage."""

    purpose: Purpose
    ranks: range | tuple[int, ...]


RankGroups = frozenset[RankGroup]
TIED = RankGroup(Purpose.TIED_PARAMETERS, range(0))
"""The one group of tied parameters, whose ranks may be in several stages."""


class StageLimit(NamedTuple):
    """The groups that a pipeline stage must have, and those that it must not have, in a part of a configuration."""

    stage: int
    required: RankGroups = frozenset()
    excluded: RankGroups = frozenset()


@lru_cache(maxsize=1 << 14)
def strategy_groups(strategy: Strategy) -> RankGroups:
    """Return the groups along the axes of a strategy."""
    return frozenset(
        RankGroup(purpose, range(0, axis.size * axis.stride, axis.stride)) for purpose, axis in strategy_axes(strategy)
    )


@lru_cache(maxsize=1 << 14)
def change_groups(source: Layout, target: Layout, samples: int, lengths: tuple[int, ...]) -> RankGroups:
    """Return the groups in which a microbatch's tensors, of these sequence lengths, change their layout."""
    groups = (closed_groups(source, target, samples, length)[0] for length in lengths if source != target)
    return frozenset(RankGroup(Purpose.EXCHANGE, _as_range(ranks)) for ranks in groups if len(ranks) > 1)


def _as_range(ranks: tuple[int, ...]) -> range | tuple[int, ...]:
    """Return several ranks as those along an axis are written, where they are evenly spaced."""
    even = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
    return even if tuple(even) == ranks else ranks


def tied_types(model: Model) -> frozenset[str]:
    """Return the types of layers whose ranks are in the group of tied parameters."""
    shared = (
        names
        for names in model.layers_by_base.values()
        if len(names) > 1 and any(parameter.shared for parameter in model.types[names[0]].parameters)
    )
    ends = (EMBEDDING, HEAD) if model.tied else ()
    return frozenset(ends).union(*shared)
