"""Pictures of a training run's loss curve, and of its step times with the predicted one."""

from statistics import median

from results import RunOutcome
from shardwright_formats.display.chart import Panel, linear_axis
from shardwright_formats.display.svg import PALETTE, WIDTH, line, marker, picture, text, ticks
from shardwright_formats.display.units import seconds_text

_HEIGHT, _LEFT, _RIGHT, _BOTTOM = 260.0, 48.0, 64.0, 222.0


def draw_loss(run: RunOutcome) -> str:
    """Draw loss and evaluations against step; the loss's axis starts at a round value below the least."""
    losses = [step.loss for step in run.steps]
    evaluated = [(step.step, step.evaluation.loss) for step in run.steps if step.evaluation is not None]
    drawn = [*losses, *(loss for _, loss in evaluated)]
    least, most = min(drawn), max(drawn)
    low = max([0.0, *(tick for tick in ticks(most) if tick <= least)])
    first, last = run.steps[0].step, run.steps[-1].step
    panel = Panel(
        linear_axis(first, last, _LEFT, WIDTH - _RIGHT, count=6), linear_axis(low, most, _BOTTOM, 14, count=5)
    )
    curve = panel.curve(((step.step, step.loss) for step in run.steps), 0, width=2)
    x, y = panel.x.at(last), panel.y.at(losses[-1])
    end = marker(0, x, y, 3.5) + text(x + 8, y + 4, f"{losses[-1]:.3f}", class_="strong")
    curve += panel.curve(evaluated, 1, width=2) if len(evaluated) > 1 else ""
    for step, loss in evaluated:
        curve += marker(1, panel.x.at(step), panel.y.at(loss), 3, f"validation loss after step {step}: {loss:.3f}")
    return picture(panel.frame("", "step") + curve + end, WIDTH, _HEIGHT, f"loss of {run.name}")


def draw_step_times(run: RunOutcome) -> str:
    """Draw the time of each step against its number, and the predicted one as a horizontal line.

    The axis ends at three medians, so that a first step that compiles or warms up does not flatten the rest.
    """
    times = [step.step_time_s for step in run.steps]
    predicted = run.result.predicted_step_time_s
    high = min(max(times), 3 * median(times))
    high = max(high, 0.0 if predicted is None else 1.1 * predicted)
    first, last = run.steps[0].step, run.steps[-1].step
    panel = Panel(
        linear_axis(first, last, _LEFT, WIDTH - _RIGHT, count=6),
        linear_axis(0, high, _BOTTOM, 14, label=seconds_text, count=5),
    )
    drawn = panel.curve(((step.step, min(step.step_time_s, high)) for step in run.steps), 0)
    if predicted is not None:
        y = panel.y.at(predicted)
        drawn += line(_LEFT, y, WIDTH - _RIGHT, y, stroke=PALETTE[1], stroke_width=2)
        drawn += text(WIDTH - _RIGHT + 4, y + 4, "predicted", class_="small")
    return picture(panel.frame("", "step") + drawn, WIDTH, _HEIGHT, f"step times of {run.name}")
