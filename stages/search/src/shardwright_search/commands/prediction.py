"""Helpers of several commands: reading profiles, and writing a plan with its prediction."""

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.display.plan_words import headline, stage_lines
from shardwright.io import BadInput, atomic_path, read_document, sha256_of_file, write_document
from shardwright.io.versions import PRODUCT, versions_text
from shardwright.models.context import recompute_kinds
from shardwright.types import MIB, Correction, Estimate, Plan, Prediction, Proof, RunnerUp
from shardwright_search.candidates import NEAR, Candidate
from shardwright_search.cost_model.expert_load import LoadFile, read_load
from shardwright_search.cost_model.plan import Evaluation
from shardwright_search.cost_model.profiles import Profiles, read_profiles
from shardwright_search.options import ProfileOptions
from shardwright_search.search import SearchAnswer, proof_words, split_words
from shardwright_search.space.budget import budgets_of, headroom, over_bytes
from shardwright_search.space.configurations import is_solved
from shardwright_search.space.request import Objective, SearchRequest, StageWidths, left_out
from shardwright_search.split_backward import NEAR_SPLIT


class Inputs(NamedTuple):
    """Profiles, the files they come from by role, and warnings that a prediction repeats."""

    profiles: Profiles
    files: dict[str, Path]
    warnings: tuple[str, ...]


def read_inputs(options: ProfileOptions) -> Inputs:
    """Read the profiles, with the load of experts and the correction applied, if given.

    Raises BadInput if the correction was learned from other profiles.
    """
    hardware, profile, correction = options.hardware, options.profile, options.correction
    profiles = read_profiles(hardware, profile)
    files = {
        role if number == 1 else f"{role} {number}": file
        for role, several in (("hardware", hardware), ("profile", profile))
        for number, file in enumerate(several, 1)
    }
    if options.imbalance is not None:
        load = read_load(options.imbalance)
        profiles = profiles.each(lambda one: one._replace(load=load))
        files |= {"imbalance": load.path} if isinstance(load, LoadFile) else {}
    if correction is None:
        return Inputs(profiles, files, ())
    from shardwright_search.cost_model.calibration import check_learned_from, corrected

    if profiles.others:
        raise BadInput(correction, "is given for a mixed cluster", "leave it out: a correction is of one device")
    learned = read_document(correction, Correction)
    check_learned_from(learned, correction, hardware[0], profile)
    factors = ", ".join(f"{term} x {learned.factors[term].factor:.3f}" for term in sorted(learned.factors))
    warnings = (f"{correction.name}: {warning}" for warning in learned.warnings)
    return Inputs(
        corrected(profiles, learned),
        files | {"correction": correction},
        (f"corrected by {correction.name}: {factors}", *warnings),
    )


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that reports a line: one live line on a terminal, plain lines on standard error otherwise.

    Meanwhile SIGTERM, with which schedulers end a job, acts as Ctrl-C: a search then ends with the best plan so far.
    """
    with ExitStack() as ends:
        ends.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        if sys.stderr.isatty():
            from rich.console import Console

            yield ends.enter_context(Console(stderr=True).status("reading")).update
        else:
            yield lambda line: print(line, file=sys.stderr, flush=True)


def prediction_path(plan_path: Path) -> Path:
    """Return the path of the prediction of a plan file."""
    return plan_path.with_suffix(".prediction.json")


@contextmanager
def written(path: Path, plan: Plan, prediction: Prediction) -> Iterator[None]:
    """Write a plan and its prediction, both or neither: they get their names when the block has ended without error."""
    with atomic_path(prediction_path(path)) as new_prediction, atomic_path(path) as new_plan:
        write_document(new_prediction, prediction)
        write_document(new_plan, plan)
        yield


def read_prediction(plan_path: Path, plan: Plan) -> Prediction:
    """Return the prediction stored with a plan; raise BadInput if there is none, or if it is another plan's."""
    path = prediction_path(plan_path)
    prediction = read_document(path, Prediction)
    if prediction.plan_sha256 != plan.sha256:
        problem = f"is the prediction of another plan than {plan_path.name}"
        raise BadInput(path, problem, "remove it or search again")
    return prediction


def prediction_of_evaluated(
    plan: Plan, evaluation: Evaluation, files: Mapping[str, Path], warnings: tuple[str, ...] = ()
) -> Prediction:
    """Return the prediction of a given plan, without a proof."""
    return Prediction(
        plan_sha256=plan.sha256,
        memory_budget_bytes=None,
        estimate=evaluation.estimate,
        proof=None,
        runners_up=(),
        warnings=(*warnings, *evaluation.warnings),
        inputs_sha256={role: sha256_of_file(path) for role, path in files.items()},
        reference_s=evaluation.reference_s,
        versions=versions_text([PRODUCT], on_gpu=False),
    )


def prediction_of_searched(
    answer: SearchAnswer,
    request: SearchRequest,
    budgets_bytes: Sequence[int],
    files: Mapping[str, Path],
    warnings: tuple[str, ...] = (),
    runners_up: Sequence[Candidate] = (),
) -> Prediction:
    """Return the prediction of a searched plan, with its proof and the requested runners-up.

    `budgets_bytes`: the budget of a rank of each pipeline stage.
    """
    plan, evaluation = answer.chosen
    unsearched = [f"not searched: {line}" for line in left_out(request, plan.model, plan.cluster)]
    further = *_unlisted(answer), *_communicators(answer, request)
    fullest = max(range(len(plan.stages)), key=lambda stage: evaluation.estimate.stages[stage].memory_bytes)
    return replace(
        prediction_of_evaluated(plan, evaluation, files, (*warnings, *unsearched, *further)),
        memory_budget_bytes=budgets_bytes[fullest],
        proof=Proof(
            objective="closed form" if request.objective is Objective.STEP_TIME else "closed form / batch size",
            objective_s=answer.optimum_s,
            objective_bound_s=answer.bound_s,
            gap=answer.optimum_s / answer.bound_s - 1 if answer.bound_s else float(2**53),
            scope=_scope(request, answer),
            examined=answer.examined,
            solved=answer.solved,
            split_bound_s=UNSET if answer.split is None else answer.split_bound_s,
        ),
        runners_up=runners_up_of(runners_up),
    )


def runners_up_of(candidates: Sequence[Candidate]) -> tuple[RunnerUp, ...]:
    """Return the runners-up of a search in the form of a prediction."""
    return tuple(RunnerUp(plan=plan, estimate=evaluation.estimate) for plan, evaluation in candidates)


def _unlisted(answer: SearchAnswer) -> Iterator[str]:
    """Yield a warning if a part of the space was not searched."""
    if answer.unlisted is not None:
        remedy = "only equal widths of these were searched: limit pp_sizes, or list stage_widths"
        yield f"{answer.unlisted.text}, which leaves the gap; {remedy}"


def _communicators(answer: SearchAnswer, request: SearchRequest) -> Iterator[str]:
    """Yield a warning for each stage that exceeds its budget with its communicators, as on sub-clusters of a front."""
    budgets = budgets_of(request, answer.chosen.plan.cluster, Path(request.name))
    for number, over in enumerate(over_bytes(answer.chosen.plan, answer.chosen.evaluation.estimate, budgets)):
        if over > 0:
            yield f"stage {number} exceeds the budget by {over} bytes with its communicators: raise reserve_gib"


def _widths(request: SearchRequest) -> str:
    """Return, in words, the widths that pipeline stages may have."""
    match request.stage_widths:
        case StageWidths.EQUAL:
            return "of equal width"
        case StageWidths.ANY:
            places = "each in one node or of whole nodes"
            return f"of any widths ({places}; equal if interleaved, or if all layers share a strategy)"
        case listed:
            return f"of {', '.join(' + '.join(map(str, each)) for each in listed)} ranks"


def _spanning(request: SearchRequest) -> str:
    """Return, in words, the stages over several node types that the space contains."""
    alike = "listed" if isinstance(request.stage_widths, tuple) else "equal"
    return f"whole nodes of each or, of {alike} width, all that is left of them but for one type's"


def _scope(request: SearchRequest, answer: SearchAnswer) -> str:
    """Return, in words, the space that the proof covers."""
    request = replace(request, recompute=recompute_kinds(request.recompute, answer.chosen.plan.model))

    def names(field: str) -> str:
        default = "every profiled divisor" if field == "tp_sizes" else "every divisor"
        listed = getattr(request, field) or (default,)
        listed = tuple(filter(is_solved, listed)) if field == "schedules" else listed
        return ", ".join(str(value) for value in listed)

    fields = ("pp_sizes", "tp_sizes", "num_microbatches", "schedules", "tp_consecutive")
    kinds = ("data_parallel", "sequence_parallel", "recompute", "disable")
    listed = "; ".join(f"{field} {names(field)}" for field in (*fields, *kinds) if getattr(request, field) != ())
    if request.cp_sizes != (1,):
        listed += f"; cp_sizes {names('cp_sizes')}, context {names('context')}"
    if request.ep_sizes:
        listed += f"; ep_sizes {names('ep_sizes')}, etp_sizes {names('etp_sizes')}"
    if request.shard_sizes is not None:
        listed += f"; shard_sizes {names('shard_sizes')} or all ranks"
    layers = "any strategy for each layer" if request.fine_grained else "one strategy for all layers"
    interleaved = types = ""
    if any(schedule.interleaves for schedule in request.schedules):
        interleaved = (
            f"; interleaved schedules with {', '.join(map(str, request.chunks_per_stage))} chunks a stage, as small as "
            "can be and equal, except that the first one lacks layers at its start and the last one at its end where "
            "they cannot be, and the same strategies at each position of a chunk"
        )
    if len(set(answer.chosen.plan.cluster.node_type_of_rank)) > 1:
        each = "one type" if not request.span_node_types else f"one type or of several ({_spanning(request)})"
        types = (
            f"node types in any order along the pipeline, each stage on ranks of {each}, and the stages of a type on "
            "its ranks in their order, "
        )
    return (
        f"space {request.space}: no plan of it that fits, with its communicators, has a smaller closed form than "
        f"objective_bound_s: any cut of the layers into pipeline stages {_widths(request)} with a layer or more each "
        f"(embedding and head are layers), {layers}, the embedding and the head, {types}"
        f"{listed}{interleaved}; {_chosen_by(answer)}"
    )


def _chosen_by(answer: SearchAnswer) -> str:
    """Return, in words, how the plan was chosen among those near the optimum."""
    if answer.split is not None and not is_solved(answer.chosen.plan.schedule):
        return (
            f"of {answer.split} plans found within {NEAR_SPLIT:.0%} of the optimum the one with the least simulated "
            f"time under {answer.chosen.plan.schedule} was taken; {_of_split(answer)}"
        )
    if answer.tolerance:
        return f"the simplest plan that was found within {answer.tolerance:.2%} of the bound was taken"
    if not answer.simulated:
        return "plans were compared by their closed form alone"
    return (
        f"of {answer.near} plans found within {NEAR:.0%} of the optimum {answer.simulated} were "
        "simulated, and the one with the least simulated time was taken, or a changed one with still less"
        f"{'' if answer.split is None else f'; {_of_split(answer)}'}"
    )


def _of_split(answer: SearchAnswer) -> str:
    """Return, in words, what is proven of plans with split backward passes."""
    return split_words(answer.chosen.evaluation.estimate.simulated_step_time_s, answer.split_bound_s)


def plan_summary(plan: Plan, prediction: Prediction) -> list[str]:
    """Return the plan, its predicted time and memory, and the proof in a few lines."""
    estimate, proof = prediction.estimate, prediction.proof
    lines = [
        headline(plan),
        *stage_lines(plan),
        f"predicted {estimate.simulated_step_time_s * 1e3:.3f} ms a step, {estimate.samples_per_s:.6g} samples/s",
        f"simulated gap {_gap(estimate):.2%}: no order of its passes takes less than "
        f"{estimate.simulated_lower_bound_s * 1e3:.3f} ms",
        _memory_line(plan, estimate, prediction.memory_budget_bytes),
    ]
    if proof is not None:
        bound_s = proof.objective_bound_s
        least = f"no plan takes less than {bound_s * 1e3:.3f} ms" if bound_s else "no bound is known"
        rest = "some others are open" if proof.gap else "the bounds ruled out the others"
        words = proof_words(proof.objective_s, bound_s)
        if not is_solved(plan.schedule):
            words = f"found by simulation: {plan.schedule} was tried behind the best of the other schedules"
        if proof.split_bound_s is not UNSET:
            words += f"; {split_words(estimate.simulated_step_time_s, proof.split_bound_s)}"
        of_what = "" if is_solved(plan.schedule) else " of these"
        lines += [
            words,
            f"proof{of_what}: {proof.objective} {proof.objective_s * 1e3:.3f} ms, {least}; "
            f"{proof.solved} of {proof.examined} cases were solved, {rest}",
        ]
    return [*lines, *(f"warning: {warning}" for warning in prediction.warnings)]


def _gap(estimate: Estimate) -> float:
    """Return how far the simulated step is above the lower bound for any order of its passes, as a share."""
    bound_s = estimate.simulated_lower_bound_s
    return estimate.simulated_step_time_s / bound_s - 1 if bound_s else 0.0


def _memory_line(plan: Plan, estimate: Estimate, budget_bytes: int | None) -> str:
    line = f"memory of the fullest rank {estimate.memory_bytes / MIB:.1f} MiB"
    free_bytes, share = headroom(plan, estimate)
    words = f"headroom {free_bytes / MIB:.1f} MiB, {share:.0%} of its device"
    if budget_bytes is None:
        return f"{line}, {words}"
    return f"{line} of {budget_bytes / MIB:.1f} MiB ({estimate.memory_bytes / budget_bytes:.1%}), {words}"
