"""FASOP's result table: a row for each candidate, the fastest first, those out of memory among them."""

import csv
from collections.abc import Iterable, Sequence
from io import StringIO

from shardwright_search.fasop.estimate import Estimate
from shardwright_search.fasop.problem import Problem

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


def columns(node_types: Sequence[str]) -> tuple[str, ...]:
    """FASOP's names; where it has num_a100 and num_a10, every node type has its number of nodes."""
    return (*_BEFORE, *(f"num_{name}" for name in node_types), *_AFTER)


def csv_of(problem: Problem, estimates: Iterable[Estimate], node_types: Sequence[str], steps: int) -> bytes:
    """With a line of names; times in s, prices in USD, memory in GiB. `steps`: of the training that is priced."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns(node_types))
    names = [own.name for own in problem.node_types]
    writer.writerows(_row(estimate, names, node_types, steps) for estimate in estimates)
    return out.getvalue().encode()


def _row(estimate: Estimate, names: Sequence[str], node_types: Sequence[str], steps: int) -> list[object]:
    own, memory, usd = estimate.candidate, estimate.memory, estimate.usd_per_step
    placed = [names[kind] for kind in own.nodes]
    return [
        own.micro_batch_size,
        own.tp_size,
        own.dp_size,
        own.pp_size,
        placed,
        *(placed.count(name) for name in node_types),
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
    ]
