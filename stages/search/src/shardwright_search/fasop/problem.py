"""The problem of FASOP's space, from a model, a cluster and its profiles, and all its candidates."""

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwright_formats.io import BadInput
from shardwright_formats.key import LayerKey
from shardwright_formats.types import EMBEDDING, GIB, HEAD, MIB, Cluster, Model, NodeType, Strategy, misfit
from shardwright_formats.types.hardware_profile import Collective, GroupKind
from shardwright_search.cost_model.collectives import collective_time, send_kind_time
from shardwright_search.cost_model.compute import layer_cost
from shardwright_search.cost_model.profiles import Profiles, check_profiles
from shardwright_search.fasop.partition import is_exact
from shardwright_search.space.budget import budgets_of, with_spare
from shardwright_search.space.configurations import divisors
from shardwright_search.space.request import SearchRequest, Space
from shardwright_search.space.uniform import UniformStrategy

BYTES = 2
"""Bytes of one number that is sent or reduced: FASOP's 16 bits."""
MAX_TP_SIZE = 4
_MESSAGE_BYTES = 64 * MIB
"""Size of the messages that links are timed with: large, for FASOP's formulas know no latency."""
_KNOWN = frozenset(
    "name objective global_batch_size memory_gib reserve_gib space precision attention compile time_model".split()
)
"""Fields of a request that have a meaning in FASOP's space."""


class LayerKind(IntEnum):
    """The kind of a layer in FASOP's memory formula."""

    EMBEDDING = 0
    BLOCK = 1
    HEAD = 2


class NodeCosts(msgspec.Struct, frozen=True, kw_only=True):
    """A node type; rates in bytes/s, infinite where there is no such link."""

    name: str
    limit_gib: float
    """Usable memory of one device."""
    usd_per_hour: float | None
    """Price of one node; null where no price is known."""
    send_inside: float
    """Rate of a message between two devices of a node."""
    send_between: float
    """Rate of all messages that leave a node together."""
    reduce_inside: float
    """Rate of the ring of an all-reduce inside a node."""
    reduce_between: float
    """Rate of the ring of an all-reduce over several nodes."""
    shares_inside: bool = False
    """Flag of nodes in which several rings share one bus, as over PCIe."""


class FasopProblem(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A model, a batch and the node types; arrays are over all layers, embedding and head included."""

    node_types: tuple[NodeCosts, ...]
    devices_per_node: int
    """Number of devices of a node, the same for all types."""
    batch: int
    """Samples of a step."""
    max_pp_size: int
    """Number of blocks."""
    kinds: tuple[LayerKind, ...]
    layer_ps: Mapping[tuple[str, int, int], NDArray[Any]]
    """Forward and backward of one microbatch in picoseconds, by node type, tp_size and micro-batch size."""
    parameters: Mapping[int, NDArray[Any]]
    """Parameters that a rank holds of each layer, by tp_size."""
    reduced: Mapping[int, NDArray[Any]]
    """Parameters of each layer that data-parallel ranks reduce, by tp_size; FASOP counts a little more than held."""
    tied: int
    """Parameters of the embedding that first and last stage keep equal; 0 where nothing is tied."""
    outer_once: bool
    """Flag of an embedding and a head that are one parameter, reduced once where a stage has both."""
    hidden: int
    sequence_length: int
    vocabulary: int
    heads: int

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """Return the tensor-parallel sizes that layers are known at."""
        return tuple(sorted(self.parameters))


def candidates(problem: FasopProblem, counts: Sequence[int]) -> Iterator[UniformStrategy]:
    """Yield all candidates on a cluster of so many nodes of each type.

    Stages are equally wide blocks of neighbouring ranks, tensor-parallel groups lie inside them.
    """
    shapes = list(_shapes(problem, sum(counts)))
    for nodes in rotations(counts):
        yield from (shape._replace(nodes=nodes) for shape in shapes)


def rotations(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the orders of nodes that keep those of a type together, begun at each node; equal orders once."""
    nodes = tuple(kind for kind, count in enumerate(counts) for _ in range(count))
    return tuple(dict.fromkeys(nodes[start:] + nodes[:start] for start in range(len(nodes))))


def _shapes(problem: FasopProblem, num_nodes: int) -> Iterator[UniformStrategy]:
    devices = problem.devices_per_node * num_nodes
    for tp_size in problem.tp_sizes:
        if devices % tp_size or tp_size > MAX_TP_SIZE:
            continue
        for dp_size in divisors(devices // tp_size):
            pp_size = devices // tp_size // dp_size
            if problem.batch % dp_size == 0 and pp_size <= problem.max_pp_size:
                for micro_batch_size in divisors(problem.batch // dp_size):
                    yield UniformStrategy(tp_size, dp_size, pp_size, micro_batch_size)


def check_request(request: SearchRequest, file: Path) -> None:
    """Raise BadInput, naming the search file, for another space, and for choices that FASOP's space does not have."""
    if request.space is not Space.FASOP:
        raise BadInput(file, f"space: {request.space}", "set it to fasop")
    if not isinstance(request.global_batch_size, int):
        raise BadInput(file, "global_batch_size: a range has no price per step", "give one batch size")
    plain = SearchRequest(name=request.name, global_batch_size=request.global_batch_size)
    for key in request.__struct_fields__:
        if key not in _KNOWN and getattr(request, key) != getattr(plain, key):
            raise BadInput(file, f"{key}: not known to the table of FASOP's space", "leave it out")


def problem_of(
    request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles, cluster_file: Path, file: Path
) -> FasopProblem:
    """Return the problem; links are as fast as for the largest messages, layers as profiled.

    Raises BadInput where a profile lacks a point, the node types have unequal numbers of devices, or the model has no
    attention.
    """
    check_request(request, file)
    check_profiles(profiles, model, cluster, request.precision, request.attention, request.compile)
    names = tuple(dict.fromkeys(group.node_type for group in cluster.nodes))
    per_node = {cluster.node_types[name].devices_per_node for name in names}
    if len(per_node) > 1:
        problem = f"nodes of {' and '.join(map(str, sorted(per_node)))} devices"
        raise BadInput(cluster_file, problem, "FASOP's space needs equally many in each: search another space")
    (devices,) = per_node
    layers = (EMBEDDING, *model.layers, HEAD)
    tp_sizes = _tp_sizes(model, profiles, devices)
    budgets = budgets_of(with_spare(request, cluster, profiles), cluster, file)
    by_type = {name: profiles.of_device(cluster.node_types[name].device) for name in names}
    parameters = {tp: np.array([float(model.types[t].parameter_count(tp)) for t in layers]) for tp in tp_sizes}
    assert isinstance(request.global_batch_size, int)
    sizes = divisors(request.global_batch_size)
    hidden = model.types[model.layers[0]].outputs[-1].features
    return FasopProblem(
        node_types=tuple(
            _node_costs(name, cluster.node_types[name], budgets[name], by_type[name], cluster.num_devices > devices)
            for name in names
        ),
        devices_per_node=devices,
        batch=request.global_batch_size,
        max_pp_size=len(model.layers),
        kinds=(LayerKind.EMBEDDING, *[LayerKind.BLOCK] * len(model.layers), LayerKind.HEAD),
        layer_ps={
            (name, tp, size): _layer_ps(by_type[name], model, layers, tp, size, request)
            for name in names
            for tp in tp_sizes
            for size in sizes
        },
        parameters=parameters,
        reduced=parameters,
        tied=_tied(model),
        outer_once=bool(model.tied),
        hidden=hidden,
        sequence_length=model.types[model.layers[0]].outputs[-1].sequence_length,
        vocabulary=max(prod(p.shape) for p in model.types[EMBEDDING].parameters) // hidden,
        heads=_heads(model, cluster_file),
    )


def _tp_sizes(model: Model, profiles: Profiles, devices: int) -> tuple[int, ...]:
    """Return the degrees up to 4, as in FASOP, in a node, that all layers can be split by and all profiles have."""
    types = tuple(dict.fromkeys((EMBEDDING, *model.layers, HEAD)))
    return tuple(
        tp
        for tp in divisors(devices)
        if tp <= MAX_TP_SIZE
        and all(misfit(model, t, Strategy(tp_size=tp, dp_size=1)) is None for t in types)
        and all(LayerKey(type=t, tp_size=tp) in device.states for t in types for device in profiles.per_device)
    )


def _layer_ps(
    profiles: Profiles, model: Model, layers: Sequence[str], tp_size: int, size: int, request: SearchRequest
) -> NDArray[Any]:
    """Return forward and backward of each layer in picoseconds [layers]."""
    strategy = Strategy(tp_size=tp_size, dp_size=1)

    def time_ps(name: str) -> int:
        key = LayerKey.from_strategy(name, strategy, sequence_length=model.sequence_length)
        figures = layer_cost(profiles, key, size, request.time_model).figures
        return max(1, round((figures.forward_s + figures.backward_s) * 1e12))

    by_type = {name: time_ps(name) for name in dict.fromkeys(layers)}
    times_ps = np.array([by_type[name] for name in layers], np.int64)
    if not is_exact(len(layers), int(times_ps.sum())):
        problem = f"a microbatch of {size} samples takes {times_ps.sum() * 1e-12:.0f} s"
        raise BadInput(
            profiles.model_file, problem, "that is more than partitions are compared for: take a smaller batch"
        )
    return times_ps


def _node_costs(name: str, node_type: NodeType, budget: int, profiles: Profiles, several: bool) -> NodeCosts:
    devices = node_type.devices_per_node
    inside = GroupKind(devices, devices, True)
    return NodeCosts(
        name=name,
        limit_gib=budget / GIB,
        usd_per_hour=node_type.usd_per_hour,
        send_inside=_send_rate(profiles, across=False) if devices > 1 else np.inf,
        send_between=_send_rate(profiles, across=True) if several else np.inf,
        reduce_inside=_ring_rate(profiles, inside) if devices > 1 else np.inf,
        reduce_between=_ring_rate(profiles, GroupKind(2 * devices, devices, True)) if several else np.inf,
    )


def _send_rate(profiles: Profiles, across: bool) -> float:
    return _MESSAGE_BYTES / send_kind_time(profiles, True, across, _MESSAGE_BYTES).time_s


def _ring_rate(profiles: Profiles, kind: GroupKind) -> float:
    """Return the bandwidth at which a ring would take as long: 2 (n - 1) / n of the bytes go over each link."""
    taken = collective_time(profiles, Collective.ALL_REDUCE, [kind], _MESSAGE_BYTES)
    return 2 * (kind.size - 1) / kind.size * _MESSAGE_BYTES / taken.time_s


def _tied(model: Model) -> int:
    shapes = {p.name: prod(p.shape) for p in model.types[EMBEDDING].parameters}
    names = [name for pair in model.tied for name in pair if name in shapes]
    return sum(shapes[name] for name in dict.fromkeys(names))


def _heads(model: Model, file: Path) -> int:
    heads = [r.attention.heads for r in model.types[model.layers[0]].regions if r.attention is not None]
    if not heads:
        raise BadInput(file, f"model {model.name} has no attention", "FASOP's memory formula needs its heads")
    return heads[0]
