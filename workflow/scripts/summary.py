"""Print what a whole run of the workflow came to.

python workflow/scripts/summary.py --results results --searches roomy tight --runs demo
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from results import Comparison, RunOutcome, SearchOutcome, plan_text, ratio_text, read_run, read_search
from shardwright_formats.display.units import bytes_text, seconds_text
from shardwright_formats.io.errors import one_line_errors

__all__ = ["main", "summary"]


def summary(searches: Sequence[SearchOutcome], runs: Sequence[RunOutcome]) -> str:
    """Plans with predicted and measured step times, and the losses, as lines."""
    lines: list[str] = []
    for search in searches:
        budget = search.prediction.memory_budget_bytes
        within = f" within {bytes_text(budget)} a device" if budget else ""
        lines += ["", f"plan {search.name}{within}: {plan_text(search.plan)}"]
        width = max(12, *(len(comparison.name) for comparison in search.comparisons))
        lines += [f"  {'':<{width}} {'predicted':>10} {'measured':>10} {'ratio':>6}   {'memory':>10} {'measured':>10}"]
        lines += [_comparison(comparison, width) for comparison in search.comparisons]
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
        f"   {bytes_text(estimate.memory_bytes):>10} {size:>10}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the results and print the summary."""
    parser = argparse.ArgumentParser(description="Print what a whole run of the workflow came to.")
    parser.add_argument("--results", type=Path, required=True, help="folder of plans/, measurements/ and runs/")
    parser.add_argument("--searches", nargs="*", default=[], help="names of searches")
    parser.add_argument("--selected", nargs="*", default=[], help="searches whose measured winner runs take")
    parser.add_argument("--runs", nargs="*", default=[], help="names of runs")
    asked = parser.parse_args(arguments)
    with one_line_errors():
        searches = [read_search(asked.results, name, selected=name in asked.selected) for name in asked.searches]
        runs = [read_run(asked.results, name) for name in asked.runs]
    print(summary(searches, runs))


if __name__ == "__main__":
    main()
