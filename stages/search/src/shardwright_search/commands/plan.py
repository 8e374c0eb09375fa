"""`shardwright-search plan`, the best plan within a budget with its proof, and `verify`, its certificate's check."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from shardwright_formats.command import show
from shardwright_formats.io import (
    BadInput,
    NothingFits,
    RunFailed,
    atomic_path,
    check_writable,
    read_document,
    sha256_of_file,
    write_document,
)
from shardwright_formats.types import Certificate, Cluster, Model, Plan
from shardwright_search.certificate.check import confirms
from shardwright_search.certificate.make import certified
from shardwright_search.commands.prediction import (
    plan_summary,
    prediction_of_searched,
    prediction_path,
    progress,
    read_inputs,
    written,
)
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import PlanOptions, VerifyOptions
from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.solver.stopping import Stopped, soon, stopped_at
from shardwright_search.space.budget import Infeasible, budgets_of, budgets_of_stages
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.request import Objective, SearchRequest
from shardwright_search.space.search_space import SearchSpace, space_of

_IN_PLAN = ("cluster", "model")
"""Roles of files that a plan contains: a certificate pins the hashes of all others."""
_ANEW = "make it anew with plan --certificate"


def plan(options: PlanOptions) -> None:
    """Find the best plan, and write it, its prediction, and the certificate that is asked for."""
    request = read_document(options.search, SearchRequest)
    cluster, model = read_document(options.cluster, Cluster), read_document(options.model, Model)
    inputs = read_inputs(options)
    given = request, model, cluster, inputs.profiles, options.search
    if options.certificate is not None:
        _check_certifiable(request, options.search)
        space_of(*given).check_listed("no certificate")
        check_writable(options.certificate)
    for path in (options.out, prediction_path(options.out)):
        check_writable(path)
    second_opinion = certificate = None
    if options.prove:
        # Imported where it is asked for; HiGHS is missed before the search, not after it.
        from shardwright_search.certify import prove
        from shardwright_search.solver.milp import highs_version

        highs_version()
    files = {"cluster": options.cluster, "model": options.model, "search": options.search} | inputs.files
    deadline = inf if options.time_limit is None else monotonic() + options.time_limit
    with progress() as report:
        answer = find_best(*given, report, options.time_limit)
        if isinstance(answer, Infeasible):
            from shardwright_search.explain.what_if import further_remedies

            raise NothingFits(f"{options.search}: {answer.reason}{further_remedies(*given, deadline)}")
        if options.prove:
            searched = msgspec.structs.replace(request, reserve_gib=answer.reserve_gib)
            second_opinion = prove(answer, searched, *given[1:], options.prove_time_limit, report)
        if options.certificate is not None:
            if answer.reserve_gib > request.reserve_gib:
                problem = f"no certificate: communicators needed a reserve_gib of {answer.reserve_gib:.6f}"
                raise BadInput(options.search, problem, "write this reserve_gib")
            try:
                with stopped_at(soon(deadline)):
                    certificate = _certificate(answer, space_of(*given), files, report)
            except Stopped:
                raise RunFailed("no certificate: the time limit was over before it was made") from None
    best_plan = answer.chosen.plan
    budgets_bytes = budgets_of_stages(best_plan, budgets_of(request, cluster, options.search))
    prediction = prediction_of_searched(answer, request, budgets_bytes, files, inputs.warnings, second_opinion)
    with ExitStack() as all_or_none:
        if options.certificate is not None and certificate is not None:
            write_document(all_or_none.enter_context(atomic_path(options.certificate)), certificate)
        all_or_none.enter_context(written(options.out, best_plan, prediction))
        show(plan_summary(best_plan, prediction))


def verify(options: VerifyOptions) -> None:
    """Confirm a certificate, or raise BadInput for what does not hold; its numbers are priced anew."""
    started = monotonic()
    plan, certificate = read_document(options.plan, Plan), read_document(options.certificate, Certificate)
    request, inputs = read_document(options.search, SearchRequest), read_inputs(options)
    _check_pinned(options, certificate, plan, {"search": options.search} | inputs.files)
    _check_certifiable(request, options.search)
    space = space_of(request, plan.model, plan.cluster, inputs.profiles, options.search)
    count = _check_proofs(options, certificate, space, plan)
    plan_ps = evaluate(plan, inputs.profiles, space.instance.costs, timeline=False).objective_ps
    if plan_ps < certificate.bound_ps:
        raise BadInput(options.certificate, f"its bound is above what {options.plan} takes", _ANEW)
    show(
        f"verified: no plan of the space takes less than {certificate.bound_ps * 1e-9:.6f} ms a step of "
        f"{plan.global_batch_size} samples (closed form)\n"
        f"this plan takes {plan_ps * 1e-9:.6f} ms: no plan is more than {plan_ps / certificate.bound_ps - 1:.4%} "
        "faster\n"
        f"{count} configurations confirmed in {monotonic() - started:.1f} s"
    )


def _check_pinned(options: VerifyOptions, certificate: Certificate, plan: Plan, files: Mapping[str, Path]) -> None:
    if certificate.plan_sha256 != plan.sha256:
        raise BadInput(options.certificate, f"is the certificate of another plan than {options.plan}", _ANEW)
    for role in dict.fromkeys((*files, *certificate.inputs_sha256)):
        given = sha256_of_file(files[role]) if role in files else None
        if certificate.inputs_sha256.get(role) != given:
            other = f"another {role} than {files[role]}" if role in files else f"a {role}"
            raise BadInput(options.certificate, f"was made with {other}", f"give that {role}, or {_ANEW}")


def _check_proofs(options: VerifyOptions, certificate: Certificate, space: SearchSpace, plan: Plan) -> int:
    """Return the number of configurations; BadInput where one is missing, or its proof does not hold."""
    file, bound = options.certificate, certificate.bound_ps * _scale(space.instance.request, plan)
    proofs = {proof.configuration: proof for proof in certificate.configurations}
    count = 0
    for name, problem, time_ps in problems_of(space):
        if (proof := proofs.pop(name, None)) is None:
            raise BadInput(file, f"leaves out a configuration of the space: {name}", _ANEW)
        if not confirms(problem, proof, time_ps(bound)):
            raise BadInput(file, f"does not confirm its bound: {name}", _ANEW)
        count += 1
    if proofs:
        raise BadInput(file, f"has a configuration that the space does not have: {next(iter(proofs))}", _ANEW)
    return count


def _check_certifiable(request: SearchRequest, file: Path) -> None:
    """Raise BadInput for a request whose space no certificate covers."""
    if any(schedule.interleaves for schedule in request.schedules):
        problem = "schedules: certificates do not cover interleaved_1f1b"
        raise BadInput(file, problem, "leave it out, or search without --certificate")


def _certificate(
    answer: SearchAnswer, space: SearchSpace, files: Mapping[str, Path], report: Callable[[str], None]
) -> Certificate:
    """Return the certificate of a search's answer.

    Raises RunFailed where nothing could be confirmed.
    """
    best = answer.best
    problems = ((name, problem, time_ps(best.score)) for name, problem, time_ps in problems_of(space))
    if (made := certified(problems, report)) is None:
        raise RunFailed("no certificate: nothing near the search's bound could be confirmed")
    gap, proofs = made
    return Certificate(
        plan_sha256=answer.chosen.plan.sha256,
        inputs_sha256={role: sha256_of_file(files[role]) for role in files if role not in _IN_PLAN},
        bound_ps=best.score * (1 - gap) / _scale(space.instance.request, answer.chosen.plan),
        configurations=proofs,
    )


def problems_of(space: SearchSpace) -> Iterator[tuple[str, Any, Callable[[float], float]]]:
    """Yield name and arrays of each configuration, and the function from a score to a time in it."""
    space.check_listed("no certificate")
    for target in space.targets:
        yield _configuration_name(target.configuration), space.instance.problem(target.configuration), target.time_ps


def _configuration_name(configuration: Configuration) -> str:
    """Return the text of a configuration, with choices of layers and buffers that the text leaves out."""
    fixed = configuration.layers, configuration.buffer_tokens
    return str(configuration) + ("" if fixed == (None, None) else f", {msgspec.json.encode(fixed).decode()}")


def _scale(request: SearchRequest, plan: Plan) -> float:
    """Return the factor from the time of a plan's step to the objective."""
    return 1.0 if request.objective is Objective.STEP_TIME else 1.0 / plan.global_batch_size
