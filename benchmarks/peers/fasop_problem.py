"""FASOP's space as this benchmark prices it: the problem, and all its candidates."""

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
from numpy.typing import NDArray

from shardwright_search.space.configurations import divisors

BYTES = 2
"""Bytes of one number that is sent or reduced: FASOP's 16 bits."""
MAX_TP_SIZE = 4


class Candidate(NamedTuple):
    """One strategy for all layers, on nodes in an order."""

    tp_size: int
    dp_size: int
    pp_size: int
    micro_batch_size: int
    nodes: tuple[int, ...] = ()
    """Index of the node type of each node, in rank order."""

    def num_microbatches(self, batch: int) -> int:
        """Micro-batches of a step."""
        return batch // (self.dp_size * self.micro_batch_size)


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


def candidates(problem: FasopProblem, counts: Sequence[int]) -> Iterator[Candidate]:
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


def _shapes(problem: FasopProblem, num_nodes: int) -> Iterator[Candidate]:
    devices = problem.devices_per_node * num_nodes
    for tp_size in problem.tp_sizes:
        if devices % tp_size or tp_size > MAX_TP_SIZE:
            continue
        for dp_size in divisors(devices // tp_size):
            pp_size = devices // tp_size // dp_size
            if problem.batch % dp_size == 0 and pp_size <= problem.max_pp_size:
                for micro_batch_size in divisors(problem.batch // dp_size):
                    yield Candidate(tp_size, dp_size, pp_size, micro_batch_size)
