"""FASOP's result table: a row for each candidate, the fastest first; partitions of other tables; a row as a plan."""

import ast
import csv
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from itertools import accumulate, pairwise
from operator import attrgetter
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from shardwright_formats.io import BadInput, read_bytes
from shardwright_formats.types import Cluster, Model, Plan, Schedule
from shardwright_search.fasop.estimate import FasopEstimate, batches, priced
from shardwright_search.fasop.problem import FasopProblem
from shardwright_search.space.request import SearchRequest
from shardwright_search.space.uniform import UniformStrategy, plan_of_uniform

_BEFORE = ("mbs", "tp", "dp", "pp", "node placement")
_AFTER = (
    "partition",
    "estimated time (s/step)",
    "pipeline time",
    "DP all-reduce time",
    "embedding layer all-reduce time",
    "price_per_step",
    "is_oom",
    "oom_gpumem",
    "is_fsdp_oom",
    "fsdpoom_gpumem",
    "train_cost",
)
_NEEDED = (*_BEFORE, "partition")
_MAX_BYTES = 2**28
_MAX_CELL = 2**16

Partitions = Mapping[UniformStrategy, tuple[int, ...]]
"""Layers of each stage by candidate, embedding and head counted."""


def csv_of(problem: FasopProblem, estimates: Iterable[FasopEstimate], node_types: Sequence[str], steps: int) -> bytes:
    """Return the table with FASOP's names of columns; times in s, prices in USD, memory in GiB.

    Each node type has a column for its number of nodes, where FASOP has num_a100 and num_a10. `steps` is the length of
    the training that is priced.
    """
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((*_BEFORE, *(f"num_{name}" for name in node_types), *_AFTER))
    for estimate in estimates:
        candidate, memory, usd = estimate.candidate, estimate.memory, estimate.usd_per_step
        nodes = [problem.node_types[kind].name for kind in candidate.nodes]
        row = (
            candidate.micro_batch_size,
            candidate.tp_size,
            candidate.dp_size,
            candidate.pp_size,
            nodes,
            *(nodes.count(name) for name in node_types),
            list(estimate.partition),
            estimate.step_s,
            estimate.pipeline_s,
            estimate.reduction_s,
            estimate.tied_s,
            "" if usd is None else usd,
            memory.is_oom,
            round(memory.gib, 4),
            memory.is_sharded_oom,
            round(memory.sharded_gib, 4),
            "" if usd is None else usd * steps,
        )
        writer.writerow(row)
    return out.getvalue().encode()


def read_foreign(file: Path, problem: FasopProblem, candidates: Iterable[UniformStrategy]) -> Partitions:
    """Return the partitions of a table of FASOP's fields; of a candidate that it has twice the first.

    Raises BadInput, with the line, for a row that is no candidate here, or that does not cut its layers.
    """
    try:
        lines = read_bytes(file, _MAX_BYTES).decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise BadInput(file, "holds more than ASCII text", "pass a table of FASOP's fields") from None
    reader = csv.DictReader(lines)
    missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        raise BadInput(file, f"has no column {missing[0]!r}", "pass a table of FASOP's fields")
    known, partitions = set(candidates), dict[UniformStrategy, tuple[int, ...]]()
    for cells in reader:
        candidate, layers = _row(file, reader.line_num, cells, problem)
        if candidate not in known:
            raise BadInput(file, f"line {reader.line_num} is no candidate of this cluster", "leave it out")
        if len(layers) != candidate.pp_size or sum(layers) != len(problem.kinds) or min(layers) < 1:
            cut = f"does not cut {len(problem.kinds)} layers into {candidate.pp_size} stages"
            raise BadInput(file, f"line {reader.line_num} {cut}", "correct it; embedding and head are layers")
        partitions.setdefault(candidate, layers)
    return partitions


def _row(
    file: Path, line: int, cells: Mapping[str, str | None], problem: FasopProblem
) -> tuple[UniformStrategy, tuple[int, ...]]:
    names = [node_type.name for node_type in problem.node_types]
    try:
        mbs, tp, dp, pp, placed, cut = ((cells[name] or "")[:_MAX_CELL] for name in _NEEDED)
        nodes = tuple(names.index(str(name)) for name in ast.literal_eval(placed))
        layers = tuple(int(count) for count in ast.literal_eval(cut))
        return UniformStrategy(int(tp), int(dp), int(float(pp)), int(mbs), nodes=nodes), layers
    except (ValueError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError):
        row = f"line {line} is no row of FASOP's fields with nodes of {' and '.join(names)}"
        raise BadInput(file, row, "correct it") from None


def joined(problem: FasopProblem, estimates: Sequence[FasopEstimate], foreign: Partitions) -> list[FasopEstimate]:
    """Return each candidate with the faster of both partitions, the fastest first; the foreign one only if faster."""
    others = {
        other.candidate: other
        for batch in batches(problem, foreign)
        for other in priced(problem, batch, np.array([np.cumsum([0, *foreign[x]]) for x in batch.candidates]))
    }
    step_s = attrgetter("step_s")
    return sorted((min(x, others.get(x.candidate, x), key=step_s) for x in estimates), key=step_s)


def plan_of(
    problem: FasopProblem, estimate: FasopEstimate, request: SearchRequest, model: Model, cluster: Cluster
) -> Plan:
    """Return the plan of plain data parallelism and 1F1B; nodes of a type are taken in the cluster's order."""
    candidate = estimate.candidate
    cluster = _placed_nodes(problem, candidate.nodes, cluster)
    width, ranks = candidate.tp_size * candidate.dp_size, _ranks(problem, candidate.nodes, cluster)
    blocks = [min(max(layer - 1, 0), len(model.layers)) for layer in accumulate(estimate.partition, initial=0)]
    return plan_of_uniform(
        request.name,
        candidate._replace(ranges=tuple(pairwise(blocks))),
        model,
        cluster,
        stage_ranks=[tuple(sorted(ranks[start : start + width])) for start in range(0, len(ranks), width)],
        global_batch_size=problem.batch,
        num_microbatches=candidate.num_microbatches(problem.batch),
        schedule=Schedule.ONE_F_ONE_B,
        precision=request.precision,
        attention=request.attention,
        compile=request.compile,
    )


def _placed_nodes(problem: FasopProblem, nodes: tuple[int, ...], cluster: Cluster) -> Cluster:
    """Return as many nodes of each type as are placed, the first of the whole cluster."""
    left = {node_type.name: nodes.count(kind) for kind, node_type in enumerate(problem.node_types)}
    groups = []
    for group in cluster.nodes:
        taken = min(group.count, left[group.node_type])
        left[group.node_type] -= taken
        groups += [replace(group, count=taken)] if taken else []
    return replace(cluster, nodes=tuple(groups))


def _ranks(problem: FasopProblem, nodes: tuple[int, ...], cluster: Cluster) -> list[int]:
    """Return the cluster's ranks in the order of the placed nodes."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(cluster.node_type_of_rank):
        ranks.setdefault(name, []).append(rank)
    left = {name: iter(numbers) for name, numbers in ranks.items()}
    names = [problem.node_types[kind].name for kind in nodes]
    return [next(left[name]) for name in names for _ in range(problem.devices_per_node)]
