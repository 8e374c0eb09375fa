"""The loss curve of a training run."""

from results import RunOutcome
from svg import PALETTE, element, line, picture, text, ticks

__all__ = ["draw_loss"]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM = 960.0, 260.0, 48.0, 64.0, 232.0


def draw_loss(run: RunOutcome) -> str:
    """Draw loss against step; the axis of the loss starts at a round value below the least."""
    losses = [step.loss for step in run.steps]
    least, most = min(losses), max(losses)
    spread = (most - least) or 1.0
    marks = [tick for tick in ticks(most * 1.05) if tick >= least - spread]
    low = max([0.0, *(tick for tick in ticks(most) if tick <= least)])
    high = max(most, low + spread)
    first, last = run.steps[0].step, run.steps[-1].step
    across = (_WIDTH - _LEFT - _RIGHT) / max(last - first, 1)

    def x_of(step: int) -> float:
        return _LEFT + (step - first) * across

    def y_of(loss: float) -> float:
        return _BOTTOM - (loss - low) / (high - low) * (_BOTTOM - 14)

    drawn = []
    for tick in (tick for tick in marks if low <= tick <= high):
        drawn.append(line(_LEFT, y_of(tick), _WIDTH - _RIGHT, y_of(tick)))
        drawn.append(text(_LEFT - 8, y_of(tick) + 4, f"{tick:g}", text_anchor="end", class_="soft small"))
    for tick in (int(tick) for tick in ticks(last, 6) if first <= tick <= last and tick == int(tick)):
        drawn.append(text(x_of(tick), _BOTTOM + 18, str(tick), text_anchor="middle", class_="soft small"))
    points = " ".join(f"{x_of(step.step):.1f},{y_of(step.loss):.1f}" for step in run.steps)
    drawn.append(
        element("polyline", points=points, fill="none", stroke=PALETTE[0], stroke_width=2, stroke_linejoin="round")
    )
    drawn.append(element("circle", cx=x_of(last), cy=y_of(losses[-1]), r=3.5, fill=PALETTE[0]))
    drawn.append(text(x_of(last) + 8, y_of(losses[-1]) + 4, f"{losses[-1]:.3f}", class_="strong"))
    drawn.append(text(_WIDTH - _RIGHT + 22, _BOTTOM + 18, "step", class_="soft small"))
    return picture("".join(drawn), _WIDTH, _HEIGHT, f"loss of {run.name}")
