"""The report: one HTML page about searches, runs and profiles that opens offline, with the answer first."""

import base64
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from itertools import product
from statistics import median

from results import (
    Comparison,
    GivenPicture,
    ProfileOutcome,
    RunOutcome,
    SearchOutcome,
    evaluation_text,
    or_dash,
    plan_text,
    ratio_text,
    speed_text,
)
from shardwright.display.chart import Panel, linear_axis
from shardwright.display.html import (
    html_drawing,
    html_drawings,
    html_figure,
    html_list,
    html_page,
    html_table,
    html_tiles,
    with_contents,
)
from shardwright.display.plan_picture import draw_memory, draw_plan
from shardwright.display.plan_words import shape_words
from shardwright.display.svg import PREDICTED, WIDTH, line, marker, picture, text, ticks
from shardwright.display.timeline import draw_timeline
from shardwright.display.units import bytes_text, seconds_text, usd_text
from shardwright.types import Correction
from shardwright.types.model_profile import ModelProfile
from summaries import answer, first_sentences, provenance

_COMPARED = (
    "step, predicted", "step, measured", "ratio", "ratio at equal speed", "memory, predicted", "memory, measured",
    "ratio of memory",
)  # fmt: skip
_MODES = {
    "batch": "line in the micro-batch size",
    "sequence": "parabola in the sequence length",
    "joint": "both together",
}
_QUANTITIES = {"forward_s": "forward", "backward_s": "backward", "activation_bytes": "activations"}


def page(
    searches: Sequence[SearchOutcome],
    runs: Sequence[RunOutcome],
    profiles: Sequence[ProfileOutcome] = (),
    pictures: Sequence[GivenPicture] = (),
) -> str:
    """Return the whole page."""
    sections = [
        *((f"Plan: {search.name}", _search_section(search)) for search in searches),
        *((f"Run: {run.name}", _run_section(run)) for run in runs),
        *((f"Picture: {given.name}", html_drawing(given.drawing)) for given in pictures),
        *((f"Profile: {profile.name}", _profile_section(profile)) for profile in profiles),
    ]
    words = "Its numbers are in the file of its name that ends in .json. On a wide page pictures grow when clicked."
    sentences = '</p><p class="first">'.join(map(escape, first_sentences(searches, runs)))
    first_page = _overview(searches) + _losses(runs) + "<h2>Details</h2>"
    return html_page("Shardwright report", sentences, first_page + with_contents(sections, words))


def _overview(searches: Sequence[SearchOutcome]) -> str:
    """Return a table of each chosen plan's prediction, next to its measurement."""
    chosen = [(search.name, search.chosen) for search in searches]
    rows = [
        (
            (name, shape_words(each.plan)),
            _compared(each, each.estimate.memory_bytes, each.measured_time_s, each.measured_bytes),
            False,
        )
        for name, each in chosen
    ]
    return html_table(("search", "plan"), _COMPARED, rows)


def _losses(runs: Sequence[RunOutcome]) -> str:
    losses = (f"{run.result.first_loss:.2f} → {run.result.final_loss:.2f}" for run in runs)
    words = (f"{run.name}: loss over {run.result.steps} steps" for run in runs)
    return html_tiles(zip(losses, words, strict=True)) if runs else ""


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
            answer(search),
            html_drawings(partial(draw_plan, search.chosen.plan)),
            f"<p class='soft'>{escape(facts)}</p>",
            f"<p>{escape(plan_text(plan))}</p>",
            "".join(f"<p><strong>{kind}</strong>{escape(words)}</p>" for kind, words in provenance(search).items()),
            html_tiles(tiles),
            html_figure("Predicted memory of a rank, by pipeline stage", partial(draw_memory, estimate, budget)),
            html_figure(f"Simulated step ({escape(plan.schedule)})", partial(draw_timeline, plan, estimate))
            if estimate.timeline
            else "",
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
            html_figure(title, partial(draw_loss, run)),
            html_figure(
                "Step time, measured and predicted" if predicted else "Step time", partial(draw_step_times, run)
            ),
        )
    )


def _proof_and_warnings(search: SearchOutcome) -> str:
    proof, drawn = search.prediction.proof, ""
    if proof is not None:
        nearness = proof.nearness
        objective = f"{seconds_text(proof.objective_s)} against a bound of {seconds_text(proof.objective_bound_s)}"
        drawn += (
            f"<h3>Proof</h3><p>{nearness[0].upper()}{nearness[1:]} for {escape(proof.objective)} ({objective}), "
            f"in this space: {escape(proof.scope)}. "
            f"{proof.examined:,} configurations examined, {proof.solved:,} solved.</p>"
        )
    if search.prediction.warnings:
        drawn += f"<h3>Warnings</h3>{html_list(search.prediction.warnings)}"
    return drawn + f"<p><code>plan {search.plan.sha256}</code></p>"


def _measured(search: SearchOutcome) -> str:
    """Return the section of plans predicted and measured, their ranks, and corrections learned from them."""
    drawn = f"<h3>Predicted against measured (ratio: measured over predicted)</h3>{_plans_table(search.comparisons)}"
    if changed := speed_text(search.comparisons):
        drawn += f"<p><strong>{changed[0].upper()}{changed[1:]}.</strong></p>"
    if ranks := _ranks_table(search.comparisons):
        drawn += f"<details><summary>Every rank of these plans</summary>{ranks}</details>"
    if (learned := search.correction) is not None:
        drawn += "<h3>What was learned (a search uses it only if its <code>correction</code> says so)</h3>"
        drawn += _correction_table(learned) + html_list(learned.warnings)
    return drawn


def _profile_section(outcome: ProfileOutcome) -> str:
    """Return the section of a profile: sources of its numbers, errors of its curves, notes and picture."""
    origin, provenance, layers = outcome.profile.origin, outcome.profile.provenance, outcome.profile.layers
    columns = ("forward_source", "backward_source", "activation_source", "workspace_source")
    sources = sorted({getattr(row, name) for row in layers.rows for name in columns})
    facts = (
        f"{origin.model} on {origin.device} ({origin.backend}), {origin.precision}, attention {origin.attention}; "
        f"{len(layers)} points, {', '.join(sources)}; {provenance.date}, {provenance.versions}"
    )
    fits, encoded = _fits_table(outcome.profile), base64.b64encode(outcome.picture).decode()
    explained = "How well curves explain the points (relative errors; medians over the curves)"
    return "".join(
        (
            f"<p class='soft'>{escape(facts)}</p>",
            html_list(provenance.notes.splitlines()),
            f"<h3>{explained}</h3>{fits}" if fits else "",
            html_drawing(f'<img alt="points and curves" src="data:image/svg+xml;base64,{encoded}"/>'),
        )
    )


def _plans_table(comparisons: Iterable[Comparison]) -> str:
    """Return a table of every plan as predicted and as measured."""
    rows = [
        (
            (each.role, plan_text(each.plan)),
            _compared(each, each.estimate.memory_bytes, each.measured_time_s, each.measured_bytes),
            each.role == "chosen",
        )
        for each in comparisons
    ]
    return html_table(("", "plan"), _COMPARED, rows)


def _ranks_table(comparisons: Iterable[Comparison]) -> str:
    """Return a table of every measured rank, with the predicted memory of its stage; both include the process."""
    rows = []
    for each in comparisons:
        for rank in () if each.measured is None else each.measured.ranks:
            predicted, held = each.estimate.stages[rank.stage], rank.memory.peak_bytes + rank.memory.process_bytes
            numbers = _compared(each, predicted.memory_bytes, median(rank.step_s), held)
            rows.append(((each.role,), (str(rank.rank), str(rank.stage), *numbers), False))
    return html_table(("plan",), ("rank", "pipeline stage", *_COMPARED), rows)


def _correction_table(correction: Correction) -> str:
    """Return a table of the learned factors, with their evidence."""
    rows = [
        (
            (str(term).replace("_", " "),),
            (f"{row.factor:.3f}", f"{row.lowest:.3f} to {row.highest:.3f}", str(row.num_plans), str(row.num_ranks)),
            False,
        )
        for term, row in correction.factors.items()
    ]
    return html_table(("term",), ("measured over predicted", "of single plans", "plans", "ranks"), rows)


def _fits_table(profile: ModelProfile) -> str:
    """Return a table of relative errors of the curves fitted to a profile's points: medians over the curves."""
    rows = []
    for (mode, words), (quantity, name) in product(_MODES.items(), _QUANTITIES.items()):
        if fits := [fit for fit in profile.fits.rows if (fit.mode, fit.quantity) == (mode, quantity)]:
            left_out = [fit.left_out_error for fit in fits if fit.left_out_points]
            numbers = (
                str(len(fits)),
                f"{median(fit.typical_residual for fit in fits):.1%}",
                f"{max(fit.worst_residual for fit in fits):.1%}",
                f"{median(left_out):.1%}" if left_out else "–",
            )
            rows.append(((name, words), numbers, False))
    return html_table(("", "curve"), ("curves", "typical residual", "worst", "left out and predicted"), rows)


def _compared(compared: Comparison, size: int, measured_s: float | None, measured_bytes: int | None) -> Sequence[str]:
    time_s = compared.estimate.simulated_step_time_s
    return (
        seconds_text(time_s),
        or_dash(seconds_text, measured_s),
        ratio_text(time_s, measured_s),
        ratio_text(time_s * compared.slowdown, measured_s),
        bytes_text(size),
        or_dash(bytes_text, measured_bytes),
        ratio_text(size, measured_bytes),
    )


# Pictures of a run's losses and step times.


_STEPS_HEIGHT = 260.0


def draw_loss(run: RunOutcome, across: float = WIDTH) -> str:
    """Draw loss and evaluations against the step; the axis of the loss starts at a round value below the minimum."""
    losses = [step.loss for step in run.steps]
    evaluated = [(step.step, step.evaluation.loss) for step in run.steps if step.evaluation is not None]
    drawn = [*losses, *(loss for _, loss in evaluated)]
    least, most = min(drawn), max(drawn)
    low = max([0.0, *(tick for tick in ticks(most) if tick <= least)])
    panel = _step_panel(run, low, most, across)
    curve = panel.curve(((step.step, step.loss) for step in run.steps), 0, width=2)
    x, y = panel.x.at(run.steps[-1].step), panel.y.at(losses[-1])
    end = marker(0, x, y, 3.5) + text(x + 8, y + 4, f"{losses[-1]:.3f}", look="strong")
    curve += panel.curve(evaluated, 1, width=2) if len(evaluated) > 1 else ""
    for step, loss in evaluated:
        curve += marker(1, panel.x.at(step), panel.y.at(loss), 3, f"validation loss after step {step}: {loss:.3f}")
    return picture(panel.frame("", "step") + curve + end, across, _STEPS_HEIGHT, f"loss of {run.name}")


def draw_step_times(run: RunOutcome, across: float = WIDTH) -> str:
    """Draw the time of each step against its number, and the predicted step time as a horizontal line.

    The axis ends at three times the median, so that a first step that compiles or warms up does not flatten the rest.
    """
    times = [step.step_time_s for step in run.steps]
    predicted = run.result.predicted_step_time_s
    high = min(max(times), 3 * median(times))
    high = max(high, 0.0 if predicted is None else 1.1 * predicted)
    panel = _step_panel(run, 0, high, across, seconds_text)
    drawn = panel.curve(((step.step, min(step.step_time_s, high)) for step in run.steps), 0)
    if predicted is not None:
        y = panel.y.at(predicted)
        drawn += line(panel.x.start, y, panel.x.end, y, stroke=PREDICTED, stroke_width=2)
        drawn += text(panel.x.end + 4, y + 4, "predicted", look="small")
    return picture(panel.frame("", "step") + drawn, across, _STEPS_HEIGHT, f"step times of {run.name}")


def _step_panel(
    run: RunOutcome, low: float, high: float, across: float, label: Callable[[float], str] = "{:g}".format
) -> Panel:
    """Return a panel of values from `low` to `high` against the steps of a run."""
    steps = linear_axis(run.steps[0].step, run.steps[-1].step, 48, across - 64, count=6 if across == WIDTH else 3)
    return Panel(steps, linear_axis(low, high, 222, 14, label, count=5))
