"""The report: one HTML page about searches, runs and profiles that opens offline, with the answer first."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from answer import answer, provenance
from given_picture import GivenPicture
from loss_picture import draw_loss, draw_step_times
from memory_picture import draw_memory
from plan_picture import StrategyColours, draw_plan
from results import (
    ProfileOutcome,
    RunOutcome,
    SearchOutcome,
    evaluation_text,
    plan_text,
    speed_text,
)
from shardwright_formats.display.svg import STYLE
from shardwright_formats.display.timeline import draw_timeline
from shardwright_formats.display.units import bytes_text, seconds_text, usd_text
from tables import correction_table, fits_table, html_list, plans_table, ranks_table


class Section(NamedTuple):
    """A part of the page."""

    title: str
    content: str
    """HTML without the heading."""


def page(
    searches: Sequence[SearchOutcome],
    runs: Sequence[RunOutcome],
    profiles: Sequence[ProfileOutcome] = (),
    pictures: Sequence[GivenPicture] = (),
) -> str:
    """Return the whole page."""
    colours = StrategyColours(plan for search in searches for plan in (search.plan, search.in_use.plan))
    answers = [answer(search) + _drawing(draw_plan(search.in_use.plan, colours)) for search in searches]
    answers[1:1] = ['<p class="soft">Pictures grow when they are clicked.</p>']
    css = STYLE + (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    sections = [
        *(Section(f"Plan: {search.name}", _search_section(search)) for search in searches),
        *(Section(f"Run: {run.name}", _run_section(run)) for run in runs),
        *(Section(f"Picture: {given.name}", _drawing(given.drawing)) for given in pictures),
        *(Section(f"Profile: {profile.name}", _profile_section(profile)) for profile in profiles),
    ]
    parts = "".join(_part(number, *section) for number, section in enumerate(sections, start=1))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Shardwright report</title><style>{css}</style></head><body><main>"
        f"<h1>Shardwright report</h1>{''.join(answers)}{_losses(runs)}{_contents(sections)}{parts}"
        "</main></body></html>\n"
    )


def _part(number: int, title: str, content: str) -> str:
    return f'<section id="part-{number}"><h2>{escape(title)}</h2>{content}</section>'


def _contents(sections: Sequence[Section]) -> str:
    listed = "".join(
        f'<li><a href="#part-{number}">{escape(section.title)}</a></li>'
        for number, section in enumerate(sections, start=1)
    )
    numbers = "All numbers of this page are in the file of its name that ends in .json, beside it."
    return f'<nav><ol>{listed}</ol><p class="soft">{numbers}</p></nav>'


def _losses(runs: Sequence[RunOutcome]) -> str:
    tiles = [
        _tile(
            f"{of.result.first_loss:.2f} → {of.result.final_loss:.2f}", f"{of.name}: loss over {of.result.steps} steps"
        )
        for of in runs
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _search_section(search: SearchOutcome) -> str:
    plan, prediction = search.plan, search.prediction
    budget = prediction.memory_budget_bytes
    millions = plan.model.parameter_count / 1e6
    size = f"{millions:.3g} M" if millions < 1000 else f"{millions / 1000:.3g} B"
    facts = (
        f"{plan.model.name}, {size} parameters, sequence length "
        f"{plan.model.sequence_length}, {len(plan.layers)} layers, on {plan.cluster.name} ({plan.world_size} ranks); "
        f"batch {plan.global_batch_size} in {plan.num_microbatches}"
    )
    estimate = prediction.estimate
    tiles = [
        (seconds_text(estimate.simulated_step_time_s), ", ".join(("predicted step", *provenance(search)))),
        (f"{estimate.samples_per_s:.3g}/s", "samples, predicted"),
        (bytes_text(estimate.memory_bytes), f"memory of {bytes_text(budget)}" if budget else "memory of a rank"),
    ]
    if estimate.usd_per_step is not None:
        tiles.append((usd_text(1000 * estimate.usd_per_step), "for a thousand steps"))
    return "".join(
        (
            f"<p class='soft'>{escape(facts)}</p>",
            f"<p>{escape(plan_text(plan))}</p>",
            "".join(f"<p><strong>{kind}</strong>{escape(words)}</p>" for kind, words in provenance(search).items()),
            '<div class="tiles">' + "".join(_tile(*tile) for tile in tiles) + "</div>",
            _figure("Predicted memory of a rank, by pipeline stage", draw_memory(estimate, budget)),
            _figure(f"Simulated step ({escape(plan.schedule)})", draw_timeline(plan, estimate)),
            _measured(search),
            _proof_and_warnings(search),
        )
    )


def _run_section(run: RunOutcome) -> str:
    times = sorted(step.step_time_s for step in run.steps)
    change = run.result.final_loss / run.result.first_loss - 1
    facts = (
        f"{run.result.steps} steps in {seconds_text(run.result.wall_s)}, start and checkpoints included; "
        f"median step {seconds_text(times[len(times) // 2])}; loss {run.result.first_loss:.3f} → "
        f"{run.result.final_loss:.3f} ({change:+.0%})"
    )
    if (predicted := run.result.predicted_step_time_s) is not None:
        facts += f"; predicted step {seconds_text(predicted)}"
    evaluated = [step for step in run.steps if step.evaluation is not None]
    title = "Loss, and validation loss (dots)" if evaluated else "Loss"
    return "".join(
        (
            f"<p class='soft'>{escape(facts)}</p>",
            f"<p>{escape(evaluation_text(run))}</p>" if evaluated else "",
            _figure(title, draw_loss(run)),
            _figure("Step time, measured and predicted" if predicted else "Step time", draw_step_times(run)),
        )
    )


def _proof_and_warnings(search: SearchOutcome) -> str:
    proof, drawn = search.prediction.proof, ""
    if proof is not None:
        found = proof.nearness
        objective = f"{seconds_text(proof.objective_s)} against a bound of {seconds_text(proof.objective_bound_s)}"
        drawn += (
            f"<h3>Proof</h3><p>{found[0].upper()}{found[1:]} for {escape(proof.objective)} ({objective}), "
            f"in this space: {escape(proof.scope)}. "
            f"{proof.examined:,} configurations examined, {proof.solved:,} solved.</p>"
        )
    if search.prediction.warnings:
        drawn += f"<h3>Warnings</h3>{html_list(search.prediction.warnings)}"
    return drawn + f"<p><code>plan {search.plan.sha256}</code></p>"


def _measured(search: SearchOutcome) -> str:
    """Return the section of plans predicted and measured, their ranks, and the factors learned from them."""
    drawn = f"<h3>Predicted against measured (ratio: measured over predicted)</h3>{plans_table(search.comparisons)}"
    if changed := speed_text(search.comparisons):
        drawn += f"<p><strong>{changed[0].upper()}{changed[1:]}.</strong></p>"
    if ranks := ranks_table(search.comparisons):
        drawn += f"<details><summary>Every rank of these plans</summary>{ranks}</details>"
    if (learned := search.correction) is not None:
        drawn += "<h3>What was learned (a search uses it only where its <code>correction</code> says so)</h3>"
        drawn += correction_table(learned) + html_list(learned.warnings)
    return drawn


def _profile_section(found: ProfileOutcome) -> str:
    """Return the section of a profile: sources of its numbers, errors of its curves, notes and picture."""
    origin, provenance, layers = found.profile.origin, found.profile.provenance, found.profile.layers
    numbers = ("forward_source", "backward_source", "activation_source", "workspace_source")
    sources = sorted({getattr(row, name) for row in layers.rows for name in numbers})
    facts = (
        f"{origin.model} on {origin.device} ({origin.backend}), {origin.precision}, attention {origin.attention}; "
        f"{len(layers)} points, {', '.join(sources)}; {provenance.date}, {provenance.versions}"
    )
    fits, encoded = fits_table(found.profile), base64.b64encode(found.picture).decode()
    explained = "How well curves explain the points (relative errors; medians over the curves)"
    return "".join(
        (
            f"<p class='soft'>{escape(facts)}</p>",
            html_list(provenance.notes.splitlines()),
            f"<h3>{explained}</h3>{fits}" if fits else "",
            _drawing(f'<img alt="points and curves" src="data:image/svg+xml;base64,{encoded}"/>'),
        )
    )


def _figure(title: str, drawing: str) -> str:
    return f"<h3>{title}</h3>{_drawing(drawing)}"


def _drawing(drawing: str) -> str:
    """Return a drawing as wide as the page, which a click shows at its own width, to be scrolled, without a script."""
    return f'<label class="wide"><input type="checkbox" aria-label="larger"/>{drawing}</label>'


def _tile(value: str, words: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(words)}</span></div>'
