"""The command that says why a plan is what it is, what else there is, and what would help."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright_formats.io import BadInput, read_document, sha256_of_file
from shardwright_formats.types import Plan, Prediction
from shardwright_search.commands.inputs import Inputs, read_inputs
from shardwright_search.commands.prediction import prediction_path, read_prediction
from shardwright_search.commands.progress import progress
from shardwright_search.cost_model.layer import CostModel
from shardwright_search.cost_model.plan import Evaluation, cost_model_of, evaluate
from shardwright_search.cost_model.time_model import TimeModel
from shardwright_search.explain.binding import Change, Choices, binding_lines, faster_changes
from shardwright_search.explain.difference import difference
from shardwright_search.explain.tables import answers_shown, explanation, node_types_table, show_rich
from shardwright_search.explain.what_if import Answer, Question, answer, neighbours, outlook
from shardwright_search.options import ExplainOptions
from shardwright_search.space.budget import budgets_of, budgets_of_stages
from shardwright_search.space.configurations import narrowed
from shardwright_search.space.request import SearchRequest, batch_sizes

_STAYS = (
    "Messages inside a layer, of tensor and sequence parallelism, are part of its profiled time and stay as they are."
)


class _Asked(NamedTuple):
    """A search file and what it says."""

    file: Path
    request: SearchRequest


def explain(options: ExplainOptions) -> None:
    """Show the tables of a plan, and what else is asked for."""
    plan = read_document(options.plan, Plan)
    other = None if options.other is None else read_document(options.other, Plan)
    inputs = read_inputs(options)
    believed = read_prediction(options.plan, plan) if prediction_path(options.plan).exists() else None
    asked = None if options.search is None else _Asked(options.search, read_document(options.search, SearchRequest))
    if asked is not None:
        _check_made_by(asked, options.plan, plan, believed)
    if other is not None and other.model != plan.model:
        raise BadInput(options.other, f"is for another model than {options.plan.name}", "compare plans for one model")
    evaluation = evaluate(plan, inputs.profiles, _costs(plan, inputs, asked))
    parts = [_why(plan, evaluation, inputs, asked, believed)]
    if (types := node_types_table(plan, evaluation.estimate)) is not None:
        parts.append(types)
    if asked is not None:
        parts += _further(plan, evaluation, inputs, asked, options.time_limit)
    if other is not None:
        there = evaluate(other, inputs.profiles, _costs(other, inputs, asked))
        parts.append(difference(plan, evaluation.estimate, other, there.estimate))
    show_rich(Group(*parts))


def _costs(plan: Plan, inputs: Inputs, asked: _Asked | None) -> CostModel:
    time_model = TimeModel.INTERPOLATE if asked is None else asked.request.time_model
    return cost_model_of(plan, inputs.profiles, time_model)


def _why(
    plan: Plan, evaluation: Evaluation, inputs: Inputs, asked: _Asked | None, believed: Prediction | None
) -> RenderableType:
    """The tables of the plan itself, what binds, and the runners-up that its prediction has."""
    budgets_bytes, choices = _believed_budgets(plan, believed), Choices()
    if asked is not None:
        request = narrowed(asked.request, plan.cluster)
        budgets_bytes = budgets_of_stages(plan, budgets_of(request, plan.cluster, asked.file))
        choices = Choices(request.data_parallel, request.recompute, not request.fine_grained)
    changes: tuple[Change, ...] = ()
    if budgets_bytes is not None:
        changes = faster_changes(plan, evaluation, _costs(plan, inputs, asked), budgets_bytes, choices)
    lines = binding_lines(plan, evaluation.estimate, budgets_bytes, changes)
    lines += [f"warning: {warning}" for warning in (*evaluation.warnings, *inputs.warnings)]
    return explanation(plan, evaluation.estimate, budgets_bytes, lines, () if believed is None else believed.runners_up)


def _believed_budgets(plan: Plan, believed: Prediction | None) -> tuple[int, ...] | None:
    """By pipeline stage what the prediction says; of a mixed cluster it tells that of one stage only."""
    if believed is None or believed.memory_budget_bytes is None or len(set(plan.cluster.node_type_of_rank)) > 1:
        return None
    return (believed.memory_budget_bytes,) * len(plan.stages)


def _further(
    plan: Plan, evaluation: Evaluation, inputs: Inputs, asked: _Asked, time_limit_s: float | None
) -> Iterator[RenderableType]:
    """Tables of the neighbouring kinds, and of what more would bring."""
    kinds = neighbours(plan, asked.request, inputs.profiles, asked.file)
    more = outlook(plan, asked.request, inputs.profiles, asked.file)
    answers = _answers([*kinds, *more], time_limit_s)
    for title, own in (
        ("the best plan of each neighbouring kind, against this plan", answers[: len(kinds)]),
        ("what more would bring, against this plan", answers[len(kinds) :]),
    ):
        yield answers_shown(title, plan, evaluation.estimate, own)
    yield Text(_STAYS)


def _answers(questions: Sequence[Question], time_limit_s: float | None) -> list[Answer]:
    found = []
    with progress() as report:
        for number, question in enumerate(questions, 1):
            report(f"search {number} of {len(questions)}: {question.what}")
            found.append(answer(question, time_limit_s))
    return found


def _check_made_by(asked: _Asked, path: Path, plan: Plan, believed: Prediction | None) -> None:
    """Raise BadInput where the search file cannot be the one that made the plan."""
    request, remedy = asked.request, "give the search file that made the plan"
    known = None if believed is None else believed.inputs_sha256.get("search")
    if known is not None and known != sha256_of_file(asked.file):
        raise BadInput(asked.file, f"is not the search file that made {path.name}, or was changed since", remedy)
    for field in ("name", "precision", "attention", "gradient_reduction"):
        if getattr(request, field) != getattr(plan, field):
            raise BadInput(asked.file, f"asks for another {field} than {path.name} has", remedy)
    if plan.global_batch_size not in batch_sizes(request):
        raise BadInput(asked.file, f"global_batch_size is not that of {path.name}", remedy)
