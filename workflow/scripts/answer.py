"""The answers that open the report: each search's plan, step time, memory and price, how sure that is, and why."""

from collections.abc import Iterator
from html import escape

from results import Comparison, SearchOutcome, plan_text, ratio_text
from shardwright_formats.display.node_types import NodeTypeUse, binding, node_type_uses
from shardwright_formats.display.plan_words import shape_words
from shardwright_formats.display.units import bytes_text, seconds_text, usd_text
from shardwright_formats.types import Plan, Schedule
from shardwright_search.explain.binding import step_parts

_KINDS = ("analytic", "assumed", "absent")


def answer(search: SearchOutcome) -> str:
    """Return a card with a search's answer in a few lines."""
    lines = "".join(f"<dt>{name}</dt><dd>{escape(words)}</dd>" for name, words in _lines(search, search.in_use))
    return f'<div class="answer"><b>{escape(search.name)}</b><dl>{lines}</dl></div>'


def provenance(search: SearchOutcome) -> dict[str, str]:
    """Return the first warning on each kind of number that was not measured, by kind; it says how far off it may be."""
    found: dict[str, str] = {}
    for warning in search.prediction.warnings:
        for kind in _KINDS:
            if warning.startswith(f"{kind}: "):
                found.setdefault(kind, warning.removeprefix(kind))
    return found


def fits_by(search: SearchOutcome, of: Comparison) -> int | None:
    """Return the bytes left of the budget on the search's fullest device, as measured or else as predicted.

    The result is negative where the plan does not fit; None where no budget was set.
    """
    budget = search.prediction.memory_budget_bytes
    held = of.estimate.memory_bytes if of.measured_bytes is None else of.measured_bytes
    return None if budget is None else budget - held


def _lines(search: SearchOutcome, of: Comparison) -> Iterator[tuple[str, str]]:
    model, cluster = of.plan.model, of.plan.cluster
    yield "Plan", f"{model.name} on {cluster.name}, {of.plan.world_size} ranks: {plan_text(of.plan)}"
    yield "Time", _time(of)
    yield "Memory", _memory(search, of)
    yield "Price", _price(of)
    if uses := node_type_uses(of.plan, of.estimate):
        yield "Node types", "; ".join(_node_type(use, use is binding(uses)) for use in uses)
    yield "How sure", "; ".join(_sure(search, of))
    yield "Why", "; ".join(_why(search, of))


def _time(of: Comparison) -> str:
    predicted_s, measured_s = of.estimate.simulated_step_time_s, of.measured_time_s
    if measured_s is None:
        return f"{seconds_text(predicted_s)} a step, predicted: {of.estimate.samples_per_s:.3g} samples/s"
    samples_per_s = of.plan.global_batch_size / measured_s
    return f"{seconds_text(measured_s)} a step, measured: {samples_per_s:.3g} samples/s"


def _memory(search: SearchOutcome, of: Comparison) -> str:
    measured = of.measured_bytes is not None
    held = of.measured_bytes if of.measured_bytes is not None else of.estimate.memory_bytes
    words = f"{bytes_text(held)} on the fullest device, {'measured' if measured else 'predicted'}"
    left, budget = fits_by(search, of), search.prediction.memory_budget_bytes
    if left is None or budget is None:
        return f"{words}; no budget was set"
    if left < 0:
        return f"{words}: does not fit {bytes_text(budget)}, by {bytes_text(-left)}"
    return f"{words}: fits {bytes_text(budget)}, {bytes_text(left)} to spare"


def _price(of: Comparison) -> str:
    usd = of.estimate.usd_per_step
    return "none is known of these nodes" if usd is None else f"{usd_text(1000 * usd)} for a thousand steps, predicted"


def _node_type(use: NodeTypeUse, binds: bool) -> str:
    idle = f"{use.ranks} ranks in {use.stages} stage{'s' if use.stages > 1 else ''}, idle {use.idle_share:.1%}"
    cost = "" if use.idle_usd is None else f", which costs {usd_text(1000 * use.idle_usd)} in a thousand steps"
    return f"{use.name}{' (binds)' if binds else ''}: {idle}{cost}"


def _sure(search: SearchOutcome, of: Comparison) -> Iterator[str]:
    if of.taken:
        yield "taken for its measured time"
    elif (proof := search.prediction.proof) is None:
        yield "not searched, so that nothing is proven"
    else:
        yield f"{proof.nearness} in the space that was searched, by the cost model"
    if of.measured_time_s is None:
        yield "it was not run"
    else:
        ratio = ratio_text(of.estimate.simulated_step_time_s, of.measured_time_s)
        yield f"it was run, and took {ratio} × as long as predicted"
    if kinds := provenance(search):
        yield f"not all was measured that it is predicted from: {', '.join(kinds)}"
    if warnings := len(search.prediction.warnings):
        yield f"{warnings} warning{'s' if warnings > 1 else ''} below"


def _why(search: SearchOutcome, of: Comparison) -> Iterator[str]:
    """Yield the shares of a step, the fullest stage, and the time of the best plan of another configuration."""
    yield ", ".join(_shares(of))
    held = [stage.memory_bytes for stage in of.estimate.stages]
    if len(held) > 1:
        left = bytes_text(max(held) - min(held))
        yield f"stage {held.index(max(held))} is the fullest, stage {held.index(min(held))} needs {left} less"
    if others := [other for other in search.comparisons if _shape(other.plan) != _shape(of.plan)]:
        best = min(others, key=_sample_s)
        shape = shape_words(best.plan)
        more = _sample_s(best) / _sample_s(of) - 1
        words = f"{abs(more):.1%} {'less' if more < 0 else 'more'} time for a sample, predicted"
        yield f"the best plan of another configuration ({shape}) takes {words}"


def _shares(of: Comparison) -> Iterator[str]:
    """Yield the shares of a step by its closed form."""
    parts, step_s = step_parts(of.plan, of.estimate), of.estimate.objective_s or 1.0
    slowest = f" of stage {parts.slowest}, the slowest" if len(of.plan.stages) > 1 else ""
    yield f"{parts.bottleneck_s / step_s:.1%} of a step are forward and backward passes{slowest}"
    rest = {
        "filling and draining the pipeline": parts.fill_s,
        "reducing gradients and the optimizer": parts.end_s,
        "what every step needs": parts.always_s,
    }
    yield from (f"{time_s / step_s:.1%} {what}" for what, time_s in rest.items() if time_s > 0)


def _shape(plan: Plan) -> tuple[int, int, Schedule]:
    return len(plan.stages), plan.num_microbatches, plan.schedule


def _sample_s(of: Comparison) -> float:
    return of.estimate.simulated_step_time_s / of.plan.global_batch_size
