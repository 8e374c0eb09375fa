"""A problem from a model, a cluster and its profiles."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from shardwright_formats.io import BadInput
from shardwright_formats.key import LayerKey
from shardwright_formats.types import EMBEDDING, GIB, HEAD, Cluster, Model, NodeType, Strategy, misfit
from shardwright_formats.types.hardware_profile import Collective, GroupKind
from shardwright_search.cost_model.collectives import collective_time, send_kind_time
from shardwright_search.cost_model.compute import layer_cost
from shardwright_search.cost_model.profiles import Profiles, check_profiles
from shardwright_search.fasop.partition import is_exact
from shardwright_search.fasop.problem import MAX_TP_SIZE, LayerKind, NodeCosts, Problem
from shardwright_search.space.budget import budgets_of
from shardwright_search.space.configurations import divisors
from shardwright_search.space.request import SearchRequest, Space

_MESSAGE_BYTES = 64 * 2**20
"""What links are timed with: large, for FASOP's formulas know no latency."""
_KNOWN = frozenset(
    (
        "name",
        "objective",
        "global_batch_size",
        "memory_gib",
        "reserve_gib",
        "space",
        "precision",
        "attention",
        "compile",
    )
) | {"time_model"}


def check_request(request: SearchRequest, file: Path) -> None:
    """Raise BadInput, naming the search file, for another space, and for what FASOP's space has no choice of."""
    if request.space is not Space.FASOP:
        raise BadInput(file, f"space: {request.space}", "set it to fasop")
    if not isinstance(request.global_batch_size, int):
        raise BadInput(file, "global_batch_size: a range has no price per step", "give one batch size")
    plain = asdict(SearchRequest(name=request.name, global_batch_size=request.global_batch_size))
    for key, value in asdict(request).items():
        if key not in _KNOWN and value != plain[key]:
            raise BadInput(file, f"{key}: not known to the table of FASOP's space", "leave it out")


def problem_of(
    request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles, cluster_file: Path, file: Path
) -> Problem:
    """Return what the table is made of; links as the largest messages go, layers as profiled.

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
    budgets = budgets_of(request, cluster, file)
    by_type = {name: profiles.of_device(cluster.node_types[name].device) for name in names}
    parameters = {tp: np.array([float(model.types[t].parameter_count(tp)) for t in layers]) for tp in tp_sizes}
    assert isinstance(request.global_batch_size, int)
    sizes = divisors(request.global_batch_size)
    hidden = model.types[model.layers[0]].outputs[-1].features
    return Problem(
        node_types=tuple(
            _node_costs(
                name, cluster.node_types[name], budgets[name], by_type[name], len(cluster.node_of_rank) > devices
            )
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
        and all(LayerKey(type=t, tp_size=tp) in one.states for t in types for one in profiles.per_device)
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
