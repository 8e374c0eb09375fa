"""The cost of a layer on one rank, in whole picoseconds and bytes, and the parts of its strategy that decide it."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from shardwright.plan.communication import shares_experts
from shardwright.types import DataParallel, LayerStrategy, Offload, Recompute, Strategy
from shardwright_search.cost_model.collectives import Duration, Slowdowns, overlapped_time
from shardwright_search.cost_model.parameters import Overlapped, ParameterMemory
from shardwright_search.step.pareto import Ints, Numbers


class Cost(NamedTuple):
    """A time in picoseconds, in one direction, and a warning if it is based on numbers that were not measured."""

    time_ps: int
    warning: str | None


class Gather(NamedTuple):
    """ZeRO-3's gather of a layer for one pass, in picoseconds; 0 if there is none."""

    alone_ps: int = 0
    slowdowns: Slowdowns | None = None
    """None if it does not overlap with anything."""
    overhead_ps: int = 0

    def added_ps(self, compute_ps: int) -> int:
        """Return the time that the gather adds to the computation that it overlaps with."""
        return round(overlapped_time(compute_ps, Duration(self.alone_ps), self.slowdowns)) + self.overhead_ps


class LayerCost(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of one layer on one rank; times in picoseconds."""

    forward_ps: int
    """One microbatch's forward pass, with messages of tensor and sequence parallelism; likewise the backward pass."""
    backward_ps: int
    gather_forward_ps: int
    """Time that an overlapped ZeRO-3 gather adds to the forward pass of each microbatch; likewise the backward pass."""
    gather_backward_ps: int
    gather: Gather
    """The gather without computation: the runtime starts it one layer ahead, so it overlaps with another layer."""
    sync_every_ps: int
    """Time that reducing the gradients adds to each microbatch's backward pass; 0 when they are reduced once a step."""
    reduction_ps: int
    """The messages of the reduction without overheads; 0 if every microbatch reduces."""
    slowdowns: Slowdowns | None
    """Slowdowns of the backward pass and the reduction when they overlap; None if they were not measured."""
    overlapped_ps: int
    """Time by which the reduction lengthens the last backward pass, by the measured slowdowns; part of `sync_ps`,
    without overheads."""
    sync_ps: int
    """Once a step: what gradient reduction adds, ZeRO-2's gather, and sums of replicated parameters' gradients."""
    optimizer_ps: int
    memory: ParameterMemory
    activation_bytes: int
    """Activations of one microbatch in flight."""
    host_activation_bytes: int = 0
    """Activations of one microbatch that are in host memory."""
    workspace_bytes: int
    """Bytes held for a moment, in the layer's own forward or backward pass."""
    warnings: tuple[str, ...]

    @property
    def microbatch_ps(self) -> int:
        """Return forward and backward time of one micro-batch, including what gathers and reductions add."""
        gathers = self.gather_forward_ps + self.gather_backward_ps
        return self.forward_ps + self.backward_ps + gathers + self.sync_every_ps

    @property
    def exposed_ps(self) -> int:
        """Return the time that occurs once a step: gradient sync and optimizer."""
        return self.sync_ps + self.optimizer_ps

    @property
    def state_bytes(self) -> int:
        """Return the bytes that are allocated all step long; gradients are allocated by the first backward pass."""
        return self.memory.all_step_bytes


def gather_of(overlapped: Overlapped) -> Gather:
    """Return a gather in whole picoseconds."""
    return Gather(picoseconds(overlapped.alone.time_s), overlapped.slowdowns, picoseconds(overlapped.overhead_s))


def all_picoseconds(times_s: Numbers) -> Numbers:
    """Return seconds in an array, rounded to whole picoseconds."""
    return np.asarray(np.rint(times_s * 1e12))


def picoseconds(time_s: float) -> int:
    """Return seconds, rounded to whole picoseconds."""
    return round(time_s * 1e12)


# The parts of a strategy that prices depend on: strategies with an equal part share its price.


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
