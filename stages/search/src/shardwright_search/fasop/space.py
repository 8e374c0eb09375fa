"""FASOP's candidates: one tensor-, data- and pipeline-parallel degree and micro-batch for all, nodes in rotation."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwright_search.fasop.problem import Problem
from shardwright_search.space.stage_widths import divisors

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
