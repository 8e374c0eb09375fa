"""Placement of groups of ranks on nodes, and the times of their messages: collectives, sends and redistribution."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from math import ceil, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.io import BadInput
from shardwright.io.table import median
from shardwright.plan.axes import Axis, Layout, ParameterAxes, common_block, common_samples
from shardwright.plan.groups import groups_by_kind, nearest_measured, seconds_on
from shardwright.plan.layout import closed_groups, redistribution_plan, sent_numel
from shardwright.types import BoundaryTensor, Cluster
from shardwright.types.hardware_profile import Collective, CollectiveKey, GroupKind, HardwareProfile
from shardwright_search.cost_model.profiles import MADE_FROM, Profiles

# The placement of a pipeline stage's ranks on nodes, and the kinds of groups that they form.


class StageTopology(NamedTuple):
    """How many neighbouring ranks of a stage are on each node or NVLink domain; equal placements cost the same."""

    node_type: str
    """Node type of its ranks; if it spans several, the type whose costs are requested."""
    on_each_node: tuple[int, ...]
    node_types: tuple[str, ...] = ()
    """Node type of each node, if it spans several types."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return sum(self.on_each_node)

    @property
    def each_type(self) -> tuple["StageTopology", ...]:
        """Return the topology once for each node type of the stage; the slowest type determines common times."""
        names = dict.fromkeys(self.node_types or (self.node_type,))
        return tuple(self._replace(node_type=name) for name in names)

    @property
    def type_names(self) -> tuple[str, ...]:
        """The node types of its ranks, sorted by name."""
        return tuple(sorted({*self.node_types} or {self.node_type}))

    def ranks_on(self, node_type: str) -> int:
        """Return the number of its ranks on a node type."""
        types = self.node_types or (self.node_type,) * len(self.on_each_node)
        return sum(ranks for name, ranks in zip(types, self.on_each_node, strict=True) if name == node_type)


def stage_topology(cluster: Cluster, ranks: Sequence[int]) -> StageTopology:
    """Return the topology of a stage's ranks."""
    nodes, types = cluster.domain_of_rank, cluster.node_type_of_rank
    runs = [tuple(run) for _, run in groupby(ranks, key=nodes.__getitem__)]
    names = tuple(types[run[0]] for run in runs)
    return StageTopology(names[0], tuple(map(len, runs)), names if len(set(names)) > 1 else ())


@lru_cache(maxsize=4096)
def axis_group_kinds(topology: StageTopology, axis: Axis) -> tuple[GroupKind, ...]:
    """Return the kinds of a stage's groups along an axis."""
    return kinds_of(topology, axis.groups(range(topology.size)))


class DataGroupKinds(NamedTuple):
    """The kinds of a stage's data-parallel groups, whose ranks have equal tensor-parallel index."""

    shards: tuple[GroupKind, ...]
    """Kinds of the groups of neighbours over which a layer's states are sharded."""
    replicas: tuple[GroupKind, ...]
    """Kinds of the groups of ranks that hold the same shard."""


@lru_cache(maxsize=4096)
def data_group_kinds(topology: StageTopology, axes: ParameterAxes) -> DataGroupKinds:
    """Return the kinds of the groups that shard a layer's states, and of the groups of replicas."""
    states = np.array(axes.states.groups(range(topology.size)))
    groups = states.reshape(len(states), axes.replicas, axes.shards)
    replicas = groups.swapaxes(1, 2)
    return DataGroupKinds(*(kinds_of(topology, each.reshape(-1, each.shape[2])) for each in (groups, replicas)))


def kinds_of(topology: StageTopology, groups: Iterable[Sequence[int]] | np.ndarray) -> tuple[GroupKind, ...]:
    """Return the kinds of groups of one size; ranks are numbered within the stage.

    If the stage spans node types, only groups with a rank on the requested type count.
    """
    nodes = np.repeat(np.arange(len(topology.on_each_node)), topology.on_each_node)
    members = groups if isinstance(groups, np.ndarray) else list(groups)
    if topology.node_types:
        ranks = np.asarray(members)
        on_type = np.array([name == topology.node_type for name in topology.node_types])[nodes]
        members = ranks[on_type[ranks].any(1)]
    return tuple(sorted(groups_by_kind(members, nodes))) if len(members) else ()


# Times of collectives from the hardware profile, and their mutual slowdowns with computation.


class Duration(NamedTuple):
    """A time, and a warning if it is based on numbers that were not measured."""

    time_s: float
    warning: str | None = None


class Slowdowns(NamedTuple):
    """Slowdowns of a computation and a collective that overlap: the ratio to the time without overlap."""

    compute: float
    collective: float


def collective_time(
    profiles: Profiles, collective: Collective, kinds: Iterable[GroupKind], num_bytes: float
) -> Duration:
    """Return the time of a collective that groups of these kinds run at once: the time of the slowest kind.

    `num_bytes` is the full tensor, as defined by `Collective`. A group of one rank, or no bytes, takes no time.
    Raises BadInput if the hardware profile has neither such groups nor larger ones.
    """
    keys = (CollectiveKey(collective, *kind) for kind in kinds if num_bytes > 0 and kind.size > 1)
    return longest([Duration(0.0), *(_on_curve(profiles, key, num_bytes) for key in keys)])


def send_kind_time(profiles: Profiles, consecutive: bool, across_nodes: bool, num_bytes: float) -> Duration:
    """Return the time of a message from one rank to another; for two ranks, their distance makes no difference."""
    key = CollectiveKey(Collective.P2P, 2, 1 if across_nodes else 2, consecutive)
    if key not in profiles.hardware.curves:
        other = CollectiveKey.from_fields(key, consecutive=not consecutive)
        key = other if other in profiles.hardware.curves else key
    return _on_curve(profiles, key, num_bytes)


def exchange_time(profiles: Profiles, consecutive: bool, across_nodes: bool, num_bytes: float) -> Duration:
    """Return the time of a step of a ring, in which each rank sends a message and receives one.

    It is the time of a message one way, times the measured ratio of two simultaneous messages, one each way, to one
    message. This ratio is at least 1 and linear in the logarithm of the bytes; 1 if overlap of sends was not measured.
    """
    one_way = send_kind_time(profiles, consecutive, across_nodes, num_bytes)
    log_bytes, factors = _both_ways(profiles.hardware, across_nodes)
    if not len(factors):
        return one_way
    factor = float(np.interp(log(max(1.0, num_bytes)), log_bytes, factors))
    return one_way._replace(time_s=one_way.time_s * factor)


@lru_cache(maxsize=16)
def _both_ways(hardware: HardwareProfile, across: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return log bytes, ascending [sizes], and the ratio of a simultaneous send and receive to one send [sizes].

    Both were measured between neighbours, inside a node or across nodes.
    """
    key = CollectiveKey(Collective.P2P, 2, 1 if across else 2, True)
    ratios: dict[int, list[float]] = {}
    for row in hardware.overlap.rows:
        alike = row.collective is Collective.P2P and row.ranks_per_node == key.ranks_per_node
        if alike and row.collective_bytes and row.collective_s and (nearest := nearest_measured(hardware, key)):
            one_way_s = seconds_on(hardware, nearest, row.collective_bytes)
            ratios.setdefault(row.collective_bytes, []).append(row.collective_s / one_way_s)
    sizes = sorted(ratios)
    return np.log(np.array(sizes)), np.array([max(1.0, median(np.array(ratios[size]))) for size in sizes])


def longest(durations: Iterable[Duration]) -> Duration:
    """Return the longest of several simultaneous durations."""
    return max(durations, key=lambda duration: duration.time_s)


def in_turn(durations: Iterable[Duration]) -> Duration:
    """Return the total of consecutive durations, with the first warning."""
    total_s, first = 0.0, None
    for time_s, warning in durations:
        total_s += time_s
        first = first or warning
    return Duration(total_s, first)


def slowdowns_of(
    profiles: Profiles, collective: Collective, kinds: Iterable[GroupKind], num_bytes: float
) -> Slowdowns | None:
    """Return the largest slowdowns among groups of these kinds, for a message of this size.

    Between measured sizes they are interpolated linearly in the logarithm of the bytes; beyond them the nearest size's
    apply. None if nothing was measured: then nothing is taken to overlap.
    """
    curves = (_slowdown_curve(profiles.hardware, collective, kind.size, kind.across_nodes) for kind in kinds)
    return largest_slowdowns(None if curve is None else _slowdowns_at(curve, num_bytes) for curve in curves)


class _SlowdownCurve(NamedTuple):
    """Measured slowdowns, each at least 1 [sizes], and the logarithms of the messages' bytes, ascending."""

    log_bytes: NDArray[Any]
    compute: NDArray[Any]
    collective: NDArray[Any]


def _slowdowns_at(curve: _SlowdownCurve, num_bytes: float) -> Slowdowns:
    at = log(max(1.0, num_bytes))
    compute, collective = (float(np.interp(at, curve.log_bytes, values)) for values in curve[1:])
    return Slowdowns(compute, collective)


@lru_cache(maxsize=256)
def _slowdown_curve(
    hardware: HardwareProfile, collective: Collective, size: int, across: bool
) -> _SlowdownCurve | None:
    """Return the median slowdowns by message size, over the computations that were timed during the collective.

    Rows are selected by these criteria in turn: sends, or other collectives; inside a node, or across nodes; this
    collective; this group size; a known message size. A criterion that none of the remaining rows meets is skipped.
    """
    table = hardware.overlap
    if not len(table):
        return None
    rows = np.ones(len(table), bool)
    sends = Collective.P2P.encode()
    for alike in (
        (table["collective"] == sends) == (collective is Collective.P2P),
        (table["ranks_per_node"] < table["group_size"]) == across,
        table["collective"] == collective.encode(),
        table["group_size"] == size,
        table["collective_bytes"] > 0,
    ):
        rows = rows & alike if (rows & alike).any() else rows
    sizes = np.unique(table["collective_bytes"][rows])
    medians = (
        [max(1.0, median(table[name][rows & (table["collective_bytes"] == size)])) for size in sizes]
        for name in ("compute_slowdown", "collective_slowdown")
    )
    return _SlowdownCurve(np.log(np.maximum(1, sizes)), *map(np.array, medians))


def largest_slowdowns(slowdowns: Iterable[Slowdowns | None]) -> Slowdowns | None:
    """Return the largest slowdowns of several messages; None if there are none or one is not known."""
    known = list(slowdowns)
    if not known or None in known:
        return None
    return Slowdowns(*map(max, zip(*filter(None, known), strict=True)))


def overlapped_time(compute_s: float, collective: Duration, slowdowns: Slowdowns | None) -> float:
    """Return the time that a collective adds to a computation if they start together.

    Both run slowed down until the shorter one is over; the other then continues at full speed. Without slowdowns they
    do not overlap.
    """
    collective_s = collective.time_s
    if slowdowns is None or collective_s == 0:
        return collective_s
    slow_compute, slow_collective = slowdowns
    if collective_s * slow_collective <= compute_s * slow_compute:
        return collective_s * slow_collective * (1 - 1 / slow_compute)
    return compute_s * slow_compute + collective_s - compute_s * slow_compute / slow_collective - compute_s


def _on_curve(profiles: Profiles, key: CollectiveKey, num_bytes: float) -> Duration:
    """Return the time of a kind of message, or of the measured kind nearest to it.

    A warning says if another kind is used, and if the size is beyond the measured ones.
    """
    hardware = profiles.hardware
    if (nearest := nearest_measured(hardware, key)) is None:
        problem = f"no {key.collective} among {key.group}, nor among more"
        is_imported = hardware.provenance.notes.startswith(MADE_FROM)
        remedy = "import a table that has it (--allreduce, --p2p, --sp-time)" if is_imported else "measure the hardware"
        raise BadInput(profiles.hardware_file, problem, f"{remedy} of this cluster")
    warnings = []
    if nearest != key:
        warnings.append(f"rounded up: {key.collective} among {key.group}: as measured among {nearest.group}")
    if num_bytes > (largest := hardware.curves[nearest][0][-1]):
        warnings.append(
            f"extrapolated: {key.collective} among {key.group_size} ranks of {num_bytes:.0f} bytes, "
            f"measured up to {largest}"
        )
    return Duration(seconds_on(hardware, nearest, num_bytes), "; ".join(warnings) or None)


# Time of redistribution between layouts, of sends between stages, of tied parameters and of the gradient norm.


Nodes = tuple[int, ...]
"""The node of each rank of a pipeline stage."""


class _AllToAll(NamedTuple):
    """The exchanges of one change of layout among groups of one kind: that kind, and the most that a rank sends."""

    kind: GroupKind
    numel_per_sample: float
    """Elements of one sample that a rank sends at most, one way."""


def redistribution_time(
    profiles: Profiles,
    topology: StageTopology,
    source: Layout,
    target: Layout,
    samples: int,
    outputs: Sequence[BoundaryTensor],
    itemsize: int,
) -> Duration:
    """Return the time to change a micro-batch's tensors from one layout to another, in one direction.

    It is one all_to_all per tensor on each closed group. A full all_to_all of n ranks sends (n-1)/n of its bytes to
    others; so a rank that sends x bytes takes as long as in a full all_to_all of x n/(n-1) bytes.
    """

    def moved(tensor: BoundaryTensor) -> Duration:
        taken = [Duration(0.0)]
        for kind, per_sample in _all_to_alls(topology, source, target, tensor.sequence_length, tensor.features):
            num_bytes = ceil(per_sample * samples * itemsize * kind.size / (kind.size - 1))
            taken.append(collective_time(profiles, Collective.ALL_TO_ALL, [kind], num_bytes))
        return longest(taken)

    return Duration(0.0) if source == target else in_turn(map(moved, outputs))


def send_time(
    profiles: Profiles,
    consecutive: bool,
    across_nodes: bool,
    layout: Layout,
    samples: int,
    outputs: Sequence[BoundaryTensor],
    itemsize: int,
) -> Duration:
    """Return the time to pass a micro-batch to the next stage: a rank sends its activation shard to one other rank."""

    def sent(tensor: BoundaryTensor) -> Duration:
        tokens = layout.activation_shard(0, samples, tensor.sequence_length).tokens
        return send_kind_time(profiles, consecutive, across_nodes, tokens * tensor.features * itemsize)

    return in_turn(map(sent, outputs))


def handover_time(
    profiles: Profiles,
    nodes: tuple[Nodes, ...],
    source: Layout,
    target: Layout,
    samples: int,
    outputs: Sequence[BoundaryTensor],
    itemsize: int,
) -> Duration:
    """Return the time to pass a micro-batch to a stage of another width: the longer of forward and backward.

    Each rank sends pieces to several others at once. The busiest rank counts: all that it sends, or receives, as one
    message, which goes across nodes if a part of it does. `nodes`: the nodes of both stages' ranks.
    """
    times = samples // common_samples(source, target)

    def sent(tensor: BoundaryTensor) -> Duration:
        busiest = _busiest(nodes, source, target, tensor.sequence_length)
        sizes = ((across, times * tokens * tensor.features * itemsize) for across, tokens in busiest)
        return longest([Duration(0.0), *(send_kind_time(profiles, False, across, size) for across, size in sizes)])

    return in_turn(map(sent, outputs))


@lru_cache(maxsize=8192)
def _busiest(
    nodes: tuple[Nodes, ...], source: Layout, target: Layout, sequence_length: int
) -> tuple[tuple[bool, int], ...]:
    """Return the most positions that a rank sends or receives, forward or backward, inside a node and across nodes.

    They are counted for `common_samples`, which both layouts can divide; shards are exact, so numbers of positions are
    proportional to the samples.
    """
    samples = common_samples(source, target)
    most: dict[bool, int] = {}
    for senders, receivers, ends in ((source, target, nodes), (target, source, nodes[::-1])):
        moved, far = Counter[tuple[bool, int]](), set[tuple[bool, int]]()
        for transfer in redistribution_plan(senders, receivers, samples, sequence_length):
            for port in ((False, transfer.source), (True, transfer.target)):
                moved[port] += transfer.piece.tokens
                if ends[0][transfer.source] != ends[1][transfer.target]:
                    far.add(port)
        for port, tokens in moved.items():
            most[port in far] = max(most.get(port in far, 0), tokens)
    return tuple(sorted(most.items()))


@lru_cache(maxsize=8192)
def _all_to_alls(
    topology: StageTopology, source: Layout, target: Layout, sequence_length: int, features: int
) -> tuple[_AllToAll, ...]:
    """Return the all_to_alls of a change of layout: kinds of groups, and elements per sample.

    Shards are exact, so elements are proportional to the samples. If the groups of both layouts are neighbours, ranks
    exchange only inside blocks of lcm(tp, tp') ranks, which are all alike.
    """
    block = common_block(source, target)
    inner = source._replace(stage_size=block), target._replace(stage_size=block)
    samples = common_samples(*inner)
    sent = sent_numel(*inner, samples, sequence_length, features)
    most: dict[GroupKind, int] = {}
    for group in closed_groups(*inner, samples, sequence_length):
        largest = max(sent[rank] for rank in group)
        if largest:
            everywhere = [[start + rank for rank in group] for start in range(0, source.stage_size, block)]
            for kind in kinds_of(topology, everywhere):
                most[kind] = max(most.get(kind, 0), largest)
    per_block = samples * source.stage_size // block
    return tuple(_AllToAll(kind, largest / per_block) for kind, largest in sorted(most.items()))
