"""`shardwright-search verify`: a search's lower bound confirmed from its certificate, without searching."""

from collections.abc import Mapping
from pathlib import Path
from time import monotonic

from shardwright_formats.command import show
from shardwright_formats.io import BadInput, read_document, sha256_of_file
from shardwright_formats.types import Certificate, Plan
from shardwright_search.certificate.check import confirms
from shardwright_search.commands.certificate import check_certifiable, problems_of, scale_of
from shardwright_search.commands.inputs import read_inputs
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import VerifyOptions
from shardwright_search.space.request import SearchRequest
from shardwright_search.space.search_space import SearchSpace, space_of


def verify(options: VerifyOptions) -> None:
    """Confirm a certificate, or say what does not hold; the numbers it stands on are priced anew."""
    started = monotonic()
    plan, certificate = read_document(options.plan, Plan), read_document(options.certificate, Certificate)
    request, inputs = read_document(options.search, SearchRequest), read_inputs(options)
    _check_pinned(options, certificate, plan, {"search": options.search} | inputs.files)
    check_certifiable(request, options.search)
    space = space_of(request, plan.model, plan.cluster, inputs.profiles, options.search)
    count = _check_proofs(options, certificate, space, plan)
    own_ps = evaluate(plan, inputs.profiles, space.instance.costs, timeline=False).objective_ps
    if own_ps < certificate.bound_ps:
        raise BadInput(options.certificate, f"its bound is above what {options.plan} takes", _ANEW)
    show(
        f"verified: no plan of the space takes less than {certificate.bound_ps * 1e-9:.6f} ms a step of "
        f"{plan.global_batch_size} samples (closed form)\n"
        f"this plan takes {own_ps * 1e-9:.6f} ms: no plan is more than {own_ps / certificate.bound_ps - 1:.4%} faster\n"
        f"{count} configurations confirmed in {monotonic() - started:.1f} s"
    )


_ANEW = "make it anew with plan --certificate"


def _check_pinned(options: VerifyOptions, certificate: Certificate, plan: Plan, files: Mapping[str, Path]) -> None:
    if certificate.plan_sha256 != plan.sha256:
        raise BadInput(options.certificate, f"is the certificate of another plan than {options.plan}", _ANEW)
    for role in dict.fromkeys((*files, *certificate.inputs_sha256)):
        own = sha256_of_file(files[role]) if role in files else None
        if certificate.inputs_sha256.get(role) != own:
            what = f"was made with another {role} than {files[role]}" if role in files else f"was made with a {role}"
            raise BadInput(options.certificate, what, f"give that {role}, or {_ANEW}")


def _check_proofs(options: VerifyOptions, certificate: Certificate, space: SearchSpace, plan: Plan) -> int:
    """The number of configurations; BadInput where one is missing, or its proof does not hold."""
    file, bound = options.certificate, certificate.bound_ps * scale_of(space.instance.request, plan)
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
