"""`shardwright-search fasop`: FASOP's table of its own search space."""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import NamedTuple

from shardwright_formats.command import show
from shardwright_formats.io import BadInput, NothingFits, check_writable, read_document, write_bytes
from shardwright_formats.types import Cluster, Model, Plan, Prediction
from shardwright_search.commands.inputs import Inputs, read_inputs
from shardwright_search.commands.prediction import plan_summary, prediction_of_evaluated, prediction_path, written
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.fasop.estimate import Estimate, batches, estimates
from shardwright_search.fasop.exhaustive import MAX_PARTITIONS, check
from shardwright_search.fasop.foreign import joined, read_foreign
from shardwright_search.fasop.inputs import problem_of
from shardwright_search.fasop.options import FasopOptions
from shardwright_search.fasop.plan import plan_of
from shardwright_search.fasop.problem import Candidate, Problem, candidates
from shardwright_search.fasop.table import csv_of
from shardwright_search.rent.sub_clusters import MAX_SUB_CLUSTERS
from shardwright_search.space.request import SearchRequest


class _Asked(NamedTuple):
    """What is to be estimated, read from the files that the options name."""

    request: SearchRequest
    cluster: Cluster
    model: Model
    inputs: Inputs
    problem: Problem
    every: list[Candidate]


def fasop(options: FasopOptions) -> None:
    """Write the table, and the plan that is asked for."""
    asked = _read(options)
    checked = [_checked(asked.problem, asked.every)] if options.exhaustive_partition else []
    found, joins = _estimated(asked, options.foreign)
    fitting = [estimate for estimate in found if not estimate.memory.is_oom]
    told = [f"{len(found)} candidates, {len(found) - len(fitting)} out of memory", *checked, *joins]
    told += [_told(asked.problem, fitting[0])] if fitting else []
    with ExitStack() as all_or_none:
        if options.plan is not None and fitting:
            plan = plan_of(asked.problem, fitting[0], asked.request, asked.model, asked.cluster)
            prediction = _prediction(plan, asked, options)
            told.append(plan_summary(plan, prediction))
            all_or_none.enter_context(written(options.plan, plan, prediction))
        write_bytes(options.out, csv_of(asked.problem, found, list(asked.cluster.node_types), options.steps))
        show("\n".join(told))
    if options.plan is not None and not fitting:
        raise NothingFits(
            f"{options.search}: no plan is written: every candidate has too little memory: see {options.out}"
        )


def _read(options: FasopOptions) -> _Asked:
    request = read_document(options.search, SearchRequest)
    cluster, model = read_document(options.cluster, Cluster), read_document(options.model, Model)
    inputs = read_inputs(options)
    problem = problem_of(request, model, cluster, inputs.profiles, options.cluster, options.search)
    for path in (options.out, *_plan_files(options)):
        check_writable(path)
    every = _candidates(problem, cluster, options)
    if not every:
        what = "no candidate: no degrees divide the devices, the batch and the layers"
        raise BadInput(options.search, what, "change global_batch_size, or profile more tp_sizes")
    return _Asked(request, cluster, model, inputs, problem, every)


def _estimated(asked: _Asked, foreign: Sequence[Path]) -> tuple[list[Estimate], list[str]]:
    """The fastest first, with what came of foreign tables."""
    found, told = estimates(asked.problem, asked.every), []
    for file in foreign:
        others = read_foreign(file, asked.problem, asked.every)
        before, found = found, joined(asked.problem, found, others)
        taken = {(own.candidate, own.partition) for own in found} - {(own.candidate, own.partition) for own in before}
        told.append(f"{len(taken)} of {len(others)} partitions of {file.name} are faster, and taken")
    return found, told


def _prediction(plan: Plan, asked: _Asked, options: FasopOptions) -> Prediction:
    files = {"cluster": options.cluster, "model": options.model, "search": options.search} | asked.inputs.files
    evaluation = evaluate(plan, asked.inputs.profiles)
    return prediction_of_evaluated(plan, evaluation, files, asked.inputs.warnings)


def _plan_files(options: FasopOptions) -> list[Path]:
    return [] if options.plan is None else [options.plan, prediction_path(options.plan)]


def _candidates(problem: Problem, cluster: Cluster, options: FasopOptions) -> list[Candidate]:
    most = [sum(g.count for g in cluster.nodes if g.node_type == own.name) for own in problem.node_types]
    if not options.sub_clusters:
        return list(candidates(problem, most))
    number = 1
    for count in most:
        number *= count + 1
    if number > MAX_SUB_CLUSTERS:
        what = f"{number} sub-clusters, more than {MAX_SUB_CLUSTERS}"
        raise BadInput(options.cluster, what, "take a cluster of fewer nodes")
    chosen = product(*(range(count + 1) for count in most))
    return [own for counts in chosen if any(counts) for own in candidates(problem, counts)]


def _checked(problem: Problem, every: list[Candidate]) -> str:
    """What trying all partitions told; AssertionError, with the first of them, where one is better than the chosen."""
    results = [check(problem, batch) for batch in batches(problem, every)]
    wrong = [what for result in results for what in result.wrong]
    if wrong:
        raise AssertionError(f"{len(wrong)} partitions are not the best: {wrong[0]}")
    tried, left = sum(result.tried for result in results), sum(result.left for result in results)
    return (
        f"{tried} partitions are the best of all; {left} candidates have more than {MAX_PARTITIONS} and were not tried"
    )


def _told(problem: Problem, best: Estimate) -> str:
    own = best.candidate
    nodes = "+".join(problem.node_types[kind].name for kind in own.nodes)
    return (
        f"{best.step_s:.6g} s a step, {best.memory.gib:.4g} GiB: tp {own.tp_size}, dp {own.dp_size}, pp {own.pp_size}, "
        f"micro-batch {own.micro_batch_size}, layers {'+'.join(map(str, best.partition))} on {nodes}"
    )
