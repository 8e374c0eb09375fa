"""`shardwright-search plan`: the best plan within a budget, with its proof."""

from contextlib import ExitStack

from msgspec.structs import replace

from shardwright_formats.command import show
from shardwright_formats.io import BadInput, NothingFits, atomic_path, check_writable, read_document, write_document
from shardwright_formats.types import Cluster, Model
from shardwright_search.commands.certificate import certificate_of, check_certifiable
from shardwright_search.commands.inputs import read_inputs
from shardwright_search.commands.prediction import plan_summary, prediction_of_searched, prediction_path, written
from shardwright_search.commands.progress import progress
from shardwright_search.options import PlanOptions
from shardwright_search.search import find_best
from shardwright_search.space.budget import Infeasible, budgets_of, budgets_of_stages
from shardwright_search.space.request import SearchRequest
from shardwright_search.space.search_space import space_of


def plan(options: PlanOptions) -> None:
    """Find the best plan, and write it, its prediction, and the certificate that is asked for."""
    request = read_document(options.search, SearchRequest)
    cluster, model = read_document(options.cluster, Cluster), read_document(options.model, Model)
    inputs = read_inputs(options)
    given = request, model, cluster, inputs.profiles, options.search
    if options.certificate is not None:
        check_certifiable(request, options.search)
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
    with progress() as report:
        found = find_best(*given, report, options.time_limit)
        if isinstance(found, Infeasible):
            from shardwright_search.explain.remedies import further_remedies

            raise NothingFits(f"{options.search}: {found.reason}{further_remedies(*given)}")
        if options.prove:
            searched = replace(request, reserve_gib=found.reserve_gib)
            second_opinion = prove(found, searched, *given[1:], options.prove_time_limit, report)
        if options.certificate is not None:
            if found.reserve_gib > request.reserve_gib:
                what = f"no certificate: communicators needed a reserve_gib of {found.reserve_gib:.6f}"
                raise BadInput(options.search, what, "write this reserve_gib")
            certificate = certificate_of(found, space_of(*given), files, report)
    budgets_bytes = budgets_of_stages(found.chosen.plan, budgets_of(request, cluster, options.search))
    prediction = prediction_of_searched(found, request, budgets_bytes, files, inputs.warnings, second_opinion)
    with ExitStack() as all_or_none:
        if options.certificate is not None and certificate is not None:
            write_document(all_or_none.enter_context(atomic_path(options.certificate)), certificate)
        all_or_none.enter_context(written(options.out, found.chosen.plan, prediction))
        show(plan_summary(found.chosen.plan, prediction))
