"""The prediction that stands beside a searched or evaluated plan."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from shardwright_formats.display.plan_words import headline, stage_lines
from shardwright_formats.io import BadInput, atomic_path, read_document, sha256_of_file, write_document
from shardwright_formats.types import MIB, Estimate, Plan, Prediction, Proof, RunnerUp
from shardwright_search.alternatives import NEAR
from shardwright_search.cost_model.plan import Evaluation
from shardwright_search.search import Found
from shardwright_search.space.request import Objective, SearchRequest, StageWidths


def prediction_path(plan_path: Path) -> Path:
    """Where the prediction of a plan file lies."""
    return plan_path.with_suffix(".prediction.json")


@contextmanager
def written(path: Path, plan: Plan, prediction: Prediction) -> Iterator[None]:
    """Write a plan and its prediction beside it, or neither: both get their names when the block has ended well."""
    with atomic_path(prediction_path(path)) as new_prediction, atomic_path(path) as new_plan:
        write_document(new_prediction, prediction)
        write_document(new_plan, plan)
        yield


def read_prediction(plan_path: Path, plan: Plan) -> Prediction:
    """The prediction beside a plan; BadInput where there is none, or another plan's."""
    beside = prediction_path(plan_path)
    prediction = read_document(beside, Prediction)
    if prediction.plan_sha256 != plan.sha256:
        what = f"is the prediction of another plan than {plan_path.name}"
        raise BadInput(beside, what, "remove it or search again")
    return prediction


def prediction_of_evaluated(
    plan: Plan, evaluation: Evaluation, files: Mapping[str, Path], warnings: tuple[str, ...] = ()
) -> Prediction:
    """What is believed about a plan that was given."""
    return Prediction(
        plan_sha256=plan.sha256,
        memory_budget_bytes=None,
        estimate=evaluation.estimate,
        proof=None,
        runners_up=(),
        warnings=(*warnings, *evaluation.warnings),
        inputs_sha256={role: sha256_of_file(path) for role, path in files.items()},
        reference_s=evaluation.reference_s,
    )


def prediction_of_searched(
    found: Found,
    request: SearchRequest,
    budgets_bytes: Sequence[int],
    files: Mapping[str, Path],
    warnings: tuple[str, ...] = (),
    certificate: str | None = None,
) -> Prediction:
    """What is believed about a plan that was searched, with the proof and the plans it was preferred to.

    `budgets_bytes`: by pipeline stage, what one of its ranks was allowed.
    """
    plan, evaluation = found.chosen
    fullest = max(range(len(plan.stages)), key=lambda stage: evaluation.estimate.stages[stage].memory_bytes)
    return replace(
        prediction_of_evaluated(
            plan, evaluation, files, (*warnings, *_unlisted(found), *_communicators(found, request, budgets_bytes))
        ),
        memory_budget_bytes=budgets_bytes[fullest],
        proof=Proof(
            objective="closed form" if request.objective is Objective.STEP_TIME else "closed form / batch size",
            objective_s=found.optimum_s,
            objective_bound_s=found.bound_s,
            gap=found.optimum_s / found.bound_s - 1 if found.bound_s else float(2**53),
            scope=_scope(request, found),
            examined=found.examined,
            solved=found.solved,
            certificate=certificate,
        ),
        runners_up=tuple(RunnerUp(plan=c.plan, estimate=c.evaluation.estimate) for c in found.runners_up),
        robust=found.regrets,
    )


def _unlisted(found: Found) -> tuple[str, ...]:
    """What of the space was not searched."""
    if found.unlisted is None:
        return ()
    remedy = "of these equal widths alone were searched: limit pp_sizes, or list stage_widths"
    return (f"{found.unlisted.text}, which leaves the gap; {remedy}",)


def _communicators(found: Found, request: SearchRequest, budgets_bytes: Sequence[int]) -> Iterator[str]:
    """What the room for communicators, of which plans may make more, has left out or not held."""
    if found.reserve_gib > request.reserve_gib:
        more = found.reserve_gib - request.reserve_gib
        yield (
            f"{more:.3g} GiB more than reserve_gib were left free, which communicators of plans that may be faster "
            "needed; others that would fit without are left out"
        )
    stages = found.chosen.evaluation.estimate.stages
    for number, (stage, most) in enumerate(zip(stages, budgets_bytes, strict=True)):
        if stage.memory_bytes > most and "communicators" in stage.memory_terms_bytes:
            yield f"stage {number} lacks {stage.memory_bytes - most} bytes for its communicators: raise reserve_gib"


def _widths(request: SearchRequest) -> str:
    """How wide pipeline stages may be."""
    match request.stage_widths:
        case StageWidths.EQUAL:
            return "of equal width"
        case StageWidths.ANY:
            places = "each in one node or of whole nodes"
            return f"of any widths ({places}; equal if interleaved, or if all layers share a strategy)"
        case listed:
            return f"of {', '.join(' + '.join(map(str, each)) for each in listed)} ranks"


def _spanning(request: SearchRequest) -> str:
    """Which stages over several node types there are."""
    alike = "listed" if isinstance(request.stage_widths, tuple) else "equal"
    return f"whole nodes of each or, of {alike} width, all that is left of them but for one type's"


def _scope(request: SearchRequest, found: Found) -> str:
    def names(field: str) -> str:
        every = "every profiled divisor" if field == "tp_sizes" else "every divisor"
        return ", ".join(str(value) for value in getattr(request, field) or (every,))

    fields = ("pp_sizes", "tp_sizes", "num_microbatches", "schedules", "tp_consecutive")
    kinds = ("data_parallel", "sequence_parallel", "recompute", "disable")
    listed = "; ".join(f"{field} {names(field)}" for field in (*fields, *kinds) if getattr(request, field) != ())
    if request.shard_sizes is not None:
        listed += f"; shard_sizes {names('shard_sizes')} or all ranks"
    layers = "any strategy for each layer" if request.fine_grained else "one strategy for all layers"
    interleaved = (
        ""
        if not any(schedule.interleaves for schedule in request.schedules)
        else (
            f"; interleaved schedules with {', '.join(map(str, request.chunks_per_stage))} equal chunks a stage and "
            "the same strategies at each position of a chunk"
        )
    )
    types = ""
    if len(set(found.chosen.plan.cluster.node_type_of_rank)) > 1:
        each = "one type" if not request.span_node_types else f"one type or of several ({_spanning(request)})"
        types = (
            f"node types in any order along the pipeline, each stage on ranks of {each}, and the stages of a type on "
            "its ranks in their order, "
        )
    changes = ", or a changed one with still less" if request.robust is None else ""
    aim = "the optimum" if request.robust is None else "the least largest regret over all scenarios"
    return (
        f"space {request.space}: no plan of it has a smaller closed form than objective_bound_s: any cut of the layers "
        f"into pipeline stages {_widths(request)} with a layer or more each (embedding and head are layers), {layers}, "
        f"the embedding and the head, {types}"
        f"{listed}{interleaved}; {_chosen_by(found, aim, changes)}"
    )


def _chosen_by(found: Found, aim: str, changes: str) -> str:
    """How the plan was chosen among those near the optimum."""
    if not found.simulated:
        return "plans were compared by their closed form alone"
    return (
        f"of {found.near} plans found within {NEAR:.0%} of {aim} {found.simulated} were "
        f"simulated, and the one with the least simulated time was taken{changes}"
    )


def plan_summary(plan: Plan, prediction: Prediction) -> str:
    """Return the plan, its predicted time and memory, and the proof in a few lines."""
    estimate, proof = prediction.estimate, prediction.proof
    lines = [
        headline(plan),
        *stage_lines(plan),
        f"predicted {estimate.simulated_step_time_s * 1e3:.3f} ms a step, {estimate.samples_per_s:.6g} samples/s",
        f"simulated gap {_gap(estimate):.2%}: no order of its passes takes less than "
        f"{estimate.simulated_lower_bound_s * 1e3:.3f} ms",
        _memory_line(estimate, prediction.memory_budget_bytes),
    ]
    if proof is not None:
        below = f"no plan of the space is below {proof.objective_bound_s * 1e3:.3f} ms (gap {proof.gap:.2%})"
        rest = "some others are open" if proof.gap else "the bounds ruled out the others"
        lines.append(
            f"proof: {proof.objective} {proof.objective_s * 1e3:.3f} ms, "
            f"{below if proof.objective_bound_s else 'no bound is known'}; "
            f"{proof.solved} of {proof.examined} cases were solved, {rest}"
        )
        lines += [] if proof.certificate is None else [f"certificate: {proof.certificate}"]
    if prediction.robust:
        own = max(prediction.robust, key=lambda one: one.regret)
        nominal = max(prediction.robust, key=lambda one: one.nominal_regret)
        lines.append(
            f"robust: over {len(prediction.robust)} scenarios never more than {own.regret:.2%} above the best plan "
            f"({own.scenario}); the plan for the profile as it is: {nominal.nominal_regret:.2%} ({nominal.scenario})"
        )
    return "\n".join([*lines, *(f"warning: {warning}" for warning in prediction.warnings)])


def _gap(estimate: Estimate) -> float:
    """Return the share by which the simulated step is above the lower bound of any order of the plan's passes."""
    bound_s = estimate.simulated_lower_bound_s
    return estimate.simulated_step_time_s / bound_s - 1 if bound_s else 0.0


def _memory_line(estimate: Estimate, budget_bytes: int | None) -> str:
    line = f"memory of the fullest rank {estimate.memory_bytes / MIB:.1f} MiB"
    if budget_bytes is None:
        return line
    return f"{line} of {budget_bytes / MIB:.1f} MiB ({estimate.memory_bytes / budget_bytes:.1%})"
