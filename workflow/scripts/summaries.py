"""Searches and runs in brief: the cards at the top of the report, its numbers, the summary, the table of searches."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import inf
from statistics import median
from typing import Any, TypeVar

import msgspec

from results import Comparison, ProfileOutcome, RunOutcome, SearchOutcome, or_dash, plan_text, ratio_text, speed_text
from shardwright.display.plan_words import NodeTypeUse, binding, layers_summary, node_type_uses, shape_words
from shardwright.display.units import bytes_text, seconds_text, usd_text
from shardwright.types import Plan, Schedule
from shardwright_search.explain.binding import step_parts

Number = TypeVar("Number", int, float)

_KINDS = ("analytic", "assumed", "absent")
_COLUMNS = (
    "search", "model", "cluster", "ranks", "global_batch_size", "memory_budget_bytes", "pp_size", "num_microbatches",
    "schedule", "layers", "predicted_step_time_s", "samples_per_s", "usd_per_step", "predicted_memory_bytes", "gap",
    "plan_sha256",
)  # fmt: skip


def answer(search: SearchOutcome) -> str:
    """Return a card with the answer of a search in a few lines."""
    lines = "".join(f"<dt>{name}</dt><dd>{escape(words)}</dd>" for name, words in _lines(search, search.chosen))
    return f'<div class="answer"><b>{escape(search.name)}</b><dl>{lines}</dl></div>'


def first_sentences(searches: Sequence[SearchOutcome], runs: Sequence[RunOutcome]) -> list[str]:
    """Return a sentence for each search and each run, in words that need no knowledge of plans."""
    sentences = [*map(_in_short, searches), *(_trained(run, searches) for run in runs)]
    return sentences or ["Nothing was searched, and nothing was trained."]


def _trained(run: RunOutcome, searches: Sequence[SearchOutcome]) -> str:
    """Return a sentence on a run: the model, the duration, the change of the loss, and the step time."""
    result, plans = run.result, (each.plan for search in searches for each in search.comparisons)
    model = next((plan.model.name for plan in plans if plan.sha256 == result.plan_sha256), "a model")
    step = f"a step took {seconds_text(median(step.step_time_s for step in run.steps))}"
    if result.predicted_step_time_s is not None:
        step += f" ({seconds_text(result.predicted_step_time_s)} predicted)"
    return (
        f"The run {run.name} trained {model} for {result.steps} steps, and its loss went from "
        f"{result.first_loss:.2f} to {result.final_loss:.2f}; {step}."
    )


def _in_short(search: SearchOutcome) -> str:
    chosen, budget = search.chosen, search.prediction.memory_budget_bytes
    plan, allowed = chosen.plan, "" if budget is None else f" of the {bytes_text(budget)} that it may use"
    return (
        f"{search.name}: the best known way to train {plan.model.name} on the {plan.world_size} devices of "
        f"{plan.cluster.name} takes {_both(seconds_text, chosen.measured_time_s, _step_s(chosen))} for each step of "
        f"{plan.global_batch_size} samples; the fullest device needs "
        f"{_both(bytes_text, chosen.measured_bytes, chosen.estimate.memory_bytes)}{allowed}."
    )


def _step_s(chosen: Comparison) -> float:
    return chosen.estimate.simulated_step_time_s


def _both(text: Callable[[Number], str], measured: Number | None, predicted: Number) -> str:
    """Return the measured value, if any, together with the predicted one."""
    if measured is None:
        return f"{text(predicted)} (predicted, not yet measured)"
    return f"{text(measured)} ({text(predicted)} predicted)"


def provenance(search: SearchOutcome) -> dict[str, str]:
    """Return the first warning about each kind of numbers that were not measured, by kind."""
    warnings: dict[str, str] = {}
    for warning in search.prediction.warnings:
        for kind in _KINDS:
            if warning.startswith(f"{kind}: "):
                warnings.setdefault(kind, warning.removeprefix(kind))
    return warnings


def fits_by(search: SearchOutcome, chosen: Comparison) -> int | None:
    """Return the unused bytes of the budget on the fullest device of a search's plan: measured, or else predicted.

    The result is negative if the plan does not fit; None if no budget was set.
    """
    budget = search.prediction.memory_budget_bytes
    return None if budget is None else budget - _held_bytes(chosen)


def _held_bytes(chosen: Comparison) -> int:
    return chosen.estimate.memory_bytes if chosen.measured_bytes is None else chosen.measured_bytes


def _lines(search: SearchOutcome, chosen: Comparison) -> Iterator[tuple[str, str]]:
    model, cluster = chosen.plan.model, chosen.plan.cluster
    yield "Plan", f"{model.name} on {cluster.name}, {chosen.plan.world_size} ranks: {plan_text(chosen.plan)}"
    yield "Time", _time(chosen)
    yield "Memory", _memory(search, chosen)
    yield "Price", _price(chosen)
    if uses := node_type_uses(chosen.plan, chosen.estimate):
        yield "Node types", "; ".join(_node_type(use, use is binding(uses)) for use in uses)
    yield "How sure", "; ".join(_sure(search, chosen))
    yield "Why", "; ".join(_why(search, chosen))


def _time(chosen: Comparison) -> str:
    predicted_s, measured_s = chosen.estimate.simulated_step_time_s, chosen.measured_time_s
    if measured_s is None:
        return f"{seconds_text(predicted_s)} a step, predicted: {chosen.estimate.samples_per_s:.3g} samples/s"
    samples_per_s = chosen.plan.global_batch_size / measured_s
    both = f"{seconds_text(measured_s)} a step, measured, {seconds_text(predicted_s)} predicted"
    return f"{both}: {samples_per_s:.3g} samples/s"


def _memory(search: SearchOutcome, chosen: Comparison) -> str:
    words = f"{bytes_text(_held_bytes(chosen))} on the fullest device, "
    predicted = chosen.estimate.memory_bytes
    words += "predicted" if chosen.measured_bytes is None else f"measured, {bytes_text(predicted)} predicted"
    left, budget = fits_by(search, chosen), search.prediction.memory_budget_bytes
    if left is None or budget is None:
        return f"{words}; no budget was set"
    if left < 0:
        return f"{words}: does not fit {bytes_text(budget)}, by {bytes_text(-left)}"
    return f"{words}: fits {bytes_text(budget)}, {bytes_text(left)} to spare"


def _price(chosen: Comparison) -> str:
    usd = chosen.estimate.usd_per_step
    return "none is known of these nodes" if usd is None else f"{usd_text(1000 * usd)} for a thousand steps, predicted"


def _node_type(use: NodeTypeUse, binds: bool) -> str:
    idle = f"{use.ranks} ranks in {use.stages} stage{'s' if use.stages > 1 else ''}, idle {use.idle_share:.1%}"
    cost = "" if use.idle_usd is None else f", which costs {usd_text(1000 * use.idle_usd)} in a thousand steps"
    return f"{use.name}{' (binds)' if binds else ''}: {idle}{cost}"


def _sure(search: SearchOutcome, chosen: Comparison) -> Iterator[str]:
    if (proof := search.prediction.proof) is None:
        yield "not searched, so that nothing is proven"
    else:
        yield f"{proof.nearness} in the space that was searched, by the cost model"
    if chosen.measured_time_s is None:
        yield "it was not run"
    else:
        ratio = ratio_text(chosen.estimate.simulated_step_time_s, chosen.measured_time_s)
        yield f"it was run, and took {ratio} × as long as predicted"
    yield from _faster(search, chosen)
    if kinds := provenance(search):
        yield f"not all was measured that it is predicted from: {', '.join(kinds)}"
    if warnings := len(search.prediction.warnings):
        yield f"{warnings} warning{'s' if warnings > 1 else ''} below"


def _faster(search: SearchOutcome, chosen: Comparison) -> Iterator[str]:
    """Yield a sentence if another plan of the search, which fits, was measured to be faster than the chosen plan."""
    own_s = chosen.measured_sample_s
    fitting = (each for each in search.comparisons if (fits_by(search, each) or 0) >= 0)
    timed = [(time_s, each) for each in fitting if (time_s := each.measured_sample_s) is not None]
    time_s, fastest = min(timed, key=lambda pair: pair[0], default=(inf, chosen))
    if own_s is not None and time_s < own_s:
        words = f"{fastest.role} ({shape_words(fastest.plan)}) was measured to be faster"
        yield f"{words}: {1 - time_s / own_s:.1%} less time for a sample"


def _why(search: SearchOutcome, chosen: Comparison) -> Iterator[str]:
    """Yield the shares of a step, the fullest stage, and the time of the best plan of another configuration."""
    yield ", ".join(_shares(chosen))
    held = [stage.memory_bytes for stage in chosen.estimate.stages]
    if len(held) > 1:
        left = bytes_text(max(held) - min(held))
        yield f"stage {held.index(max(held))} is the fullest, stage {held.index(min(held))} needs {left} less"
    if others := [other for other in search.comparisons if _shape(other.plan) != _shape(chosen.plan)]:
        best = min(others, key=_sample_s)
        more = _sample_s(best) / _sample_s(chosen) - 1
        words = f"{abs(more):.1%} {'less' if more < 0 else 'more'} time for a sample, predicted"
        yield f"the best plan of another configuration ({shape_words(best.plan)}) takes {words}"


def _shares(chosen: Comparison) -> Iterator[str]:
    """Yield the shares of a step's time according to the closed form."""
    parts, step_s = step_parts(chosen.plan, chosen.estimate), chosen.estimate.objective_s or 1.0
    slowest = f" of stage {parts.slowest}, the slowest" if len(chosen.plan.stages) > 1 else ""
    yield f"{parts.bottleneck_s / step_s:.1%} of a step are forward and backward passes{slowest}"
    rest = {
        "filling and draining the pipeline": parts.fill_s,
        "reducing gradients and the optimizer": parts.end_s,
        "what every step needs": parts.always_s,
    }
    yield from (f"{time_s / step_s:.1%} {purpose}" for purpose, time_s in rest.items() if time_s > 0)


def _shape(plan: Plan) -> tuple[int, int, Schedule]:
    return len(plan.stages), plan.num_microbatches, plan.schedule


def _sample_s(chosen: Comparison) -> float:
    return chosen.estimate.simulated_step_time_s / chosen.plan.global_batch_size


def numbers(
    searches: Sequence[SearchOutcome], runs: Sequence[RunOutcome], profiles: Sequence[ProfileOutcome] = ()
) -> bytes:
    """Return JSON by name: predictions and measurements of searches, runs and profiles; in seconds and bytes."""
    content = {
        "searches": {search.name: _search_numbers(search) for search in searches},
        "runs": {run.name: {"result": run.result, "steps": run.steps} for run in runs},
        "profiles": {each.name: {"origin": each.profile.origin, "fits": each.profile.fits.rows} for each in profiles},
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def _search_numbers(search: SearchOutcome) -> dict[str, Any]:
    prediction = search.prediction
    return {
        "plan_sha256": prediction.plan_sha256,
        "memory_budget_bytes": prediction.memory_budget_bytes,
        "proof": prediction.proof,
        "warnings": prediction.warnings,
        "not_measured": list(provenance(search)),
        "plans": {each.role: _plan_numbers(search, each) for each in search.comparisons},
        "correction": None if search.correction is None else search.correction.factors,
    }


def _plan_numbers(search: SearchOutcome, compared: Comparison) -> dict[str, Any]:
    return {
        "plan_sha256": compared.plan.sha256,
        "global_batch_size": compared.plan.global_batch_size,
        "num_microbatches": compared.plan.num_microbatches,
        "pp_size": len(compared.plan.stages),
        "layers": layers_summary(compared.plan),
        "predicted": compared.estimate,
        "predicted_memory_bytes": compared.estimate.memory_bytes,
        "measured": compared.measured,
        "measured_step_time_s": compared.measured_time_s,
        "measured_memory_bytes": compared.measured_bytes,
        "slowdown": compared.slowdown,
        "fits_by_bytes": fits_by(search, compared),
        "node_types": [use._asdict() for use in node_type_uses(compared.plan, compared.estimate)],
    }


def summary(searches: Sequence[SearchOutcome], runs: Sequence[RunOutcome]) -> str:
    """Return the lines of a summary: plans with predicted and measured step times, and losses."""
    lines: list[str] = []
    for search in searches:
        budget = search.prediction.memory_budget_bytes
        within = f" within {bytes_text(budget)} a device" if budget else ""
        lines += ["", f"plan {search.name}{within}: {plan_text(search.plan)}"]
        width = max(12, *(len(comparison.role) for comparison in search.comparisons))
        times = f"{'predicted':>10} {'measured':>10} {'ratio':>6} {'at equal speed':>14}"
        lines += [f"  {'':<{width}} {times}   {'memory':>10} {'measured':>10}"]
        lines += [_comparison(comparison, width) for comparison in search.comparisons]
        if changed := speed_text(search.comparisons):
            lines.append(f"  {changed}")
    for run in runs:
        result = run.result
        change = result.final_loss / result.first_loss - 1
        losses = f"{result.first_loss:.3f} -> {result.final_loss:.3f} ({change:+.0%})"
        lines += ["", f"run {run.name}: {result.steps} steps, loss {losses}"]
    return "\n".join(lines)


def _comparison(comparison: Comparison, width: int) -> str:
    estimate = comparison.estimate
    time_s, measured_s = estimate.simulated_step_time_s, comparison.measured_time_s
    measured, size = or_dash(seconds_text, measured_s), or_dash(bytes_text, comparison.measured_bytes)
    return (
        f"  {comparison.role:<{width}} {seconds_text(time_s):>10} {measured:>10} {ratio_text(time_s, measured_s):>6}"
        f" {ratio_text(time_s * comparison.slowdown, measured_s):>14}"
        f"   {bytes_text(estimate.memory_bytes):>10} {size:>10}"
    )


def search_table(searches: Sequence[SearchOutcome]) -> str:
    """Return a table of searches as CSV, with a header."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows(_row(search) for search in searches)
    return out.getvalue()


def _row(search: SearchOutcome) -> tuple[object, ...]:
    plan, prediction = search.plan, search.prediction
    estimate = prediction.estimate
    return (
        search.name, plan.model.name, plan.cluster.name, plan.world_size, plan.global_batch_size,
        prediction.memory_budget_bytes, len(plan.stages), plan.num_microbatches, str(plan.schedule),
        layers_summary(plan), estimate.simulated_step_time_s, estimate.samples_per_s, estimate.usd_per_step,
        estimate.memory_bytes, None if prediction.proof is None else prediction.proof.gap, plan.sha256,
    )  # fmt: skip
