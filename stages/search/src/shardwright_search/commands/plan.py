"""`shardwright plan`, the best plan within a budget with its proof, and the certificate of its bound."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from math import inf
from pathlib import Path
from time import monotonic

from msgspec import UNSET

from shardwright.command import show
from shardwright.display.columns import line_width, wrapped
from shardwright.io.errors import BadInput, NothingFits, RunFailed
from shardwright.io.json import atomic_path, check_writable, read_document, sha256_of_file, write_document
from shardwright.types import Certificate, Cluster, Model
from shardwright_search.advise.targeted import planned_for
from shardwright_search.certificate.make import certified
from shardwright_search.commands.prediction import (
    plan_summary,
    prediction_of_searched,
    prediction_path,
    progress,
    read_inputs,
    written,
)
from shardwright_search.commands.verify import IN_PLAN, check_certifiable, problems_of, split_problems_of
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.explain.what_if import WhatIf, better_batches, further_remedies
from shardwright_search.options import PlanOptions
from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.simplest import simplified
from shardwright_search.solver.stopping import ended, soon
from shardwright_search.space.budget import Infeasible, allowed_bytes, budgets_of, with_spare
from shardwright_search.space.request import SearchRequest
from shardwright_search.space.search_space import SearchSpace, space_of
from shardwright_search.systems.launch import in_pipeline_order
from shardwright_search.systems.registry import SYSTEMS

_STOPPED = "it was stopped before it was made"
_Given = tuple[SearchRequest, Model, Cluster, Profiles, Path]


def plan(options: PlanOptions) -> None:
    """Find the best plan, and write it, its prediction, and the certificate if requested."""
    asked = read_document(options.search, SearchRequest)
    cluster, model = read_document(options.cluster, Cluster), read_document(options.model, Model)
    inputs = read_inputs(options)
    request = with_spare(asked, cluster, inputs.profiles)
    given = request, model, cluster, inputs.profiles, options.search
    if options.certificate is not None and options.target is not None:
        raise BadInput("--certificate", "covers one search, but --for makes one each way", "leave one of them out")
    if options.certificate is not None:
        check_certifiable(request, options.search)
        space_of(*given).check_listed("no certificate")
        check_writable(options.certificate)
    for path in (options.out, prediction_path(options.out)):
        check_writable(path)
    certificate: Certificate | str | None = None
    files = {"cluster": options.cluster, "model": options.model, "search": options.search} | inputs.files
    deadline = inf if options.time_limit is None else monotonic() + options.time_limit
    with progress() as report:
        answer = _answer(options, given, report)
        if isinstance(answer, Infeasible):
            # What else would fit is not told of a system's part of the space.
            more = "" if options.target else further_remedies(*given, 0.0 if answer.stopped else deadline)
            raise NothingFits(f"{options.search}: {answer.reason}{more}")
        if options.certificate is not None:
            certificate = _certificate_or_reason(answer, given, files, report, deadline)
        runners_up = answer.runners_up if options.runners_up else ()
        # After Ctrl-C nothing else is begun.
        later = 0.0 if certificate == _STOPPED else deadline
        batches = () if options.target else tuple(_better_batches(WhatIf("", *given), answer, later))
    best_plan, estimate = answer.chosen.plan, answer.chosen.evaluation.estimate
    budgets_bytes = allowed_bytes(best_plan, estimate, budgets_of(request, cluster, options.search))
    limits = () if options.target is None else (f"searched within what {SYSTEMS[options.target].version} runs",)
    searched_request = request if options.target is None else answer.instance.request
    searched = answer, searched_request, budgets_bytes, files, (*inputs.warnings, *limits)
    prediction = prediction_of_searched(*searched, runners_up)
    with ExitStack() as all_or_none:
        if options.certificate is not None and isinstance(certificate, Certificate):
            write_document(all_or_none.enter_context(atomic_path(options.certificate)), certificate)
        all_or_none.enter_context(written(options.out, best_plan, prediction))
        show(wrapped((*plan_summary(best_plan, prediction), *batches), line_width()))
    if isinstance(certificate, str):
        raise RunFailed(f"no certificate: {certificate}: {options.out} is written without one")


def _answer(options: PlanOptions, given: _Given, report: Callable[[str], None]) -> SearchAnswer | Infeasible:
    """Return the answer, only of plans that the named system runs, if any; BadInput if it cannot run the answer."""
    request = given[0]
    if options.target is None:
        return simplified(find_best(*given, report, options.time_limit), request, options.search)
    answer = planned_for(options.target, request, given[1:], report, options.time_limit)
    if isinstance(answer, SearchAnswer):
        SYSTEMS[options.target].export(in_pipeline_order(answer.chosen.plan, options.search), options.search)
    return answer


def _better_batches(question: WhatIf, answer: SearchAnswer, deadline: float) -> Iterator[str]:
    """Yield a line for each nearby batch size that all devices divide and that is much faster per sample."""
    asked, estimate = answer.chosen.plan.global_batch_size, answer.chosen.evaluation.estimate
    for plan, evaluation in better_batches(question, answer, deadline):
        gives = f"{evaluation.estimate.samples_per_s:.6g} samples/s in place of {estimate.samples_per_s:.6g}"
        divides = f"{plan.cluster.num_devices} devices divide it, and not {asked}"
        yield f"global_batch_size {plan.global_batch_size} gives {gives}: {divides}"


def _certificate_or_reason(
    answer: SearchAnswer, given: _Given, files: Mapping[str, Path], report: Callable[[str], None], deadline: float
) -> Certificate | str:
    """Return the certificate of a search's answer, or why there is none."""
    made: list[Certificate | None] = []
    if not ended(lambda: made.append(_certificate(answer, space_of(*given), files, report)), soon(deadline)):
        return _STOPPED
    (certificate,) = made
    return certificate or "nothing near the search's bound could be confirmed"


def _certificate(
    answer: SearchAnswer, space: SearchSpace, files: Mapping[str, Path], report: Callable[[str], None]
) -> Certificate | None:
    """Return the certificate of a search's answer; None if nothing could be confirmed."""
    best, plan = answer.best, answer.chosen.plan
    samples = plan.global_batch_size / best.target.configuration.global_batch_size
    best_ps = (best.target.time_ps(best.score) + best.target.offset_ps) * samples
    if (made := certified(problems_of(space, plan.global_batch_size), best_ps, report)) is None:
        return None
    bound_ps, proofs = made
    split, split_ps = None, answer.split_bound_s * 1e12
    if split_ps:
        split = certified(split_problems_of(space, plan.global_batch_size), split_ps, report)
    return Certificate(
        plan_sha256=plan.sha256,
        inputs_sha256={role: sha256_of_file(files[role]) for role in files if role not in IN_PLAN},
        bound_ps=bound_ps,
        configurations=proofs,
        split_bound_ps=UNSET if split is None else split[0],
        split_configurations=() if split is None else split[1],
    )
