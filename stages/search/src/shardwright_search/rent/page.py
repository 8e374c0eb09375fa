"""The front as a self-contained page: a sentence, a picture, and the points."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from shardwright.display.html import html_drawing, html_list, html_page, html_table, with_contents
from shardwright.display.plan_words import layers_summary, shape_words
from shardwright.display.units import seconds_text, usd_text
from shardwright.types import Plan
from shardwright_search.rent.table import Status, SubClusterRow

_WORDS = ("nodes", "plan")
_NUMBERS = ("a step", "USD a step", "USD an hour")
_RULED_OUT = "Sub-clusters that are no point of the front"


class FrontWords(NamedTuple):
    """Words for the page: model, cluster, and what is proven."""

    model: str
    cluster: str
    lines: Sequence[str]
    """What is proven, and the points that limits name, a line each."""


def front_page(rows: Sequence[SubClusterRow], plans: Mapping[str, Plan], drawing: str, words: FrontWords) -> str:
    """Return the page; `plans` by nodes, `drawing` as SVG."""
    points = [row for row in rows if row.status is Status.FRONT]
    others = [row for row in rows if row.status is not Status.FRONT]
    trained = any(row.hours for row in points)
    numbers = (*_NUMBERS, "hours of training", "USD of training") if trained else _NUMBERS
    table = html_table(_WORDS, numbers, [_point(row, plans[row.nodes], trained) for row in points])
    sections = [
        ("Price against time", html_drawing(drawing)),
        ("Points of the front, the fastest first", table),
        ("What is proven", html_list(words.lines)),
    ]
    if others:
        ruled_out = html_table(("nodes", "why"), ("a step",), [_other(row) for row in others])
        sections.append((_RULED_OUT, f"<details><summary>{len(others)} of them</summary>{ruled_out}</details>"))
    title = f"{words.model} on rented nodes of {words.cluster}"
    return html_page(title, escape(first_line(points, words)), with_contents(sections))


def first_line(points: Sequence[SubClusterRow], words: FrontWords) -> str:
    """Return the fastest and the cheapest point of the front, in words that need no knowledge of plans."""
    fastest = min(points, key=lambda row: row.step_s)
    cheapest = min(points, key=lambda row: row.usd_per_step)
    if fastest is cheapest:
        return f"To train {words.model}, rent {fastest.nodes}: nothing else is faster or cheaper ({_costs(fastest)})."
    return (
        f"To train {words.model}, {fastest.nodes} are the fastest nodes to rent ({_costs(fastest)}), and "
        f"{cheapest.nodes} the cheapest ({_costs(cheapest)}); each point between is faster than all that cost less."
    )


def _costs(row: SubClusterRow) -> str:
    return f"{seconds_text(row.step_s)} and {usd_text(row.usd_per_step)} for each step"


def _point(row: SubClusterRow, plan: Plan, trained: bool) -> tuple[Sequence[str], Sequence[str], bool]:
    numbers = [seconds_text(row.step_s), f"{row.usd_per_step:.4g}", f"{row.usd_per_hour:.4g}"]
    numbers += [f"{row.hours:,.1f}", f"{row.usd:,.0f}"] if trained else []
    return (row.nodes, f"{shape_words(plan)}; layers: {layers_summary(plan)}"), numbers, False


def _other(row: SubClusterRow) -> tuple[Sequence[str], Sequence[str], bool]:
    why = f"{row.dominated_by} is as fast and as cheap" if row.dominated_by else str(row.status)
    least = "at least " if row.is_bound else ""
    return (row.nodes, why), (f"{least}{seconds_text(row.step_s)}" if row.step_s else "–",), False
