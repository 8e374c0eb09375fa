"""`shardwright verify`: a plan and the certificate of its search's bound, checked without searching."""

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from time import monotonic

import msgspec

from shardwright.command import show
from shardwright.io import BadInput, read_document, sha256_of_file
from shardwright.types import Certificate, Cluster, Model, Plan
from shardwright_search.certificate.check import confirms
from shardwright_search.certificate.options import VerifyOptions
from shardwright_search.commands.prediction import read_inputs
from shardwright_search.cost_model.plan import cost_model_of, evaluate
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.solver.problem import Problem
from shardwright_search.space.budget import allowed_bytes, budgets_of, over_bytes, with_spare
from shardwright_search.space.configurations import Configuration, is_solved
from shardwright_search.space.membership import outside
from shardwright_search.space.request import SearchRequest
from shardwright_search.space.search_space import SearchSpace, space_of

IN_PLAN = ("cluster", "model")
"""Roles of files that a plan contains: a certificate pins the hashes of all others."""
_ANEW = "make it again with plan --certificate"
_SEARCHED = "give the plan that the search wrote"


def verify(options: VerifyOptions) -> None:
    """Confirm a plan and its certificate, with all numbers priced again; raise BadInput if they do not hold."""
    started = monotonic()
    plan, certificate = read_document(options.plan, Plan), read_document(options.certificate, Certificate)
    asked, inputs = read_document(options.search, SearchRequest), read_inputs(options)
    request = with_spare(asked, plan.cluster, inputs.profiles)
    _check_pinned(options, certificate, plan, {"search": options.search} | inputs.files)
    _check_given(options, plan)
    check_certifiable(request, options.search)
    space = space_of(request, plan.model, plan.cluster, inputs.profiles, options.search)
    if (difference := outside(space, plan)) is not None:
        raise BadInput(options.plan, f"is outside the space of {options.search}: {difference}", _SEARCHED)
    plan_ps = _objective_ps(options, plan, request, inputs.profiles)
    count = _check_proofs(options, certificate, space, plan)
    if plan_ps < certificate.bound_ps:
        raise BadInput(options.certificate, f"its bound exceeds the step time of {options.plan}", _ANEW)
    # What is printed is rounded to the safe side, too.
    bound_ns, gap = floor(certificate.bound_ps / 1000), ceil((plan_ps / Fraction(certificate.bound_ps) - 1) * 10**6)
    show(
        f"verified: no plan takes less than {bound_ns * 1e-6:.6f} ms a step of "
        f"{plan.global_batch_size} samples (closed form)\n"
        f"this plan takes {plan_ps * 1e-9:.6f} ms: no plan is more than {gap * 1e-4:.4f}% faster\n"
        f"{count} configurations confirmed in {monotonic() - started:.1f} s{_not_compared(options)}"
    )


def _check_pinned(options: VerifyOptions, certificate: Certificate, plan: Plan, files: Mapping[str, Path]) -> None:
    if certificate.plan_sha256 != plan.sha256:
        raise BadInput(options.certificate, f"is the certificate of another plan than {options.plan}", _ANEW)
    for role in dict.fromkeys((*files, *certificate.inputs_sha256)):
        given = sha256_of_file(files[role]) if role in files else None
        if certificate.inputs_sha256.get(role) != given:
            other = f"another {role} than {files[role]}" if role in files else f"a {role}"
            raise BadInput(options.certificate, f"was made with {other}", f"give that {role}, or {_ANEW}")


def _check_given(options: VerifyOptions, plan: Plan) -> None:
    """Raise BadInput if the plan is for another model or cluster than the given files."""
    if options.cluster is not None and read_document(options.cluster, Cluster) != plan.cluster:
        raise BadInput(options.plan, f"is for another cluster than {options.cluster}", _SEARCHED)
    if options.model is not None and read_document(options.model, Model) != plan.model:
        raise BadInput(options.plan, f"is for another model than {options.model}", _SEARCHED)


def _objective_ps(options: VerifyOptions, plan: Plan, request: SearchRequest, profiles: Profiles) -> int:
    """Return the closed form of a plan as in `evaluate`; raise BadInput if the plan exceeds the budget."""
    evaluation = evaluate(plan, profiles, cost_model_of(plan, profiles, request.time_model), timeline=False)
    budgets = budgets_of(request, plan.cluster, options.search)
    allowed = allowed_bytes(plan, evaluation.estimate, budgets)
    for number, (stage, most) in enumerate(zip(evaluation.estimate.stages, allowed, strict=True)):
        if stage.memory_bytes > most:
            problem = f"stage {number} takes {stage.memory_bytes} bytes a rank, the budget is {most}"
            raise BadInput(options.plan, problem, _SEARCHED)
    if max(over_bytes(plan, evaluation.estimate, budgets)) > 0:
        raise BadInput(options.plan, "keeps more in host memory than its node types have", _SEARCHED)
    return evaluation.objective_ps


def _not_compared(options: VerifyOptions) -> str:
    """Return a line that names what was read from the plan instead of from files; empty if nothing was."""
    left = [name for name in IN_PLAN if getattr(options, name) is None]
    given = " and ".join(f"--{name}" for name in left)
    return f"\nthe {' and the '.join(left)} are the plan's: {given} compare them with files" if left else ""


def _check_proofs(options: VerifyOptions, certificate: Certificate, space: SearchSpace, plan: Plan) -> int:
    """Return the number of configurations; BadInput where one is missing, or its proof does not hold."""
    file, bound_ps = options.certificate, Fraction(certificate.bound_ps)
    proofs = {proof.configuration: proof for proof in certificate.configurations}
    if len(proofs) < len(certificate.configurations):
        raise BadInput(file, "has several proofs of one configuration", _ANEW)
    count = 0
    for name, problem, limit_ps in problems_of(space, plan.global_batch_size):
        if (proof := proofs.pop(name, None)) is None:
            raise BadInput(file, f"leaves out a configuration of the space: {name}", _ANEW)
        if not confirms(problem, proof, limit_ps(bound_ps)):
            raise BadInput(file, f"does not confirm its bound: {name}", _ANEW)
        count += 1
    if proofs:
        raise BadInput(file, f"has a configuration that the space does not have: {next(iter(proofs))}", _ANEW)
    return count


def check_certifiable(request: SearchRequest, file: Path) -> None:
    """Raise BadInput for a request whose space no certificate covers."""
    if len(request.optimizers) > 1:
        raise BadInput(file, "optimizer: a certificate needs one", "name it, or search without --certificate")
    if open_ := [each for each in request.schedules if each.interleaves or not is_solved(each)]:
        problem = f"schedules: certificates do not cover {open_[0]}"
        raise BadInput(file, problem, "leave it out, or search without --certificate")


def problems_of(space: SearchSpace, batch_size: int) -> Iterator[tuple[str, Problem, Callable[[Fraction], Fraction]]]:
    """Yield each configuration's name and arrays, and a function from a bound to the step time that it implies.

    The bound is on the time of a step of the given batch size; other steps take as much for a sample.
    """
    space.check_listed("no certificate")
    for target in space.targets:
        samples = Fraction(target.configuration.global_batch_size, batch_size)
        offset_ps = Fraction(target.offset_ps)

        def limit_ps(bound_ps: Fraction, samples: Fraction = samples, offset_ps: Fraction = offset_ps) -> Fraction:
            return bound_ps * samples - offset_ps

        yield _configuration_name(target.configuration), space.instance.problem(target.configuration), limit_ps


def _configuration_name(configuration: Configuration) -> str:
    """Return the text of a configuration, with choices of layers and buffers that the text leaves out."""
    fixed = configuration.layers, configuration.buffer_tokens
    return str(configuration) + ("" if fixed == (None, None) else f", {msgspec.json.encode(fixed).decode()}")
