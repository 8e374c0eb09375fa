"""The front as a table: CSV, HDF5, and a picture."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import version
from io import StringIO
from itertools import pairwise
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from shardwright_formats.display.chart import Axis, linear_axis
from shardwright_formats.display.svg import PALETTE, document, element, line, marker, picture, text
from shardwright_formats.io.hdf5 import Profile, Provenance
from shardwright_formats.io.table import Row, Table
from shardwright_formats.types import NonNegativeCount, NonNegativeNumber
from shardwright_search.rent.front import Answer, Front

_PLOT = 640.0, 360.0
_CHARACTER, _LINE = 7.0, 12.0
"""Width and height of a character, in px; generous."""


class Status(StrEnum):
    """What became of a sub-cluster."""

    FRONT = "front"
    """No other is as fast and as cheap."""
    DOMINATED = "dominated"
    """Another is: by its fastest plan, or by what none of its plans is below."""
    NO_PLAN = "no plan"
    """None fits its memory, or divides its devices."""
    OPEN = "open"
    """The search was stopped before this was known."""


_Text = Annotated[str, Meta(max_length=200)]
_S = Meta(extra={"unit": "s"})
_USD = Meta(extra={"unit": "USD"})


class SubClusterRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sub-cluster."""

    nodes: _Text
    """Number of each node type, as 2xp4d+1xg5."""
    status: Status
    step_s: Annotated[NonNegativeNumber, _S]
    """Closed form of the fastest plan; where it was not looked for, what no plan is below; 0: there is no plan."""
    is_bound: bool
    """Whether the time and the prices are only that."""
    expected_step_s: Annotated[NonNegativeNumber, _S]
    """With checkpoints, lost work and restarts, on average."""
    simulated_step_s: Annotated[NonNegativeNumber, _S]
    """Of the plan of a point of the front, without interruptions; 0: not simulated."""
    usd_per_step: Annotated[NonNegativeNumber, _USD]
    usd_per_hour: Annotated[NonNegativeNumber, _USD]
    checkpoint_steps: NonNegativeCount
    """Steps between checkpoints that are best; 0: nothing is interrupted."""
    hours: Annotated[NonNegativeNumber, Meta(extra={"unit": "h"})]
    """Of the whole training; 0: its length is not given."""
    usd: Annotated[NonNegativeNumber, _USD]
    """Likewise."""
    dominated_by: _Text
    """A point that is as fast and as cheap, the nearest in time."""
    plan: _Text
    """File of the plan, in the same folder."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FrontFile(Profile):
    """front.h5."""

    FORMAT: ClassVar[str] = "shardwright.front"
    VERSION: ClassVar[int] = 1
    provenance: Provenance
    sub_clusters: Table[SubClusterRow]


def rows_of(front: Front, steps: int | None, simulated_s: dict[int, float]) -> tuple[SubClusterRow, ...]:
    """Of every sub-cluster: the front by step time, then all others; `simulated_s`: by number of a point."""
    rest = [number for number, answer in enumerate(front.answers) if not answer.on_front]
    return tuple(_row(front, number, steps, simulated_s.get(number, 0.0)) for number in (*front.points, *rest))


def plan_name(answer: Answer) -> str:
    """The file of its plan."""
    return f"{answer.sub_cluster.name}.json"


def status_of(answer: Answer) -> Status:
    """What became of it."""
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
        step_s=(answer.best.score * 1e-12 if answer.best else answer.bound_s) if known else 0.0,
        is_bound=answer.best is None and known,
        expected_step_s=price.step_s if known else 0.0,
        simulated_step_s=simulated_s,
        usd_per_step=price.usd if known else 0.0,
        usd_per_hour=sub_cluster.usd_per_hour,
        checkpoint_steps=price.checkpoint_steps or 0,
        hours=training * price.step_s / 3600 if known else 0.0,
        usd=training * price.usd if known else 0.0,
        dominated_by="" if by is None or not known else front.answers[by].sub_cluster.name,
        plan=plan_name(answer) if answer.on_front else "",
    )


def csv_of(rows: tuple[SubClusterRow, ...]) -> bytes:
    """With a line of names."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(SubClusterRow.__struct_fields__)
    writer.writerows([_cell(value) for value in msgspec.structs.astuple(row)] for row in rows)
    return out.getvalue().encode()


def _cell(value: object) -> object:
    match value:
        case bool():
            return int(value)
        case Status():
            return value.value
        case _:
            return value


def front_file(rows: tuple[SubClusterRow, ...], notes: str) -> FrontFile:
    """As HDF5; `notes`: what is proven."""
    date = datetime.now(UTC).date().isoformat()
    versions = f"shardwright-search {version('shardwright-search')}"
    provenance = Provenance(date=date, versions=versions, notes=notes)
    return FrontFile(provenance=provenance, sub_clusters=Table.of(SubClusterRow, rows))


def picture_of(rows: tuple[SubClusterRow, ...], chosen: frozenset[str]) -> str:
    """Price against time of every sub-cluster that has a plan, the front joined, chosen points named in bold."""
    (width, height), drawn = _PLOT, [row for row in rows if row.status in (Status.FRONT, Status.DOMINATED)]
    front = [row for row in rows if row.status is Status.FRONT]
    most_s = 1.5 * max(row.expected_step_s for row in front)
    drawn = [row for row in drawn if row.expected_step_s <= most_s]
    x = linear_axis(0, max(row.expected_step_s for row in drawn), 60, width - 150)
    y = linear_axis(0, max(row.usd_per_step for row in drawn), height - 40, 20)
    return document(picture("".join(_drawing(drawn, front, x, y, chosen)), width, height, "price and time of a step"))


def _drawing(
    drawn: list[SubClusterRow], front: list[SubClusterRow], x: Axis, y: Axis, chosen: frozenset[str]
) -> list[str]:
    found = [line(x.start, y.start, x.end, y.start), line(x.start, y.start, x.start, y.end)]
    found += [text(x.at(v), y.start + 16, label, text_anchor="middle") for v, label in x.marks]
    found += [text(x.start - 6, y.at(v) + 4, label, text_anchor="end") for v, label in y.marks]
    found += [text(x.end, y.start + 32, "seconds a step", text_anchor="end"), text(8, 12, "USD a step")]
    places = [(x.at(row.expected_step_s), y.at(row.usd_per_step)) for row in front]
    for (x1, y1), (x2, y2) in pairwise(places):
        found.append(line(x1, y1, x2, y1, PALETTE[0]) + line(x2, y1, x2, y2, PALETTE[0]))
    for row in drawn:
        is_bound = " (a bound)" if row.is_bound else ""
        title = f"{row.nodes}: {row.expected_step_s:.6g} s, {row.usd_per_step:.6g} USD a step{is_bound}"
        size = 4.0 if row.status is Status.FRONT else 2.0
        found.append(
            marker(int(row.status is not Status.FRONT), x.at(row.expected_step_s), y.at(row.usd_per_step), size, title)
        )
    return [
        element(
            "g",
            "".join([*found, *_names({row.nodes: place for row, place in zip(front, places, strict=True)}, chosen)]),
        )
    ]


def _names(places: dict[str, tuple[float, float]], chosen: frozenset[str]) -> Iterator[str]:
    """Beside their points, chosen ones first; one that would lie over another is left to the point's hover text."""
    drawn: list[tuple[float, float, float]] = []
    for nodes in sorted(places, key=lambda nodes: nodes not in chosen):
        x, y = places[nodes][0] + 6, places[nodes][1] - 4
        end = x + _CHARACTER * len(nodes)
        if all(x >= right or end <= left or abs(y - base) >= _LINE for left, right, base in drawn):
            drawn.append((x, end, y))
            yield text(x, y, nodes, font_size=10, font_weight="bold" if nodes in chosen else "normal")
