"""How the ranks of a candidate lie on the nodes, and how fast they send: FASOP's slowest-link rules."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright_search.fasop.problem import NodeCosts, Problem


class Network(NamedTuple):
    """Of one placement of nodes and one set of degrees; seconds a byte."""

    has_type: NDArray[Any]
    """Whether a stage has ranks on a node type [stages, types]."""
    send: NDArray[Any]
    """From a stage to the next, one way [stages - 1]."""
    reduce: NDArray[Any]
    """Of an all-reduce of two ranks' worth: the byte once over the ring's slowest link [stages]."""
    tied: float
    """Between first and last stage; 0 where they are one."""


class Ranks(NamedTuple):
    """Of each rank [stages, data-parallel, tensor-parallel]: its node, and a node's type."""

    node: NDArray[Any]
    kind: NDArray[Any]


def network(problem: Problem, nodes: tuple[int, ...], tp_size: int, dp_size: int, pp_size: int) -> Network:
    """Links of groups that lie apart share a node's, those inside may share a bus."""
    ranks = _ranks(problem.devices_per_node, nodes, tp_size, dp_size, pp_size)
    types = range(len(problem.node_types))
    has_type = np.stack([(ranks.kind == kind).any(axis=(1, 2)) for kind in types], axis=1)
    rates = _rates(problem.node_types)
    tied = 0.0
    if pp_size > 1:
        ends = Ranks(*(own[[0, -1]] for own in ranks))
        rate = _between(ends, rates["reduce_inside"], rates["reduce_between"]).min()
        tied = min(dp_size, problem.devices_per_node) / rate
    return Network(has_type, _send(ranks, rates), _reduce(problem, ranks, rates, has_type), tied)


def _ranks(devices_per_node: int, nodes: tuple[int, ...], tp_size: int, dp_size: int, pp_size: int) -> Ranks:
    node = np.arange(tp_size * dp_size * pp_size).reshape(pp_size, dp_size, tp_size) // devices_per_node
    return Ranks(node, np.array(nodes)[node])


@lru_cache(maxsize=16)
def _rates(node_types: tuple[NodeCosts, ...]) -> dict[str, NDArray[Any]]:
    names = ("send_inside", "send_between", "reduce_inside", "reduce_between", "shares_inside")
    return {name: np.array([getattr(own, name) for own in node_types]) for name in names}


def _between(ranks: Ranks, inside: NDArray[Any], between: NDArray[Any]) -> NDArray[Any]:
    """The rate from each stage's rank to the same rank of the next stage."""
    near, far = ranks.kind[:-1], np.minimum(between[ranks.kind[:-1]], between[ranks.kind[1:]])
    return np.asarray(np.where(ranks.node[:-1] == ranks.node[1:], inside[near], far))


def _send(ranks: Ranks, rates: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """All ranks of a stage share what leaves a node."""
    _, dp_size, tp_size = ranks.node.shape
    rate = _between(ranks, rates["send_inside"], rates["send_between"] / (dp_size * tp_size))
    return np.asarray(1 / rate.min(axis=(1, 2))) if len(rate) else np.zeros(0)


def _reduce(problem: Problem, ranks: Ranks, rates: dict[str, NDArray[Any]], has_type: NDArray[Any]) -> NDArray[Any]:
    """The ring goes over data-parallel ranks in order; the tensor-parallel ranks' rings share nodes' links."""
    pp_size, dp_size, tp_size = ranks.node.shape
    if dp_size == 1:
        return np.zeros(pp_size)
    after = Ranks(*(np.roll(own, -1, axis=1) for own in ranks))
    far = np.minimum(rates["reduce_between"][ranks.kind], rates["reduce_between"][after.kind])
    rate = np.where(ranks.node == after.node, rates["reduce_inside"][ranks.kind], far).min(axis=(1, 2))
    if tp_size * dp_size >= problem.devices_per_node:
        return np.asarray(tp_size / rate)
    shares = (has_type & rates["shares_inside"]).any(axis=1) if tp_size > 1 else np.zeros(pp_size, bool)
    return np.asarray(np.where(shares, problem.devices_per_node / dp_size, 1) / rate)
