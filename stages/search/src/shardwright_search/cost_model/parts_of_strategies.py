"""The parts of a strategy that prices depend on: strategies that differ elsewhere are priced once."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from shardwright.plan.communication import shares_experts
from shardwright.types import DataParallel, LayerStrategy, Offload, Recompute, Strategy
from shardwright_search.step.pareto import Ints

H = TypeVar("H", bound=Hashable)


def of_parameters(strategy: Strategy) -> Strategy:
    """Return a strategy without the fields that do not affect parameters."""
    if isinstance(strategy, LayerStrategy) and (shares_experts(strategy) or strategy.offloads_optimizer):
        streams = Offload.OPTIMIZER if strategy.offloads_optimizer else UNSET
        offload = strategy.offload if strategy.updates_on_host else streams
        return replace(strategy, recompute=Recompute.NONE, offload=offload)
    return Strategy(**{name: getattr(strategy, name) for name in Strategy.__struct_fields__})


def of_passes(strategy: Strategy) -> Strategy:
    """Return a strategy without its sharding of states, and their place: a micro-batch's passes do not depend on it."""
    whole = {"data_parallel": DataParallel.DDP, "shard_size": 0}
    if isinstance(strategy, LayerStrategy):
        strategy = replace(strategy, offload=Offload.ACTIVATIONS if strategy.offloads_activations else UNSET)
    if isinstance(strategy, LayerStrategy) and strategy.experts is not UNSET:
        return replace(strategy, **whole, experts=replace(strategy.experts, **whole))
    return replace(strategy, **whole)


class Parts(NamedTuple):
    """The distinct parts of many strategies, and the index of each strategy's part."""

    passes: tuple[Strategy, ...]
    passes_of: Ints
    """[strategies]."""
    parameters: tuple[Strategy, ...]
    parameters_of: Ints
    """[strategies]."""


def parts_of(strategies: Sequence[Strategy]) -> Parts:
    """Return the distinct parts of strategies."""
    return Parts(*_numbered(list(map(of_passes, strategies))), *_numbered(list(map(of_parameters, strategies))))


def _numbered(values: Sequence[H]) -> tuple[tuple[H, ...], Ints]:
    """Return the distinct values, and the index of each value among them."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return tuple(numbers), np.array([numbers[value] for value in values], np.int64)
