"""FASOP's memory formula: parameters with gradients and optimizer states, and the activations of tensor parallelism."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright_formats.types import GIB
from shardwright_search.fasop.problem import Candidate, LayerKind, Problem

SAFETY = 1.10
"""Factor on the plain estimate."""
_STATE_BYTES, _OPTIMIZER_BYTES = 18, 12
"""Of a parameter: all, and of these what data-parallel ranks can share out among them."""


class Memory(NamedTuple):
    """Of the stage with the least left, in GiB, with the safety factor; `sharded`: with shared optimizer states."""

    gib: float
    is_oom: bool
    sharded_gib: float
    is_sharded_oom: bool


def memory(problem: Problem, some: Sequence[Candidate], has_type: NDArray[Any], cuts: NDArray[Any]) -> list[Memory]:
    """Of candidates of equally many stages; `has_type` [candidates, stages, types], `cuts` [candidates, stages + 1]."""
    parameters, activations = _parameters(problem, some, cuts), _activations(problem, some, cuts)
    dp_size = np.array([own.dp_size for own in some])[:, None]
    shared = _STATE_BYTES - _OPTIMIZER_BYTES + _OPTIMIZER_BYTES / dp_size
    limits = np.array([own.limit_gib for own in problem.node_types])
    limit = np.where(has_type, limits, np.inf).min(axis=2)
    whole = _fullest(parameters * _STATE_BYTES + activations, limit)
    sharded = _fullest(parameters * shared + activations, limit)
    return [Memory(*one, *other) for one, other in zip(whole, sharded, strict=True)]


def _fullest(num_bytes: NDArray[Any], limit_gib: NDArray[Any]) -> list[tuple[float, bool]]:
    """GiB of the stage with the least left, and whether it lacks some."""
    gib = num_bytes / GIB * SAFETY
    least = (limit_gib - gib).argmin(axis=1)[:, None]
    taken = np.take_along_axis(gib, least, axis=1)[:, 0]
    is_oom = np.any(gib > limit_gib, axis=1)
    return [(float(one), bool(other)) for one, other in zip(taken, is_oom, strict=True)]


def _parameters(problem: Problem, some: Sequence[Candidate], cuts: NDArray[Any]) -> NDArray[Any]:
    """What a rank of each stage holds."""
    found = np.zeros(cuts[:, 1:].shape)
    for tp_size, own in problem.parameters.items():
        of = np.array([candidate.tp_size == tp_size for candidate in some])
        found[of] = np.diff(np.concatenate([[0.0], np.cumsum(own)])[cuts[of]], axis=1)
    return found


def _activations(problem: Problem, some: Sequence[Candidate], cuts: NDArray[Any]) -> NDArray[Any]:
    """Bytes of each stage, of as many microbatches as the pipeline is deep (Korthikanti et al. 2023, section 4)."""
    kinds = np.array(problem.kinds)
    embeddings, blocks, heads = (
        np.diff(np.concatenate([[0], np.cumsum(kinds == kind)])[cuts], axis=1) for kind in LayerKind
    )
    tp_size, pp_size = (np.array([getattr(own, name) for own in some])[:, None] for name in ("tp_size", "pp_size"))
    counts = np.array([own.num_microbatches(problem.batch) for own in some])[:, None]
    sizes = np.array([own.micro_batch_size for own in some])[:, None]
    in_flight = np.minimum(counts, pp_size)
    hidden, length = problem.hidden, problem.sequence_length
    numel = sizes * length * hidden
    embedding = numel * pp_size * in_flight / tp_size
    block = numel * in_flight * (10 + 24 / tp_size + 5 * problem.heads * length / (hidden * tp_size))
    head = 4 * sizes * length * (hidden + problem.vocabulary) / tp_size
    return np.asarray(embeddings * embedding + blocks * block + heads * head)
