"""Write one HTML page about searches and runs that opens offline.

python workflow/scripts/report.py --results results --searches roomy tight --runs demo --out results/report.html
python workflow/scripts/report.py --results results --searches tight --plan-svg docs/images/plan.svg
"""

import argparse
from collections.abc import Sequence
from html import escape
from pathlib import Path

from loss_picture import draw_loss
from plan_picture import StrategyColours, draw_plan, plan_file
from profile_section import ProfileOutcome, profile_section, read_profile
from reality_section import reality_section
from results import (
    RunOutcome,
    SearchOutcome,
    bytes_text,
    plan_text,
    ratio_text,
    read_run,
    read_search,
    seconds_text,
)
from shardwright_formats.io.errors import one_line_errors
from shardwright_formats.io.json import write_bytes
from stage_pictures import draw_memory, draw_timeline
from svg import STYLE

__all__ = ["main", "page"]


def page(searches: Sequence[SearchOutcome], runs: Sequence[RunOutcome], profiles: Sequence[ProfileOutcome] = ()) -> str:
    """The whole page."""
    colours = StrategyColours(search.plan for search in searches)
    css = STYLE + (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    sections = [
        *(_search_section(search, colours) for search in searches),
        *(_run_section(run) for run in runs),
        *(profile_section(profile) for profile in profiles),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Shardwright report</title><style>{css}</style></head><body><main>"
        f"<h1>Shardwright report</h1>{_summary(searches, runs)}{''.join(sections)}</main></body></html>\n"
    )


def _summary(searches: Sequence[SearchOutcome], runs: Sequence[RunOutcome]) -> str:
    tiles = []
    for search in searches:
        chosen = search.comparisons[0]
        time_s = chosen.estimate.simulated_step_time_s
        if chosen.measured_time_s is None:
            words = "".join(f", {kind}" for kind in _marks(search))
            tiles.append((seconds_text(time_s), f"{search.name}: predicted step{words}, not measured"))
        else:
            words = f"{search.name}: measured step, {ratio_text(time_s, chosen.measured_time_s)} × predicted"
            tiles.append((seconds_text(chosen.measured_time_s), words))
    for run in runs:
        first, last = run.result.first_loss, run.result.final_loss
        tiles.append((f"{first:.2f} → {last:.2f}", f"{run.name}: loss over {run.result.steps} steps"))
    return '<div class="tiles">' + "".join(_tile(*tile) for tile in tiles) + "</div>"


def _search_section(search: SearchOutcome, colours: StrategyColours) -> str:
    plan, prediction = search.plan, search.prediction
    budget = prediction.memory_budget_bytes
    facts = (
        f"{plan.model.name}, {plan.model.parameter_count / 1e6:.3g} M parameters, sequence length "
        f"{plan.model.sequence_length}, {len(plan.layers)} layers, on {plan.cluster.name} ({plan.world_size} ranks); "
        f"batch {plan.global_batch_size} in {plan.num_microbatches}"
    )
    estimate = prediction.estimate
    tiles = [
        (seconds_text(estimate.simulated_step_time_s), ", ".join(("predicted step", *_marks(search)))),
        (f"{estimate.samples_per_s:.3g}/s", "samples, predicted"),
        (bytes_text(estimate.memory_bytes), f"memory of {bytes_text(budget)}" if budget else "memory of a rank"),
    ]
    if estimate.usd_per_step is not None:
        tiles.append((f"${1000 * estimate.usd_per_step:.3g}", "for a thousand steps"))
    return "".join(
        (
            f"<h2>Plan: {escape(search.name)}</h2><p class='soft'>{escape(facts)}</p>",
            f"<p>{escape(plan_text(plan))}</p>",
            "".join(f"<p><strong>{kind}</strong>{escape(words)}</p>" for kind, words in _marks(search).items()),
            '<div class="tiles">' + "".join(_tile(*tile) for tile in tiles) + "</div>",
            _figure("Layers and pipeline stages", draw_plan(plan, colours)),
            _figure("Predicted memory of a rank, by pipeline stage", draw_memory(estimate, budget)),
            _figure(f"Simulated step ({escape(plan.schedule)})", draw_timeline(estimate)),
            reality_section(search),
            _beliefs(search),
        )
    )


def _marks(search: SearchOutcome) -> dict[str, str]:
    """What of a prediction nobody measured, by kind: the first warning of each, which says how far that may be off."""
    found: dict[str, str] = {}
    for warning in search.prediction.warnings:
        for kind in ("analytic", "assumed", "absent"):
            if warning.startswith(f"{kind}: "):
                found.setdefault(kind, warning.removeprefix(kind))
    return found


def _run_section(run: RunOutcome) -> str:
    times = sorted(step.step_time_s for step in run.steps)
    change = run.result.final_loss / run.result.first_loss - 1
    facts = (
        f"{run.result.steps} steps in {seconds_text(run.result.wall_s)}, start and checkpoints included; "
        f"median step {seconds_text(times[len(times) // 2])}; loss {run.result.first_loss:.3f} → "
        f"{run.result.final_loss:.3f} ({change:+.0%})"
    )
    return f"<h2>Run: {escape(run.name)}</h2><p class='soft'>{escape(facts)}</p>{_figure('Loss', draw_loss(run))}"


def _beliefs(search: SearchOutcome) -> str:
    proof, drawn = search.prediction.proof, ""
    if proof is not None:
        found = "optimal" if proof.gap == 0 else f"within {proof.gap:.2%} of the optimum"
        objective = f"{seconds_text(proof.objective_s)} against a bound of {seconds_text(proof.objective_bound_s)}"
        drawn += (
            f"<h3>Proof</h3><p>{found[0].upper()}{found[1:]} for {escape(proof.objective)} ({objective}), "
            f"in this space: {escape(proof.scope)}. {proof.examined:,} cases examined, {proof.solved:,} solved.</p>"
        )
    if search.prediction.warnings:
        items = "".join(f"<li>{escape(warning)}</li>" for warning in search.prediction.warnings)
        drawn += f"<h3>Warnings</h3><ul>{items}</ul>"
    return drawn + f"<p><code>plan {search.plan.sha256}</code></p>"


def _figure(title: str, drawing: str) -> str:
    return f'<h3>{title}</h3><div class="wide">{drawing}</div>'


def _tile(value: str, words: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(words)}</span></div>'


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the results and write the page, or the picture of the first search's plan."""
    parser = argparse.ArgumentParser(description="Write one HTML page about searches and runs.")
    parser.add_argument(
        "--results", type=Path, required=True, help="folder of plans/, measurements/, runs/, profiles/ and pictures/"
    )
    parser.add_argument("--searches", nargs="*", default=[], help="names of searches, in the order of the page")
    parser.add_argument("--runs", nargs="*", default=[], help="names of runs")
    parser.add_argument("--selected", nargs="*", default=[], help="searches whose measured winner runs take")
    parser.add_argument("--profiles", nargs="*", default=[], help="names of profiles, MODEL@NODE_TYPE")
    parser.add_argument("--out", type=Path, help="the page to write")
    parser.add_argument("--plan-svg", type=Path, help="write the picture of the first search's plan here")
    asked = parser.parse_args(arguments)
    with one_line_errors():
        searches = [read_search(asked.results, name, selected=name in asked.selected) for name in asked.searches]
        runs = [read_run(asked.results, name) for name in asked.runs]
        profiles = [read_profile(asked.results, name) for name in asked.profiles]
        if asked.plan_svg is not None and searches:
            write_bytes(asked.plan_svg, plan_file(searches[0].plan).encode())
        if asked.out is not None:
            write_bytes(asked.out, page(searches, runs, profiles).encode())


if __name__ == "__main__":
    main()
