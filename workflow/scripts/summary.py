"""The summary of a whole run of the workflow, in lines."""

from collections.abc import Sequence

from results import Comparison, RunOutcome, SearchOutcome, plan_text, ratio_text, speed_text
from shardwright_formats.display.units import bytes_text, seconds_text


def summary(searches: Sequence[SearchOutcome], runs: Sequence[RunOutcome]) -> str:
    """Return plans with predicted and measured step times, and the losses, as lines."""
    lines: list[str] = []
    for search in searches:
        budget = search.prediction.memory_budget_bytes
        within = f" within {bytes_text(budget)} a device" if budget else ""
        lines += ["", f"plan {search.name}{within}: {plan_text(search.plan)}"]
        width = max(12, *(len(comparison.name) for comparison in search.comparisons))
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
    time_s, measured_s, measured_bytes = (
        estimate.simulated_step_time_s,
        comparison.measured_time_s,
        comparison.measured_bytes,
    )
    measured = "–" if measured_s is None else seconds_text(measured_s)
    size = "–" if measured_bytes is None else bytes_text(measured_bytes)
    return (
        f"  {comparison.name:<{width}} {seconds_text(time_s):>10} {measured:>10} {ratio_text(time_s, measured_s):>6}"
        f" {ratio_text(time_s * comparison.slowdown, measured_s):>14}"
        f"   {bytes_text(estimate.memory_bytes):>10} {size:>10}"
    )
