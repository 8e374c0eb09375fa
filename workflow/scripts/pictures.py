"""Pictures of a run's losses and step times."""

from collections.abc import Callable
from statistics import median

from results import RunOutcome
from shardwright.display.chart import Panel, linear_axis
from shardwright.display.svg import PREDICTED, WIDTH, line, marker, picture, text, ticks
from shardwright.display.units import seconds_text

_STEPS_HEIGHT = 260.0


def draw_loss(run: RunOutcome, across: float = WIDTH) -> str:
    """Draw loss and evaluations against step; the loss's axis starts at a round value below the least."""
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
    """Draw the time of each step against its number, and the predicted one as a horizontal line.

    The axis ends at three medians, so that a first step that compiles or warms up does not flatten the rest.
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
    """A panel of values from `low` to `high` against the steps of a run."""
    steps = linear_axis(run.steps[0].step, run.steps[-1].step, 48, across - 64, count=6 if across == WIDTH else 3)
    return Panel(steps, linear_axis(low, high, 222, 14, label, count=5))
