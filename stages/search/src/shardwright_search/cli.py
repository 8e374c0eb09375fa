"""The commands of shardwright-search."""

from pathlib import Path
from typing import Annotated

import typer

from shardwright_formats.io.errors import NothingFits, one_line_errors
from shardwright_formats.io.json import atomic_path, read_document, write_document
from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.model import Model
from shardwright_formats.types.plan import Plan
from shardwright_formats.types.prediction import Prediction
from shardwright_search.certify import prove
from shardwright_search.commands.arguments import (
    ClusterFile,
    CorrectionFile,
    HardwareFile,
    ModelFile,
    PlanFile,
    ProfileFile,
    TimeModelOption,
)
from shardwright_search.commands.correct import correct_command
from shardwright_search.commands.explain import explain_command
from shardwright_search.commands.inputs import read_inputs
from shardwright_search.commands.interop import export_command, import_app
from shardwright_search.commands.prediction import prediction_of_evaluated, prediction_of_searched, prediction_path
from shardwright_search.commands.progress import progress
from shardwright_search.commands.select import select_command
from shardwright_search.commands.simulate import simulate_command
from shardwright_search.commands.uniform import uniform_command
from shardwright_search.cost_model.plan import cost_model_of, evaluate
from shardwright_search.cost_model.time_model import TimeModel
from shardwright_search.explain import plan_summary, show
from shardwright_search.explain.remedies import further_remedies
from shardwright_search.search import find_best
from shardwright_search.solver.milp import highs_version
from shardwright_search.space.budget import Infeasible, budgets_of
from shardwright_search.space.request import SearchRequest

__all__ = ["app", "main"]

app = typer.Typer(
    help="Find the plan that trains a model fastest within a memory budget, and say why.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def main() -> None:
    """Run the command line."""
    app()


@app.command("plan")
def plan_command(
    cluster: ClusterFile,
    model: ModelFile,
    hardware: HardwareFile,
    profile: ProfileFile,
    search: Annotated[Path, typer.Option(help="Search file (shardwright.search, JSON); its memory_gib is in GiB.")],
    out: Annotated[Path, typer.Option(help="Plan file to write; PLAN.prediction.json is written beside it.")],
    correction: CorrectionFile = None,
    time_limit: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which the best plan so far is taken, with its gap.")
    ] = None,
    proven: Annotated[bool, typer.Option("--prove", help="Let HiGHS look for a better plan, too.")] = False,
    prove_time_limit: Annotated[float, typer.Option(min=0, help="Seconds that HiGHS may take for all cases.")] = 60.0,
) -> None:
    """Find the best plan that fits the memory budget of the search file, and prove it.

    Ctrl-C takes the best plan so far, with the gap that is proven.
    """
    with one_line_errors():
        request = read_document(search, SearchRequest)
        machines, description = read_document(cluster, Cluster), read_document(model, Model)
        inputs = read_inputs(hardware, profile, correction)
        given = request, description, machines, inputs.profiles, search
        certificate = None
        if proven:  # HiGHS is missed before the search, not after it
            highs_version()
        with progress() as report:
            found = find_best(*given, report, time_limit)
            if proven and not isinstance(found, Infeasible):
                certificate = prove(found, *given, prove_time_limit, report)
        if isinstance(found, Infeasible):
            further = further_remedies(*given)
            raise NothingFits(f"{search}: {found.reason}{further}")
        files = {"cluster": cluster, "model": model, "search": search} | inputs.files
        budget_bytes = min(budgets_of(request, machines, search).values())
        prediction = prediction_of_searched(found, request, budget_bytes, files, inputs.warnings, certificate)
        _write_both(out, found.chosen.plan, prediction)
        show(plan_summary(found.chosen.plan, prediction))


@app.command("evaluate")
def evaluate_command(
    plan: PlanFile,
    hardware: HardwareFile,
    profile: ProfileFile,
    out: Annotated[Path, typer.Option(help="Prediction file to write (shardwright.prediction, JSON).")],
    correction: CorrectionFile = None,
    time_model: TimeModelOption = TimeModel.INTERPOLATE,
) -> None:
    """Predict step time (s) and memory (bytes) of any plan."""
    with one_line_errors():
        given = read_document(plan, Plan)
        inputs = read_inputs(hardware, profile, correction)
        costs = cost_model_of(given, inputs.profiles, time_model)
        evaluation = evaluate(given, inputs.profiles, costs)
        prediction = prediction_of_evaluated(given, evaluation, {"plan": plan} | inputs.files, inputs.warnings)
        write_document(out, prediction)
        show(plan_summary(given, prediction))


app.command("correct")(correct_command)
app.command("explain")(explain_command)
app.command("export")(export_command)
app.command("select")(select_command)
app.command("simulate")(simulate_command)
app.command("uniform")(uniform_command)
app.add_typer(import_app, name="import")


def _write_both(path: Path, plan: Plan, prediction: Prediction) -> None:
    """Write the plan and then its prediction, or neither: both are complete before one gets its name."""
    with atomic_path(prediction_path(path)) as new_prediction, atomic_path(path) as new_plan:
        write_document(new_prediction, prediction)
        write_document(new_plan, plan)
