"""`shardwright-search fasop`: FASOP's table of its own search space."""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

from shardwright_formats.command import show
from shardwright_formats.io import BadInput, NothingFits, check_writable, read_document, write_bytes
from shardwright_formats.types import Cluster, Model, Plan, Prediction
from shardwright_search.commands.prediction import (
    Inputs,
    plan_summary,
    prediction_of_evaluated,
    prediction_path,
    read_inputs,
    written,
)
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.fasop.estimate import FasopEstimate, batches, estimates
from shardwright_search.fasop.partition import MAX_PARTITIONS, check
from shardwright_search.fasop.problem import FasopProblem, candidates, problem_of
from shardwright_search.fasop.table import csv_of, joined, plan_of, read_foreign
from shardwright_search.options import FasopOptions
from shardwright_search.rent.sub_clusters import MAX_SUB_CLUSTERS
from shardwright_search.space.request import SearchRequest
from shardwright_search.space.uniform import UniformStrategy


class _Given(NamedTuple):
    """The problem and its candidates, with the files that they were read from."""

    request: SearchRequest
    cluster: Cluster
    model: Model
    inputs: Inputs
    problem: FasopProblem
    candidates: list[UniformStrategy]


def fasop(options: FasopOptions) -> None:
    """Write the table, and the plan that is asked for."""
    given = _read(options)
    lines = [_checked(given.problem, given.candidates)] if options.exhaustive_partition else []
    rows, joins = _estimated(given, options.foreign)
    fitting = [estimate for estimate in rows if not estimate.memory.is_oom]
    lines = [f"{len(rows)} candidates, {len(rows) - len(fitting)} out of memory", *lines, *joins]
    lines += [_best_line(given.problem, fitting[0])] if fitting else []
    with ExitStack() as all_or_none:
        if options.plan is not None and fitting:
            plan = plan_of(given.problem, fitting[0], given.request, given.model, given.cluster)
            prediction = _prediction(plan, given, options)
            lines.append(plan_summary(plan, prediction))
            all_or_none.enter_context(written(options.plan, plan, prediction))
        write_bytes(options.out, csv_of(given.problem, rows, list(given.cluster.node_types), options.steps))
        show("\n".join(lines))
    if options.plan is not None and not fitting:
        raise NothingFits(
            f"{options.search}: no plan is written: every candidate has too little memory: see {options.out}"
        )


def _read(options: FasopOptions) -> _Given:
    """Return the problem and its candidates; raise BadInput before anything is estimated."""
    request = read_document(options.search, SearchRequest)
    cluster, model = read_document(options.cluster, Cluster), read_document(options.model, Model)
    inputs = read_inputs(options)
    problem = problem_of(request, model, cluster, inputs.profiles, options.cluster, options.search)
    for path in (options.out, *(() if options.plan is None else (options.plan, prediction_path(options.plan)))):
        check_writable(path)
    listed = _candidates(problem, cluster, options)
    if not listed:
        none = "no candidate: no degrees divide the devices, the batch and the layers"
        raise BadInput(options.search, none, "change global_batch_size, or profile more tp_sizes")
    return _Given(request, cluster, model, inputs, problem, listed)


def _estimated(given: _Given, foreign: Sequence[Path]) -> tuple[list[FasopEstimate], list[str]]:
    """Return the estimates, the fastest first, and a line on each foreign table."""
    rows, lines = estimates(given.problem, given.candidates), []
    for file in foreign:
        others = read_foreign(file, given.problem, given.candidates)
        before, rows = rows, joined(given.problem, rows, others)
        taken = {(row.candidate, row.partition) for row in rows} - {(row.candidate, row.partition) for row in before}
        lines.append(f"{len(taken)} of {len(others)} partitions of {file.name} are faster, and taken")
    return rows, lines


def _prediction(plan: Plan, given: _Given, options: FasopOptions) -> Prediction:
    files = {"cluster": options.cluster, "model": options.model, "search": options.search} | given.inputs.files
    return prediction_of_evaluated(plan, evaluate(plan, given.inputs.profiles), files, given.inputs.warnings)


def _candidates(problem: FasopProblem, cluster: Cluster, options: FasopOptions) -> list[UniformStrategy]:
    most = [sum(g.count for g in cluster.nodes if g.node_type == kind.name) for kind in problem.node_types]
    if not options.sub_clusters:
        return list(candidates(problem, most))
    if (number := prod(count + 1 for count in most)) > MAX_SUB_CLUSTERS:
        too_many = f"{number} sub-clusters, more than {MAX_SUB_CLUSTERS}"
        raise BadInput(options.cluster, too_many, "take a cluster of fewer nodes")
    chosen = product(*(range(count + 1) for count in most))
    return [candidate for counts in chosen if any(counts) for candidate in candidates(problem, counts)]


def _checked(problem: FasopProblem, listed: list[UniformStrategy]) -> str:
    """Return a line on the trial of all partitions; raise AssertionError where one is better than the chosen."""
    results = [check(batch.pipelines, batch.candidates) for batch in batches(problem, listed)]
    wrong = [line for result in results for line in result.wrong]
    if wrong:
        raise AssertionError(f"{len(wrong)} partitions are not the best: {wrong[0]}")
    tried, left = sum(result.tried for result in results), sum(result.left for result in results)
    return (
        f"{tried} partitions are the best of all; {left} candidates have more than {MAX_PARTITIONS} and were not tried"
    )


def _best_line(problem: FasopProblem, best: FasopEstimate) -> str:
    candidate = best.candidate
    nodes = "+".join(problem.node_types[kind].name for kind in candidate.nodes)
    return (
        f"{best.step_s:.6g} s a step, {best.memory.gib:.4g} GiB: tp {candidate.tp_size}, dp {candidate.dp_size}, "
        f"pp {candidate.pp_size}, micro-batch {candidate.micro_batch_size}, "
        f"layers {'+'.join(map(str, best.partition))} on {nodes}"
    )
