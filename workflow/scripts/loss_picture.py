"""The loss curve of a training run."""

from results import RunOutcome
from shardwright_formats.display.chart import Panel, linear_axis
from shardwright_formats.display.svg import WIDTH, marker, picture, text, ticks

_HEIGHT, _LEFT, _RIGHT, _BOTTOM = 260.0, 48.0, 64.0, 222.0


def draw_loss(run: RunOutcome) -> str:
    """Draw loss against step; the axis of the loss starts at a round value below the least."""
    losses = [step.loss for step in run.steps]
    least, most = min(losses), max(losses)
    low = max([0.0, *(tick for tick in ticks(most) if tick <= least)])
    first, last = run.steps[0].step, run.steps[-1].step
    panel = Panel(
        linear_axis(first, last, _LEFT, WIDTH - _RIGHT, count=6), linear_axis(low, most, _BOTTOM, 14, count=5)
    )
    curve = panel.curve(((step.step, step.loss) for step in run.steps), 0, width=2)
    x, y = panel.x.at(last), panel.y.at(losses[-1])
    end = marker(0, x, y, 3.5) + text(x + 8, y + 4, f"{losses[-1]:.3f}", class_="strong")
    return picture(panel.frame("", "step") + curve + end, WIDTH, _HEIGHT, f"loss of {run.name}")
