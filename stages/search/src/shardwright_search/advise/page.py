"""Advice as one page that opens offline: the answer, pictures of plan and memory, and the front of memory and time."""

from collections.abc import Sequence
from enum import Enum
from functools import partial
from html import escape
from typing import NamedTuple

from shardwright.devices.utilization import Utilization, model_flops_utilization
from shardwright.display.chart import ChartAxis, Panel, bytes_axis, linear_axis
from shardwright.display.html import html_drawings, html_list, html_page, html_table, html_tiles, with_contents
from shardwright.display.plan_picture import draw_memory, draw_plan
from shardwright.display.svg import INK, MEASURED, PAPER, WIDTH, element, picture
from shardwright.display.units import bytes_text, seconds_text, usd_text
from shardwright.estimate.notes import SEEN
from shardwright.types import GIB
from shardwright_search.advise.report import (
    PLAN_HEADINGS,
    Advice,
    memory_rows,
    plan_rows,
    plan_words,
    usd_per_billion_tokens,
)
from shardwright_search.advise.sizes import SHARES, Outcome, Sized
from shardwright_search.search import proof_words

# Pictures of Pareto fronts: step time against memory, or against the cost of a billion tokens.


_HEIGHT, _TOP, _BOTTOM, _LEFT, _RIGHT = 300.0, 30.0, 250.0, 80.0, 40.0


class Axis(Enum):
    """The quantity on the other axis of the front: memory or cost."""

    MEMORY = "memory of the fullest GPU"
    PRICE = "price of a billion tokens"

    def words(self, value: float) -> str:
        """Return a value with its unit."""
        return bytes_text(int(value)) if self is Axis.MEMORY else usd_text(value)

    def chart(self, high: float, end: float, count: int) -> ChartAxis:
        """Return an axis from 0 to a value."""
        if self is Axis.MEMORY:
            return bytes_axis(high, _LEFT, end, count)
        return linear_axis(0, high, _LEFT, end, usd_text, count)


class Point(NamedTuple):
    """The best plan for a budget, or for a number of GPUs."""

    value: float
    """Bytes of its fullest device, or USD of a billion tokens."""
    step_s: float
    words: str
    proven: bool


def draw_front(points: Sequence[Point | None], chosen: int, axis: Axis, across: float = WIDTH) -> str:
    """Draw the points that are known, joined in their order; the one at `chosen` has a ring."""
    width, count = across, 5 if across == WIDTH else 3
    known = list(dict.fromkeys(point for point in points if point is not None))
    times_s = [point.step_s for point in known]
    x = axis.chart(1.05 * max(point.value for point in known), width - _RIGHT, count)
    y = linear_axis(0, 1.08 * max(times_s), _BOTTOM, _TOP, seconds_text)
    panel = Panel(x, y)
    drawn = [panel.frame("time of a step", axis.value)]
    drawn.append(panel.curve(((point.value, point.step_s) for point in known), 0, width=2))
    for point in known:
        title = f"{axis.words(point.value)}, {seconds_text(point.step_s)} a step: {point.words}"
        look = {"fill": MEASURED if point.proven else PAPER, "stroke": MEASURED, "stroke_width": 2}
        place = {"cx": x.at(point.value), "cy": y.at(point.step_s)}
        drawn.append(element("circle", element("title", title.replace("<", "&lt;")), r=5, **place, **look))
        if point == points[chosen]:
            drawn.append(element("circle", r=10, fill="none", stroke=INK, stroke_width=2, **place))
    return picture("".join(drawn), width, _HEIGHT, f"{axis.value} against time of a step")


# The page.


_FRONT = (
    "Each point is the best plan for a budget of memory: a faster step needs more of it. Hollow points are of searches "
    "that were stopped: faster plans may exist. The ring is at the budget that was asked."
)
ROWS = "Rows are pipeline stages, columns are layers. Pictures grow when they are clicked."


def advice_page(advice: Advice, gpus: str, budgets: Sequence[Outcome]) -> str:
    """Return the page of an answer, with the outcomes for `SHARES` of the memory budget."""
    asked = Sized.of_answer(advice.question, advice.answer)
    plans = [((name, words), numbers, False) for name, words, *numbers in plan_rows(advice.question, advice.plans)]
    sections = [
        ("The answer", answer_part(asked)),
        ("The plan", f'<p class="soft">{ROWS}</p>{plan_part(asked)}'),
        ("Memory of a GPU, by category", memory_part(asked)),
        ("Memory against time", f"<p>{_FRONT}</p>{budgets_part(budgets)}<p>{_counts(budgets)}</p>"),
        ("The best plan, and others", html_table(PLAN_HEADINGS[:2], PLAN_HEADINGS[2:], plans)),
        ("The answer as the command prints it", html_list(line.strip() for line in advice.lines)),
        ("What is assumed", html_list([*advice.assumed, SEEN])),
    ]
    return html_page(f"{asked.question.model.name} on {gpus}", escape(first_line(asked)), with_contents(sections))


def first_line(asked: Sized) -> str:
    """Return the answer in words that need no knowledge of plans."""
    question, plan, estimate = asked.question, asked.plan, asked.estimate
    gpus = "1 GPU" if plan.world_size == 1 else f"{plan.world_size} GPUs"
    model, samples = question.model, estimate.samples_per_s
    speed = f"{samples * model.sequence_length:,.0f} tokens ({samples:,.4g} samples) a second"
    return (
        f"{model.name} ({model.parameter_count / 1e9:.3g} billion parameters) would train on {gpus} at {speed}: a step "
        f"of {plan.global_batch_size} samples takes {seconds_text(estimate.simulated_step_time_s)}, and the fullest "
        f"GPU needs {estimate.memory_bytes / GIB:.1f} GiB. This is an estimate from the model's shapes and published "
        "figures of the GPUs; nothing was measured."
    )


def answer_part(sized: Sized) -> str:
    """Return the plan's speed, memory and cost in tiles, with its description and what is proven about it."""
    question, plan, estimate = sized.question, sized.plan, sized.estimate
    share, price = model_flops_utilization(plan, estimate.simulated_step_time_s), usd_per_billion_tokens(plan, estimate)
    tiles = [
        (seconds_text(estimate.simulated_step_time_s), "a step"),
        (f"{estimate.samples_per_s * question.model.sequence_length:,.0f}", "tokens a second"),
        *([] if share is None else [(f"{share.causal:.1%}", f"of the GPUs' peak ({_counted(share)})")]),
        (f"{estimate.memory_bytes / GIB:.1f} GiB", f"of the fullest GPU, of {question.budget_words}"),
        *([] if price is None else [(f"${price:,.2f}", "a billion tokens")]),
    ]
    return f"{html_tiles(tiles)}<p>{escape(plan_words(plan))}</p><p>{_proof(sized)}</p>"


def _counted(share: Utilization) -> str:
    return "MFU" if share.causal == share.full_square else f"MFU; full-square {share.full_square:.1%}"


def _proof(sized: Sized) -> str:
    words = proof_words(1.0, 0.0 if sized.gap is None else 1 / (1 + sized.gap))
    return f"{words[:1].upper()}{words[1:]}{' (the search was stopped)' if sized.stopped else ''}."


def memory_part(sized: Sized) -> str:
    """Return the memory of each pipeline stage as a picture, and of the fullest GPU as a table."""
    question, plan, estimate = sized.question, sized.plan, sized.estimate
    budget = max(question.budgets.values()) if len(question.budgets) == 1 else None
    terms = memory_rows(question, plan, estimate)
    rows = [((name.replace("_", " "), remedy), (size, share), False) for name, size, share, remedy in terms]
    table = html_table(("in the fullest GPU", "less of it by"), ("GiB", "share"), rows)
    return html_drawings(partial(draw_memory, estimate, budget)) + table


def plan_part(sized: Sized) -> str:
    """Return the picture of a plan."""
    return html_drawings(partial(draw_plan, sized.plan, together=True))


def budgets_part(outcomes: Sequence[Outcome]) -> str:
    """Return the front of step time against memory, for outcomes by budget, of which the last has the full budget."""
    points = [
        Point(each.estimate.memory_bytes, each.estimate.simulated_step_time_s, plan_words(each.plan), not each.stopped)
        if isinstance(each, Sized)
        else None
        for each in outcomes
    ]
    return front_part(points, len(points) - 1, Axis.MEMORY)


def front_part(points: Sequence[Point | None], chosen: int, axis: Axis) -> str:
    """Return the picture of a front, or a sentence if no plan is known."""
    if not any(points):
        return "<p>No plan is known for any of these.</p>"
    return html_drawings(partial(draw_front, points, chosen, axis))


def _counts(outcomes: Sequence[Outcome]) -> str:
    """Return, in words, the budgets for which no plan is known."""
    reasons = [escape(each) for each in outcomes if isinstance(each, str)]
    late = [share for share, each in zip(SHARES, outcomes, strict=True) if each is None]
    shares = ", ".join(f"{share:.0%}" for share in late)
    words = [f"Not computed in time (--html-limit): {shares} of the budget."] if late else []
    return " ".join((*reasons[-1:], *words))
