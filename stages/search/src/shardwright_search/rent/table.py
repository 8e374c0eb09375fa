"""The front as a table: CSV, HDF5, and a picture."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from html import escape
from io import StringIO
from itertools import pairwise
from typing import Annotated, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from shardwright.display.chart import ChartAxis, linear_axis
from shardwright.display.html import html_drawing, html_list, html_page, html_table, with_contents
from shardwright.display.plan_words import layers_summary, shape_words
from shardwright.display.svg import PALETTE, SOFT, element, legend, line, marker, picture, text
from shardwright.display.units import seconds_text, usd_text
from shardwright.io.hdf5 import Profile, Provenance
from shardwright.io.table import Row, Table
from shardwright.io.versions import PRODUCT, versions_text
from shardwright.types import NonNegativeNumber, Plan
from shardwright_search.rent.front import Front, SubClusterAnswer

_PLOT = 640.0, 396.0
_CHARACTER, _LINE = 7.0, 12.0
"""Width and height of a character, in px; generous."""


class Status(StrEnum):
    """The outcomes for a sub-cluster."""

    FRONT = "front"
    """No other is as fast and as cheap."""
    DOMINATED = "dominated"
    """Another is at least as fast and as cheap as its fastest plan, or as a bound on its plans."""
    NO_PLAN = "no plan"
    """None fits its memory, or divides its devices."""
    OPEN = "open"
    """The search was stopped before this was known."""


_Text = Annotated[str, Meta(max_length=200)]
_S = Meta(extra={"unit": "s"})
_USD = Meta(extra={"unit": "USD"})


class SubClusterRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row for one sub-cluster."""

    nodes: _Text
    """Number of each node type, as 2xp4d+1xg5."""
    status: Status
    step_s: Annotated[NonNegativeNumber, _S]
    """Closed form of the fastest plan; if that was not searched, a lower bound for all plans; 0: there is no plan."""
    is_bound: bool
    """Whether the time and the prices are only a bound."""
    simulated_step_s: Annotated[NonNegativeNumber, _S]
    """Simulated time of the plan of a point of the front; 0: not simulated."""
    usd_per_step: Annotated[NonNegativeNumber, _USD]
    usd_per_hour: Annotated[NonNegativeNumber, _USD]
    hours: Annotated[NonNegativeNumber, Meta(extra={"unit": "h"})]
    """Duration of the whole training; 0: its length is not given."""
    usd: Annotated[NonNegativeNumber, _USD]
    """Price of the whole training; 0: its length is not given."""
    dominated_by: _Text
    """A point that is as fast and as cheap, the nearest in time."""
    plan: _Text
    """File of the plan, in the same folder."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FrontFile(Profile):
    """The file front.h5."""

    FORMAT: ClassVar[str] = "shardwright.front"
    VERSION: ClassVar[int] = 2
    provenance: Provenance
    sub_clusters: Table[SubClusterRow]


def rows_of(front: Front, steps: int | None, simulated_s: dict[int, float]) -> tuple[SubClusterRow, ...]:
    """Return the rows of all sub-clusters: the front by step time, then all others.

    `simulated_s`: the simulated seconds of a step, by number of a point.
    """
    rest = [number for number, answer in enumerate(front.answers) if not answer.on_front]
    return tuple(_row(front, number, steps, simulated_s.get(number, 0.0)) for number in (*front.points, *rest))


def plan_name(answer: SubClusterAnswer) -> str:
    """Return the name of the file of a sub-cluster's plan."""
    return f"{answer.sub_cluster.name}.json"


def status_of(answer: SubClusterAnswer) -> Status:
    """Return the outcome for a sub-cluster."""
    if answer.on_front:
        return Status.FRONT
    if answer.is_open:
        return Status.OPEN
    return Status.DOMINATED if answer.price.step_s < float("inf") else Status.NO_PLAN


def _row(front: Front, number: int, steps: int | None, simulated_s: float) -> SubClusterRow:
    answer = front.answers[number]
    price, sub_cluster, known = answer.price, answer.sub_cluster, answer.price.step_s < float("inf")
    by, training = front.dominating(number), steps or 0
    return SubClusterRow(
        nodes=sub_cluster.name,
        status=status_of(answer),
        step_s=price.step_s if known else 0.0,
        is_bound=answer.best is None and known,
        simulated_step_s=simulated_s,
        usd_per_step=price.usd if known else 0.0,
        usd_per_hour=sub_cluster.usd_per_hour,
        hours=training * price.step_s / 3600 if known else 0.0,
        usd=training * price.usd if known else 0.0,
        dominated_by="" if by is None or not known else front.answers[by].sub_cluster.name,
        plan=plan_name(answer) if answer.on_front else "",
    )


def csv_of(rows: tuple[SubClusterRow, ...]) -> bytes:
    """Return the rows as CSV, after a line of names."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(SubClusterRow.__struct_fields__)
    values = map(msgspec.structs.astuple, rows)
    writer.writerows([int(value) if isinstance(value, bool) else value for value in row] for row in values)
    return out.getvalue().encode()


def front_file(rows: tuple[SubClusterRow, ...], notes: str) -> FrontFile:
    """Return the rows as an HDF5 file; `notes`: what is proven."""
    versions = versions_text([PRODUCT], on_gpu=False)
    provenance = Provenance(date=datetime.now(UTC).date().isoformat(), versions=versions, notes=notes)
    return FrontFile(provenance=provenance, sub_clusters=Table.from_rows(SubClusterRow, rows))


def draw_front(rows: tuple[SubClusterRow, ...], chosen: frozenset[str], title: str) -> str:
    """Draw price against time of all sub-clusters that have a plan, the front joined, chosen points named in bold."""
    (width, height), front = _PLOT, [row for row in rows if row.status is Status.FRONT]
    max_s = 1.5 * max(row.step_s for row in front)
    with_plan = (row for row in rows if row.status in (Status.FRONT, Status.DOMINATED))
    drawn = [row for row in with_plan if row.step_s <= max_s]
    x = linear_axis(0, max(row.step_s for row in drawn), 60, width - 150)
    y = linear_axis(0, max(row.usd_per_step for row in drawn), height - 40, 56)
    drawing = element("g", "".join(_drawing(drawn, front, x, y, chosen)))
    marks = {4.0: (PALETTE[0], "front: no other is as fast and as cheap"), 2.0: (SOFT, "another is")}
    entries = [(marker(0, 6.5, 6.5, size, colour=colour), words) for size, (colour, words) in marks.items()]
    named, legend_height = legend(entries, 60, height + 4, width - 60)
    heading = text(0, 16, title, "strong")
    return picture(heading + drawing + named, width, height + 4 + legend_height, "price against time of a step")


def _drawing(
    drawn: list[SubClusterRow], front: list[SubClusterRow], x: ChartAxis, y: ChartAxis, chosen: frozenset[str]
) -> Iterator[str]:
    yield line(x.start, y.start, x.end, y.start) + line(x.start, y.start, x.start, y.end)
    yield from (text(x.at(v), y.start + 16, label, text_anchor="middle") for v, label in x.tick_labels)
    yield from (text(x.start - 6, y.at(v) + 4, label, text_anchor="end") for v, label in y.tick_labels)
    yield text(x.end, y.start + 32, "seconds a step", text_anchor="end") + text(8, 44, "USD a step")
    places = {row.nodes: (x.at(row.step_s), y.at(row.usd_per_step)) for row in front}
    for (x1, y1), (x2, y2) in pairwise(places.values()):
        yield line(x1, y1, x2, y1, PALETTE[0]) + line(x2, y1, x2, y2, PALETTE[0])
    for row in drawn:
        is_bound = " (a bound)" if row.is_bound else ""
        title = f"{row.nodes}: {row.step_s:.6g} s, {row.usd_per_step:.6g} USD a step{is_bound}"
        size, colour = (4.0, PALETTE[0]) if row.status is Status.FRONT else (2.0, SOFT)
        yield marker(0, x.at(row.step_s), y.at(row.usd_per_step), size, title, colour)
    yield from _names(places, chosen)


def _names(places: dict[str, tuple[float, float]], chosen: frozenset[str]) -> Iterator[str]:
    """Yield labels next to their points, chosen ones first; labels that would overlap appear only on hover."""
    drawn: list[tuple[float, float, float]] = []
    for nodes in sorted(places, key=lambda nodes: nodes not in chosen):
        x, y = places[nodes][0] + 6, places[nodes][1] - 4
        end = x + _CHARACTER * len(nodes)
        if all(x >= right or end <= left or abs(y - base) >= _LINE for left, right, base in drawn):
            drawn.append((x, end, y))
            yield text(x, y, nodes, font_size=10, font_weight="bold" if nodes in chosen else "normal")


# The front as a self-contained page: a sentence, a picture, and the points.


_WORDS = ("nodes", "plan")
_NUMBERS = ("a step", "USD a step", "USD an hour")
_RULED_OUT = "Sub-clusters that are no point of the front"


class FrontWords(NamedTuple):
    """Words for the page: model, cluster, and what is proven."""

    model: str
    cluster: str
    lines: Sequence[str]
    """What is proven, and the points that limits name, one per line."""


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
