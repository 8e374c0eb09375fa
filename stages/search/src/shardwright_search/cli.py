"""The commands of shardwright-search."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardwright_formats.cluster import Cluster
from shardwright_formats.errors import BadInput, NothingFits, one_line_errors
from shardwright_formats.files import atomic_path, read_document, write_document
from shardwright_formats.model import Model
from shardwright_formats.plan import Plan
from shardwright_formats.prediction import Prediction, RunnerUp
from shardwright_search.arguments import ClusterFile, CorrectionFile, HardwareFile, ModelFile, PlanFile, ProfileFile
from shardwright_search.budget import Infeasible, budgets_of
from shardwright_search.correct_cli import correct_command
from shardwright_search.evaluate import evaluate
from shardwright_search.explain import explanation, plan_summary, show
from shardwright_search.inputs import read_inputs
from shardwright_search.interop.cli import export_command, import_app
from shardwright_search.optimal import find_best
from shardwright_search.predict import prediction_of_evaluated, prediction_of_searched, prediction_path
from shardwright_search.profiles import read_profiles
from shardwright_search.request import SearchRequest
from shardwright_search.select_cli import select_command
from shardwright_search.simulate_cli import simulate_command
from shardwright_search.uniform_cli import uniform_command

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
) -> None:
    """Find the best plan that fits the memory budget of the search file, and prove it.

    Ctrl-C takes the best plan so far, with the gap that is proven.
    """
    with one_line_errors():
        request = read_document(search, SearchRequest)
        machines, description = read_document(cluster, Cluster), read_document(model, Model)
        inputs = read_inputs(hardware, profile, correction)
        with _progress() as report:
            found = find_best(request, description, machines, inputs.profiles, search, report, time_limit)
        if isinstance(found, Infeasible):
            raise NothingFits(f"{search}: {found.reason}")
        files = {"cluster": cluster, "model": model, "search": search} | inputs.files
        budget_bytes = min(budgets_of(request, machines, search).values())
        prediction = prediction_of_searched(found, request, budget_bytes, files, inputs.warnings)
        _write_both(out, found.chosen.plan, prediction)
        show(plan_summary(found.chosen.plan, prediction))


@app.command("evaluate")
def evaluate_command(
    plan: PlanFile,
    hardware: HardwareFile,
    profile: ProfileFile,
    out: Annotated[Path, typer.Option(help="Prediction file to write (shardwright.prediction, JSON).")],
    correction: CorrectionFile = None,
) -> None:
    """Predict step time (s) and memory (bytes) of any plan."""
    with one_line_errors():
        given = read_document(plan, Plan)
        inputs = read_inputs(hardware, profile, correction)
        evaluation = evaluate(given, inputs.profiles)
        prediction = prediction_of_evaluated(given, evaluation, {"plan": plan} | inputs.files, inputs.warnings)
        write_document(out, prediction)
        show(plan_summary(given, prediction))


@app.command("explain")
def explain_command(plan: PlanFile, hardware: HardwareFile, profile: ProfileFile) -> None:
    """Show time (ms) and memory (MiB) of a plan by term and pipeline stage, what binds, and the runners-up."""
    with one_line_errors():
        given = read_document(plan, Plan)
        evaluation = evaluate(given, read_profiles(hardware, profile))
        budget_bytes, runners_up = _believed(plan, given)
        show(explanation(given, evaluation.estimate, evaluation.warnings, budget_bytes, runners_up))


app.command("correct")(correct_command)
app.command("export")(export_command)
app.command("select")(select_command)
app.command("simulate")(simulate_command)
app.command("uniform")(uniform_command)
app.add_typer(import_app, name="import")


def _believed(path: Path, plan: Plan) -> tuple[int | None, tuple[RunnerUp, ...]]:
    """Budget and runners-up from the prediction beside a plan, if there is one."""
    beside = prediction_path(path)
    if not beside.exists():
        return None, ()
    prediction = read_document(beside, Prediction)
    if prediction.plan_sha256 != plan.sha256:
        raise BadInput(beside, f"is the prediction of another plan than {path.name}", "remove it or search again")
    return prediction.memory_budget_bytes, prediction.runners_up


def _write_both(path: Path, plan: Plan, prediction: Prediction) -> None:
    """Write the plan and then its prediction, or neither: both are complete before one gets its name."""
    with atomic_path(prediction_path(path)) as new_prediction, atomic_path(path) as new_plan:
        write_document(new_prediction, prediction)
        write_document(new_plan, plan)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Where lines of progress go: one live line on a terminal, plain lines on standard error otherwise."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("reading") as status:
            yield status.update
    else:
        yield lambda line: print(line, file=sys.stderr, flush=True)
