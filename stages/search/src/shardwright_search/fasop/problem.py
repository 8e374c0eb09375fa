"""What FASOP's estimate of a model on a cluster is made of: arrays, whatever they were read from."""

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
from numpy.typing import NDArray

from shardwright_search.space.configurations import divisors

BYTES = 2
"""Of one number that is sent or reduced: FASOP's 16 bits."""


class LayerKind(IntEnum):
    """What FASOP's memory formula tells apart."""

    EMBEDDING = 0
    BLOCK = 1
    HEAD = 2


class NodeCosts(msgspec.Struct, frozen=True, kw_only=True):
    """One type of node; rates in bytes/s, infinite where there is no such link."""

    name: str
    limit_gib: float
    """What may be used of one device."""
    usd_per_hour: float | None
    """Of one node; null where no price is known."""
    send_inside: float
    """Of a message between two devices of a node."""
    send_between: float
    """Of all messages that leave a node together."""
    reduce_inside: float
    """Of the ring of an all-reduce inside a node; `reduce_between` likewise."""
    reduce_between: float
    shares_inside: bool = False
    """Whether several rings inside a node share one bus, as over PCIe."""


class Problem(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A model, a batch and the node types; arrays are over all layers, embedding and head included."""

    node_types: tuple[NodeCosts, ...]
    devices_per_node: int
    """Of every type."""
    batch: int
    """Samples of a step."""
    max_pp_size: int
    """Number of blocks."""
    kinds: tuple[LayerKind, ...]
    layer_ps: Mapping[tuple[str, int, int], NDArray[Any]]
    """Forward and backward of one microbatch in picoseconds, by node type, tp_size and micro-batch size."""
    parameters: Mapping[int, NDArray[Any]]
    """What a rank holds of each layer, by tp_size."""
    reduced: Mapping[int, NDArray[Any]]
    """Of these what data-parallel ranks reduce; FASOP counts a little more."""
    tied: int
    """Parameters of the embedding that first and last stage keep equal; 0 where nothing is tied."""
    outer_once: bool
    """Whether embedding and head are one parameter, reduced once where a stage has both."""
    hidden: int
    sequence_length: int
    vocabulary: int
    heads: int

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """What layers are known at."""
        return tuple(sorted(self.parameters))


MAX_TP_SIZE = 4


class Candidate(NamedTuple):
    """What is chosen before the layers are cut."""

    nodes: tuple[int, ...]
    """The type of each node in rank order, by its place in the problem's node types."""
    tp_size: int
    dp_size: int
    pp_size: int
    micro_batch_size: int

    def num_microbatches(self, batch: int) -> int:
        """Of a step."""
        return batch // (self.dp_size * self.micro_batch_size)


def candidates(problem: Problem, counts: Sequence[int]) -> Iterator[Candidate]:
    """Every one on a cluster of so many nodes of each type.

    Stages are equally wide blocks of neighbouring ranks, tensor-parallel groups lie inside them.
    """
    shapes = list(_shapes(problem, sum(counts)))
    for nodes in rotations(counts):
        yield from (Candidate(nodes, *shape) for shape in shapes)


def rotations(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The nodes, those of a type together, begun at each of them; what is equal once."""
    nodes = tuple(kind for kind, count in enumerate(counts) for _ in range(count))
    return tuple(dict.fromkeys(nodes[start:] + nodes[:start] for start in range(len(nodes))))


def _shapes(problem: Problem, num_nodes: int) -> Iterator[tuple[int, int, int, int]]:
    devices = problem.devices_per_node * num_nodes
    for tp_size in problem.tp_sizes:
        if devices % tp_size or tp_size > MAX_TP_SIZE:
            continue
        for dp_size in divisors(devices // tp_size):
            pp_size = devices // tp_size // dp_size
            if problem.batch % dp_size == 0 and pp_size <= problem.max_pp_size:
                for micro_batch_size in divisors(problem.batch // dp_size):
                    yield tp_size, dp_size, pp_size, micro_batch_size
