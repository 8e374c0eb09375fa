"""FASOP's estimate of candidates: time, price, and memory with and without sharded optimizer states.

The formulas are those of FASOP's source (github.com/AvatarHwang/FASOP, commit 93cb38b) without its named defects. A
micro-batch takes its layers' time on the slowest of a stage's node types, and a stage waits for a send from each
neighbour; the pipeline's time is this project's closed form of 1F1B, then come the longest all-reduce of any stage and
that of a tied embedding. Memory is 18 bytes a parameter, or 6 and a data-parallel rank's share of 12, and the
activations of tensor parallelism for as many micro-batches as there are stages, all times 1.10. Links have no latency,
and are as slow as the slowest that a group uses.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from fasop_exact import Pipelines, fastest_partitions, pipeline_times
from fasop_problem import BYTES, Candidate, FasopProblem, LayerKind, NodeCosts
from numpy.typing import NDArray

from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import GIB, Schedule

_PS = 1e-12
_HOUR_S = 3600.0
_AT_ONCE = 8192
SAFETY = 1.10
"""Factor on the plain estimate of memory."""
_STATE_BYTES, _OPTIMIZER_BYTES = 18, 12
"""Bytes of a parameter's states, and the part of them that data-parallel ranks can share out among them."""


class Memory(NamedTuple):
    """Memory of the stage with the least left, with the safety factor; `sharded`: with shared optimizer states."""

    gib: float
    is_oom: bool
    sharded_gib: float
    is_sharded_oom: bool


class Links(NamedTuple):
    """Seconds a byte of the links of one placement of nodes and one set of degrees."""

    has_type: NDArray[Any]
    """Flags of the node types that a stage has ranks on [stages, types]."""
    send: NDArray[Any]
    """Time from a stage to the next, one way [stages - 1]."""
    reduce: NDArray[Any]
    """Time of an all-reduce of two ranks' worth: the byte once over the ring's slowest link [stages]."""
    tied: float
    """Time between first and last stage; 0 where they are one."""


class Ranks(NamedTuple):
    """The node of each rank, and the node's type [stages, data-parallel, tensor-parallel]."""

    node: NDArray[Any]
    kind: NDArray[Any]


class FasopEstimate(NamedTuple):
    """The estimate of a candidate with its partition."""

    candidate: Candidate
    partition: tuple[int, ...]
    """Layers of each stage, embedding and head counted."""
    pipeline_s: float
    reduction_s: float
    """Data-parallel all-reduce, on the stage where it takes longest."""
    tied_s: float
    usd_per_step: float | None
    """Price of all nodes; None where one has no price."""
    memory: Memory

    @property
    def step_s(self) -> float:
        """Return the seconds of a step."""
        return self.pipeline_s + self.reduction_s + self.tied_s


class Batch(NamedTuple):
    """Candidates of equally many stages, with their links and pipelines."""

    candidates: tuple[Candidate, ...]
    networks: tuple[Links, ...]
    pipelines: Pipelines


def estimates(problem: FasopProblem, candidates: Iterable[Candidate]) -> list[FasopEstimate]:
    """Return the estimate of each candidate with its best partition, the fastest first."""
    unsorted = (
        estimate
        for batch in batches(problem, candidates)
        for estimate in priced(problem, batch, fastest_partitions(batch.pipelines))
    )
    return sorted(unsorted, key=lambda estimate: estimate.step_s)


def estimate_of(problem: FasopProblem, candidate: Candidate, layers: Sequence[int]) -> FasopEstimate:
    """Return the estimate of one candidate whose stages hold so many layers each."""
    (batch,) = batches(problem, [candidate])
    (estimate,) = priced(problem, batch, np.cumsum([0, *layers])[None, :])
    return estimate


def batches(problem: FasopProblem, candidates: Iterable[Candidate]) -> Iterator[Batch]:
    """Yield the candidates by their number of stages, not too many at once."""
    networks = lru_cache(maxsize=None)(lambda *shape: network(problem, *shape))
    pp_size = attrgetter("pp_size")
    for _, group in groupby(sorted(candidates, key=pp_size), key=pp_size):
        alike = tuple(group)
        for start in range(0, len(alike), _AT_ONCE):
            some = alike[start : start + _AT_ONCE]
            links = tuple(networks(one.nodes, one.tp_size, one.dp_size, one.pp_size) for one in some)
            yield Batch(some, links, _pipelines(problem, some, links))


def _pipelines(problem: FasopProblem, some: Sequence[Candidate], links: Sequence[Links]) -> Pipelines:
    """Return the pipelines; a stage on several node types runs at the speed of the slowest of them."""
    keys = {key: row for row, key in enumerate(dict.fromkeys((one.tp_size, one.micro_batch_size) for one in some))}
    types = [node_type.name for node_type in problem.node_types]
    times = np.stack([problem.layer_ps[name, *key] for key in keys for name in types])
    table = np.concatenate([np.zeros((len(times), 1), np.int64), np.cumsum(times, axis=1)], axis=1)
    shape = np.array([keys[one.tp_size, one.micro_batch_size] for one in some])
    has_type = np.stack([link.has_type for link in links])  # [candidates, stages, types]
    totals = table[:, -1].reshape(len(keys), len(types))[shape]
    slowest = np.where(has_type, totals[:, None, :], -1).argmax(axis=2)
    schedule = schedule_of(Schedule.ONE_F_ONE_B)
    steady = np.array([schedule.closed_forms(one.num_microbatches(problem.batch))[0].steady for one in some])
    return Pipelines(table, shape[:, None] * len(types) + slowest, _sends(problem, some, links), steady)


def _sends(problem: FasopProblem, some: Sequence[Candidate], links: Sequence[Links]) -> NDArray[Any]:
    """Return the sends: a stage waits for activations from one neighbour, and for their gradients from the other."""
    sizes = np.array([one.micro_batch_size for one in some])
    num_bytes = sizes * (problem.sequence_length * problem.hidden * BYTES)
    one_way = np.stack([link.send for link in links]) * num_bytes[:, None]
    each = np.rint(one_way / _PS).astype(np.int64)
    return np.asarray(np.pad(each, ((0, 0), (1, 0))) + np.pad(each, ((0, 0), (0, 1))))


def priced(problem: FasopProblem, batch: Batch, cuts: NDArray[Any]) -> Iterator[FasopEstimate]:
    """Yield the estimates of candidates with partitions: the first layer of each stage, and the number of layers."""
    some, links = batch.candidates, batch.networks
    pipeline_s = pipeline_times(batch.pipelines, cuts) * _PS
    reduction_s = _reduction_s(problem, some, links, cuts)
    memories = memory(problem, some, np.stack([link.has_type for link in links]), cuts)
    layers = np.diff(cuts, axis=1).tolist()
    for number, candidate in enumerate(some):
        tied_s = float(problem.tied * BYTES / candidate.tp_size * links[number].tied)
        seconds = float(pipeline_s[number]), float(reduction_s[number]), tied_s
        usd = _usd(problem, candidate, sum(seconds))
        yield FasopEstimate(candidate, tuple(layers[number]), *seconds, usd, memories[number])


def _usd(problem: FasopProblem, candidate: Candidate, step_s: float) -> float | None:
    prices = [problem.node_types[kind].usd_per_hour for kind in candidate.nodes]
    known = [price for price in prices if price is not None]
    return sum(known) / _HOUR_S * step_s if len(known) == len(prices) else None


def _reduction_s(
    problem: FasopProblem, some: Sequence[Candidate], links: Sequence[Links], cuts: NDArray[Any]
) -> NDArray[Any]:
    """Return the time of a ring all-reduce of a stage's gradients, on the stage where it takes longest."""
    reduced = np.zeros(cuts[:, 1:].shape)
    for tp_size in problem.tp_sizes:
        chosen = np.array([candidate.tp_size == tp_size for candidate in some])
        reduced[chosen] = _reduced(problem, tp_size, cuts[chosen])
    dp_size = np.array([candidate.dp_size for candidate in some])[:, None]
    time_s = 2 * (dp_size - 1) / dp_size * reduced * BYTES * np.stack([link.reduce for link in links])
    return np.asarray(time_s.max(axis=1))


def _reduced(problem: FasopProblem, tp_size: int, cuts: NDArray[Any]) -> NDArray[Any]:
    """Return the parameters of each stage; an embedding and a head that are one count once where both are."""
    sizes, is_block = problem.reduced[tp_size], np.array(problem.kinds) == LayerKind.BLOCK
    blocks, outer = (
        np.diff(np.concatenate([[0.0], np.cumsum(np.where(chosen, sizes, 0))])[cuts], axis=1)
        for chosen in (is_block, ~is_block)
    )
    return np.asarray(blocks + (np.minimum(outer, sizes[~is_block].max()) if problem.outer_once else outer))


def memory(
    problem: FasopProblem, some: Sequence[Candidate], has_type: NDArray[Any], cuts: NDArray[Any]
) -> list[Memory]:
    """Return the memory of candidates; `has_type` [candidates, stages, types], `cuts` [candidates, stages + 1]."""
    parameters, activations = _parameters(problem, some, cuts), _activations(problem, some, cuts)
    dp_size = np.array([candidate.dp_size for candidate in some])[:, None]
    shared = _STATE_BYTES - _OPTIMIZER_BYTES + _OPTIMIZER_BYTES / dp_size
    limits = np.array([node_type.limit_gib for node_type in problem.node_types])
    limit = np.where(has_type, limits, np.inf).min(axis=2)
    whole = _fullest(parameters * _STATE_BYTES + activations, limit)
    sharded = _fullest(parameters * shared + activations, limit)
    return [Memory(*plain, *shared) for plain, shared in zip(whole, sharded, strict=True)]


def _fullest(num_bytes: NDArray[Any], limit_gib: NDArray[Any]) -> list[tuple[float, bool]]:
    """Return the GiB of the stage with the least left, and whether any stage lacks memory."""
    gib = num_bytes / GIB * SAFETY
    least = (limit_gib - gib).argmin(axis=1)[:, None]
    taken = np.take_along_axis(gib, least, axis=1)[:, 0]
    is_oom = np.any(gib > limit_gib, axis=1)
    return list(zip(taken.tolist(), is_oom.tolist(), strict=True))


def _parameters(problem: FasopProblem, some: Sequence[Candidate], cuts: NDArray[Any]) -> NDArray[Any]:
    """Return the parameters that a rank of each stage holds."""
    parameters = np.zeros(cuts[:, 1:].shape)
    for tp_size, sizes in problem.parameters.items():
        chosen = np.array([candidate.tp_size == tp_size for candidate in some])
        parameters[chosen] = np.diff(np.concatenate([[0.0], np.cumsum(sizes)])[cuts[chosen]], axis=1)
    return parameters


def _activations(problem: FasopProblem, some: Sequence[Candidate], cuts: NDArray[Any]) -> NDArray[Any]:
    """Return the bytes of each stage with a full pipeline of microbatches (Korthikanti et al. 2023, section 4)."""
    kinds = np.array(problem.kinds)
    embeddings, blocks, heads = (
        np.diff(np.concatenate([[0], np.cumsum(kinds == kind)])[cuts], axis=1) for kind in LayerKind
    )
    columns = [(x.tp_size, x.pp_size, x.micro_batch_size, x.num_microbatches(problem.batch)) for x in some]
    tp_size, pp_size, sizes, counts = np.array(columns).T[:, :, None]
    in_flight = np.minimum(counts, pp_size)
    hidden, length = problem.hidden, problem.sequence_length
    numel = sizes * length * hidden
    embedding = numel * pp_size * in_flight / tp_size
    block = numel * in_flight * (10 + 24 / tp_size + 5 * problem.heads * length / (hidden * tp_size))
    head = 4 * sizes * length * (hidden + problem.vocabulary) / tp_size
    return np.asarray(embeddings * embedding + blocks * block + heads * head)


def network(problem: FasopProblem, nodes: tuple[int, ...], tp_size: int, dp_size: int, pp_size: int) -> Links:
    """Return the links: groups that lie on several nodes share a node's link, those inside may share a bus."""
    ranks = _ranks(problem.devices_per_node, nodes, tp_size, dp_size, pp_size)
    types = range(len(problem.node_types))
    has_type = np.stack([(ranks.kind == kind).any(axis=(1, 2)) for kind in types], axis=1)
    rates = _rates(problem.node_types)
    tied = 0.0
    if pp_size > 1:
        ends = Ranks(*(array[[0, -1]] for array in ranks))
        rate = _between(ends, rates["reduce_inside"], rates["reduce_between"]).min()
        tied = min(dp_size, problem.devices_per_node) / rate
    return Links(has_type, _send(ranks, rates), _reduce(problem, ranks, rates, has_type), tied)


def _ranks(devices_per_node: int, nodes: tuple[int, ...], tp_size: int, dp_size: int, pp_size: int) -> Ranks:
    node = np.arange(tp_size * dp_size * pp_size).reshape(pp_size, dp_size, tp_size) // devices_per_node
    return Ranks(node, np.array(nodes)[node])


@lru_cache(maxsize=16)
def _rates(node_types: tuple[NodeCosts, ...]) -> dict[str, NDArray[Any]]:
    names = ("send_inside", "send_between", "reduce_inside", "reduce_between", "shares_inside")
    return {name: np.array([getattr(node_type, name) for node_type in node_types]) for name in names}


def _between(ranks: Ranks, inside: NDArray[Any], between: NDArray[Any]) -> NDArray[Any]:
    """Return the rate from each stage's rank to the same rank of the next stage."""
    near, far = ranks.kind[:-1], np.minimum(between[ranks.kind[:-1]], between[ranks.kind[1:]])
    return np.asarray(np.where(ranks.node[:-1] == ranks.node[1:], inside[near], far))


def _send(ranks: Ranks, rates: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """Return the time from each stage to the next: all ranks of a stage share the links of a node."""
    _, dp_size, tp_size = ranks.node.shape
    rate = _between(ranks, rates["send_inside"], rates["send_between"] / (dp_size * tp_size))
    return np.asarray(1 / rate.min(axis=(1, 2))) if len(rate) else np.zeros(0)


def _reduce(
    problem: FasopProblem, ranks: Ranks, rates: dict[str, NDArray[Any]], has_type: NDArray[Any]
) -> NDArray[Any]:
    """Return the times of rings over data-parallel ranks in order; those of tensor-parallel ranks share links."""
    pp_size, dp_size, tp_size = ranks.node.shape
    if dp_size == 1:
        return np.zeros(pp_size)
    after = Ranks(*(np.roll(array, -1, axis=1) for array in ranks))
    far = np.minimum(rates["reduce_between"][ranks.kind], rates["reduce_between"][after.kind])
    rate = np.where(ranks.node == after.node, rates["reduce_inside"][ranks.kind], far).min(axis=(1, 2))
    if tp_size * dp_size >= problem.devices_per_node:
        return np.asarray(tp_size / rate)
    shares = (has_type & rates["shares_inside"]).any(axis=1) if tp_size > 1 else np.zeros(pp_size, bool)
    return np.asarray(np.where(shares, problem.devices_per_node / dp_size, 1) / rate)
