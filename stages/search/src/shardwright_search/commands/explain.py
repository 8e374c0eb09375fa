"""Tables of a plan: `shardwright explain` and `simulate`."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from msgspec import UNSET
from rich.console import Group, RenderableType

from shardwright.display.svg import document
from shardwright.display.timeline import draw_timeline, idle_s
from shardwright.io import BadInput, atomic_path, read_document, sha256_of_file
from shardwright.models.context import recompute_kinds
from shardwright.plan.schedules.passes import Pass
from shardwright.types import Estimate, Plan, Prediction, RunnerUp
from shardwright_search.commands.prediction import (
    Inputs,
    prediction_path,
    progress,
    read_inputs,
    read_prediction,
    runners_up_of,
)
from shardwright_search.cost_model.layer import CostModel
from shardwright_search.cost_model.plan import Evaluation, cost_model_of, evaluate
from shardwright_search.cost_model.time_model import TimeModel
from shardwright_search.explain.binding import Change, LayerAlternatives, binding_lines, faster_changes, fullest_stage
from shardwright_search.explain.printing import Lines, show_rich, table
from shardwright_search.explain.tables import (
    answers_shown,
    difference,
    explanation,
    levers,
    levers_table,
    node_types_table,
)
from shardwright_search.explain.what_if import WhatIf, WhatIfAnswer, answer, neighbours, outlook
from shardwright_search.options import ExplainOptions, SimulateOptions
from shardwright_search.search import SearchAnswer, split_words
from shardwright_search.simulation.simulator import chrome_trace
from shardwright_search.solver.stopping import was_interrupted
from shardwright_search.space.budget import allowed_bytes, budgets_of, with_spare
from shardwright_search.space.configurations import narrowed
from shardwright_search.space.request import SearchRequest, batch_sizes, left_out

_KINDS = ("forward", "backward", "weight", "gradient_sync", "optimizer")
_STAYS = (
    "Messages inside a layer, of tensor and sequence parallelism, are part of its profiled time and stay as they are."
)


class _SearchFile(NamedTuple):
    """A search file and its request."""

    file: Path
    request: SearchRequest


def explain(options: ExplainOptions) -> None:
    """Show the tables of a plan, and the tables that the options request."""
    plan = read_document(options.plan, Plan)
    other = None if options.other is None else read_document(options.other, Plan)
    inputs = read_inputs(options)
    prediction = read_prediction(options.plan, plan) if prediction_path(options.plan).exists() else None
    search = None
    if options.search is not None:
        request = with_spare(read_document(options.search, SearchRequest), plan.cluster, inputs.profiles)
        search = _SearchFile(options.search, request)
    if search is not None:
        _check_made_by(search, options.plan, plan, prediction)
    if other is not None and other.model != plan.model:
        raise BadInput(options.other, f"is not for the model of {options.plan.name}", "compare plans for one model")
    evaluation = evaluate(plan, inputs.profiles, _costs(plan, inputs, search))
    runners_up = () if prediction is None else prediction.runners_up
    if search is not None and not runners_up:
        runners_up = _runners_up(plan, inputs, search, options.time_limit)
    parts = [_why(plan, evaluation, inputs, search, prediction, runners_up)]
    if (types := node_types_table(plan, evaluation.estimate)) is not None:
        parts.append(types)
    if search is not None:
        parts += _further(plan, evaluation, inputs, search, options.time_limit)
    if other is not None:
        there = evaluate(other, inputs.profiles, _costs(other, inputs, search))
        parts.append(difference(plan, evaluation.estimate, other, there.estimate))
    show_rich(Group(*parts))


def _costs(plan: Plan, inputs: Inputs, search: _SearchFile | None) -> CostModel:
    time_model = TimeModel.INTERPOLATE if search is None else search.request.time_model
    return cost_model_of(plan, inputs.profiles, time_model)


def _runners_up(plan: Plan, inputs: Inputs, search: _SearchFile, time_limit_s: float | None) -> tuple[RunnerUp, ...]:
    """Return the runners-up that the search finds for this plan, the best first; none if it finds no plan."""
    question = WhatIf("the runners-up", search.request, plan.model, plan.cluster, inputs.profiles, search.file)
    ((_, result),) = _answers([question], time_limit_s)
    plans = (result.chosen, *result.runners_up) if isinstance(result, SearchAnswer) else ()
    return runners_up_of([each for each in plans if each.plan.sha256 != plan.sha256])


def _why(
    plan: Plan,
    evaluation: Evaluation,
    inputs: Inputs,
    search: _SearchFile | None,
    prediction: Prediction | None,
    runners_up: Sequence[RunnerUp],
) -> RenderableType:
    """Return the tables of the plan, its limiting resources, and the runners-up."""
    budgets_bytes, choices, unsearched = _predicted_budgets(plan, prediction), LayerAlternatives(), list[str]()
    if search is not None:
        request = narrowed(search.request, plan.cluster)
        budgets_bytes = allowed_bytes(plan, evaluation.estimate, budgets_of(request, plan.cluster, search.file))
        kinds = recompute_kinds(request.recompute, plan.model)
        choices = LayerAlternatives(request.data_parallel, kinds, not request.fine_grained)
        unsearched = [f"not searched: {line}" for line in left_out(request, plan.model, plan.cluster)]
    changes, costs, estimate = tuple[Change, ...](), _costs(plan, inputs, search), evaluation.estimate
    if budgets_bytes is not None:
        changes = faster_changes(plan, evaluation, costs, budgets_bytes, choices)
    lines = binding_lines(plan, estimate, budgets_bytes, changes)
    lines += unsearched
    if prediction is not None and prediction.proof is not None and prediction.proof.split_bound_s is not UNSET:
        lines.append(split_words(estimate.simulated_step_time_s, prediction.proof.split_bound_s))
    lines += [f"warning: {warning}" for warning in (*evaluation.warnings, *inputs.warnings)]
    fullest = fullest_stage(estimate, budgets_bytes)
    found = tuple(levers(plan, evaluation, costs, fullest, budgets_bytes))
    further = [levers_table(found, fullest, estimate.objective_s)] if found else []
    return explanation(plan, estimate, budgets_bytes, lines, further, runners_up)


def _predicted_budgets(plan: Plan, prediction: Prediction | None) -> tuple[int, ...] | None:
    """Return the prediction's budget of each stage; None for a mixed cluster, where it has one stage's budget only."""
    if prediction is None or prediction.memory_budget_bytes is None or len(set(plan.cluster.node_type_of_rank)) > 1:
        return None
    return (prediction.memory_budget_bytes,) * len(plan.stages)


def _further(
    plan: Plan, evaluation: Evaluation, inputs: Inputs, search: _SearchFile, time_limit_s: float | None
) -> Iterator[RenderableType]:
    """Yield the tables of neighbouring plans, and of the gain by more memory, links or nodes."""
    given = plan, search.request, inputs.profiles, search.file
    kinds = neighbours(*given)
    answers = _answers([*kinds, *outlook(*given)], time_limit_s)
    neighbouring = "the best plan of each neighbouring kind, against this plan"
    yield answers_shown(neighbouring, plan, evaluation.estimate, answers[: len(kinds)])
    yield answers_shown("what more would bring, against this plan", plan, evaluation.estimate, answers[len(kinds) :])
    yield Lines([_STAYS])


def _answers(questions: Sequence[WhatIf], time_limit_s: float | None) -> list[WhatIfAnswer]:
    """Return the answers; after Ctrl-C those to the first questions, the last one as far as it was known."""
    answers = []
    with progress() as report:
        for number, question in enumerate(questions, 1):
            report(f"search {number} of {len(questions)}: {question.difference}")
            began_s = monotonic()
            answers.append(answer(question, time_limit_s))
            if answers[-1].stopped and was_interrupted(began_s, time_limit_s):
                break
    return answers


def _check_made_by(search: _SearchFile, path: Path, plan: Plan, prediction: Prediction | None) -> None:
    """Raise BadInput if the search file cannot be the one that made the plan."""
    request, remedy = search.request, "give the search file that made the plan"
    made_with = None if prediction is None else prediction.inputs_sha256.get("search")
    if made_with is not None and made_with != sha256_of_file(search.file):
        raise BadInput(search.file, f"is not the search file that made {path.name}, or was changed since", remedy)
    for field in ("name", "precision", "attention", "gradient_reduction"):
        if getattr(request, field) != getattr(plan, field):
            raise BadInput(search.file, f"requests another {field} than {path.name} has", remedy)
    if (plan.loss_chunks or 1) != request.loss_chunks:
        raise BadInput(search.file, f"requests other loss_chunks than {path.name} has", remedy)
    if plan.optimizer not in request.optimizers:
        raise BadInput(search.file, f"requests another optimizer than {path.name} has", remedy)
    if plan.global_batch_size not in batch_sizes(request):
        raise BadInput(search.file, f"global_batch_size differs from {path.name}'s", remedy)


def simulate_plan(options: SimulateOptions) -> None:
    """Show the simulated step, and write its picture and its trace if requested."""
    plan, profiles = read_document(options.plan, Plan), read_inputs(options).profiles
    costs = cost_model_of(plan, profiles, options.time_model)
    estimate = evaluate(plan, profiles, costs).estimate
    files = {}
    if options.svg is not None:
        files[options.svg] = document(draw_timeline(plan, estimate))
    if options.trace is not None:
        files[options.trace] = json.dumps(chrome_trace(plan, estimate), ensure_ascii=False)
    with ExitStack() as stack:  # Each file is complete before the first gets its name.
        for path, content in files.items():
            stack.enter_context(atomic_path(path)).write_text(content, encoding="utf-8")
        show_rich(_report(plan, estimate))


def _report(plan: Plan, estimate: Estimate) -> RenderableType:
    """Return the step's times, and how each pipeline stage spends the time until the last event."""
    end_s = max(event.end_s for event in estimate.timeline)
    step_ms, bound_ms, closed_ms, end_ms = (
        f"{time_s * 1e3:.3f} ms"
        for time_s in (estimate.simulated_step_time_s, estimate.simulated_lower_bound_s, estimate.objective_s, end_s)
    )
    stages = f"{len(plan.stages)} pipeline stage(s)"
    line = f"plan {plan.name}: {plan.schedule}, {stages}, {plan.num_microbatches} microbatches"
    step = f"simulated step {step_ms}, lower bound {bound_ms}, closed form {closed_ms}"
    kinds = [kind for kind in _KINDS if plan.schedule.splits or kind != Pass.WEIGHT]
    headings = ("stage", *(kind.replace("_", " ") for kind in kinds), "idle (share)")
    rows = [_stage_row(estimate, stage, end_s, kinds) for stage in range(len(plan.stages))]
    title = f"ms until {end_ms}, when the last stage is done"
    types = node_types_table(plan, estimate)
    return Group(Lines([line, step]), table(title, headings, rows), *([] if types is None else [types]))


def _stage_row(estimate: Estimate, stage: int, end_s: float, kinds: Sequence[str]) -> list[str]:
    events = [event for event in estimate.timeline if event.stage == stage]
    sums_s = [sum(event.end_s - event.start_s for event in events if event.kind == kind) for kind in kinds]
    idle = idle_s(events, stage, end_s)
    return [f"{stage:>5}", *(f"{time_s * 1e3:.3f}" for time_s in sums_s), f"{idle * 1e3:.3f} ({idle / end_s:.1%})"]
