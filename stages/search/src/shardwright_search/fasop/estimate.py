"""FASOP's estimate of candidates: time, price, and memory with and without sharded optimizer states.

The formulas are those of FASOP's source (github.com/AvatarHwang/FASOP, commit 93cb38b) without its named defects; see
docs/fasop.md. The pipeline's time is this project's closed form of 1F1B.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright_formats.semantics.schedules.registry import schedule_of
from shardwright_formats.types import Schedule
from shardwright_search.fasop.memory import Memory, memory
from shardwright_search.fasop.network import Network, network
from shardwright_search.fasop.partition import Pipelines, fastest_partitions, pipeline_times
from shardwright_search.fasop.problem import BYTES, Candidate, LayerKind, Problem

_PS = 1e-12
_HOUR_S = 3600.0
_AT_ONCE = 8192


class Estimate(NamedTuple):
    """What a candidate with its partition is estimated to take and to hold."""

    candidate: Candidate
    partition: tuple[int, ...]
    """Layers of each stage, embedding and head counted."""
    pipeline_s: float
    reduction_s: float
    """Data-parallel all-reduce, on the stage where it takes longest."""
    tied_s: float
    usd_per_step: float | None
    """Of all nodes; None where one has no price."""
    memory: Memory

    @property
    def step_s(self) -> float:
        """All of a step."""
        return self.pipeline_s + self.reduction_s + self.tied_s


class Batch(NamedTuple):
    """Candidates of equally many stages, as arrays."""

    candidates: tuple[Candidate, ...]
    networks: tuple[Network, ...]
    pipelines: Pipelines


def estimates(problem: Problem, every: Iterable[Candidate]) -> list[Estimate]:
    """Each with its best partition, the fastest first."""
    found = [
        estimate
        for batch in batches(problem, every)
        for estimate in priced(problem, batch, fastest_partitions(batch.pipelines))
    ]
    return sorted(found, key=lambda estimate: estimate.step_s)


def estimate_of(problem: Problem, candidate: Candidate, layers: Sequence[int]) -> Estimate:
    """Of one candidate whose stages hold so many layers each."""
    (batch,) = batches(problem, [candidate])
    (found,) = priced(problem, batch, np.cumsum([0, *layers])[None, :])
    return found


def batches(problem: Problem, every: Iterable[Candidate]) -> Iterator[Batch]:
    """The candidates by their number of stages, not too many at once."""
    networks = lru_cache(maxsize=None)(lambda *shape: network(problem, *shape))
    for _, group in groupby(sorted(every, key=_pp_size), key=_pp_size):
        alike = tuple(group)
        for start in range(0, len(alike), _AT_ONCE):
            some = alike[start : start + _AT_ONCE]
            links = tuple(networks(own.nodes, own.tp_size, own.dp_size, own.pp_size) for own in some)
            yield Batch(some, links, _pipelines(problem, some, links))


def _pp_size(candidate: Candidate) -> int:
    return candidate.pp_size


def _pipelines(problem: Problem, some: Sequence[Candidate], links: Sequence[Network]) -> Pipelines:
    """A stage on several node types runs at the speed of the slowest of them."""
    keys = {key: row for row, key in enumerate(dict.fromkeys((own.tp_size, own.micro_batch_size) for own in some))}
    types = [own.name for own in problem.node_types]
    times = np.stack([problem.layer_ps[name, *key] for key in keys for name in types])
    table = np.concatenate([np.zeros((len(times), 1), np.int64), np.cumsum(times, axis=1)], axis=1)
    shape = np.array([keys[own.tp_size, own.micro_batch_size] for own in some])
    on = np.stack([link.has_type for link in links])  # [candidates, stages, types]
    totals = table[:, -1].reshape(len(keys), len(types))[shape]
    slowest = np.where(on, totals[:, None, :], -1).argmax(axis=2)
    schedule = schedule_of(Schedule.ONE_F_ONE_B)
    steady = np.array([schedule.closed_forms(own.num_microbatches(problem.batch))[0].steady for own in some])
    return Pipelines(table, shape[:, None] * len(types) + slowest, _sends(problem, some, links), steady)


def _sends(problem: Problem, some: Sequence[Candidate], links: Sequence[Network]) -> NDArray[Any]:
    """A stage waits for a message from each neighbour: the activations from one, their gradients from the other."""
    sizes = np.array([own.micro_batch_size for own in some])
    num_bytes = sizes * (problem.sequence_length * problem.hidden * BYTES)
    one_way = np.stack([link.send for link in links]) * num_bytes[:, None]
    each = np.rint(one_way / _PS).astype(np.int64)
    return np.asarray(np.pad(each, ((0, 0), (1, 0))) + np.pad(each, ((0, 0), (0, 1))))


def priced(problem: Problem, batch: Batch, cuts: NDArray[Any]) -> Iterator[Estimate]:
    """The candidates with these partitions: the first layer of each stage, and the number of layers."""
    some, links = batch.candidates, batch.networks
    pipeline_s = pipeline_times(batch.pipelines, cuts) * _PS
    reduction_s = _reduction_s(problem, some, links, cuts)
    on = np.stack([link.has_type for link in links])
    held = memory(problem, some, on, cuts)
    layers = np.diff(cuts, axis=1).tolist()
    for number, own in enumerate(some):
        tied_s = float(problem.tied * BYTES / own.tp_size * links[number].tied)
        seconds = float(pipeline_s[number]), float(reduction_s[number]), tied_s
        yield Estimate(own, tuple(layers[number]), *seconds, _usd(problem, own, sum(seconds)), held[number])


def _usd(problem: Problem, own: Candidate, step_s: float) -> float | None:
    prices = [problem.node_types[kind].usd_per_hour for kind in own.nodes]
    known = [price for price in prices if price is not None]
    return sum(known) / _HOUR_S * step_s if len(known) == len(prices) else None


def _reduction_s(
    problem: Problem, some: Sequence[Candidate], links: Sequence[Network], cuts: NDArray[Any]
) -> NDArray[Any]:
    """A ring all-reduce of a stage's gradients, of the stage where it takes longest."""
    reduced = np.zeros(cuts[:, 1:].shape)
    for tp_size in problem.tp_sizes:
        of = np.array([candidate.tp_size == tp_size for candidate in some])
        reduced[of] = _reduced(problem, tp_size, cuts[of])
    dp_size = np.array([own.dp_size for own in some])[:, None]
    time_s = 2 * (dp_size - 1) / dp_size * reduced * BYTES * np.stack([link.reduce for link in links])
    return np.asarray(time_s.max(axis=1))


def _reduced(problem: Problem, tp_size: int, cuts: NDArray[Any]) -> NDArray[Any]:
    """Parameters of each stage; an embedding and a head that are one count once where both are."""
    own, is_block = problem.reduced[tp_size], np.array(problem.kinds) == LayerKind.BLOCK
    blocks, outer = (
        np.diff(np.concatenate([[0.0], np.cumsum(np.where(chosen, own, 0))])[cuts], axis=1)
        for chosen in (is_block, ~is_block)
    )
    return np.asarray(blocks + (np.minimum(outer, own[~is_block].max()) if problem.outer_once else outer))
