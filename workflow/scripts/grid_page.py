"""The Markdown page and the picture of a grid: speeds by space, fronts of step time against price."""

from collections.abc import Mapping, Sequence
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from shardwright_formats.display.chart import Panel, linear_axis, logarithmic_axis
from shardwright_formats.display.plan_words import shape_words
from shardwright_formats.display.svg import FAINT, SOFT, WIDTH, legend, line, marker, picture, text
from shardwright_formats.io import read_document
from shardwright_formats.types import GIB, Plan
from shardwright_search.rent.table import Status
from shardwright_search.space.request import Space

OURS = str(Space.FULL)
SIZE = ["model", "cluster", "memory_gib", "global_batch_size"]
"""Columns of a grid's cells that tell its sizes apart."""
_HEAD = ("nodes", "step, closed form", "simulated", "samples/s", "USD an hour", "USD a thousand steps", "plan")
_RULE = ("---", *["---:"] * 5, "---")
_STATED = 3
"""Place of the column of times that others state, behind ours."""
_OTHERS = {
    Status.DOMINATED: "dominated",
    Status.NO_PLAN: "without a plan",
    Status.OPEN: "open, as the search was stopped",
}
_TIMES_HEAD = (
    "model",
    "cluster",
    "GiB",
    "batch",
    "published plan",
    "published",
    "in its space",
    "full",
    "published / full",
)
_LEFT, _RIGHT, _TOP, _ROW = 330.0, 20.0, 30.0, 18.0
_TITLE = "Step time of the best plan of each space, over that of the full space"


def grid_markdown(cells: pd.DataFrame) -> str:
    """Return a table of samples per second by space, with the full space's gain over the best other and published."""
    is_measured = cells["measured_step_s"].notna().any()
    step_s = cells["measured_step_s" if is_measured else "predicted_step_s"]
    cells = cells.assign(speed=cells["global_batch_size"] / step_s)
    spaces = list(dict.fromkeys(cells["space"]))
    speeds = cells.pivot_table(index=SIZE, columns="space", values="speed", sort=False, dropna=False)
    published = cells[cells["space"] == OURS].set_index(SIZE)
    head = ["model", "cluster", "GiB", "batch", *spaces, "full / best other", "full / published"]
    if is_measured:
        head[-1] = "full, predicted"
    lines = [_markdown_line(head), _markdown_line(["---", "---", *["---:"] * (len(head) - 2)])]
    wins = []
    for size in dict.fromkeys(map(tuple, cells[SIZE].to_numpy().tolist())):
        speed = {space: speeds.loc[size].get(space) for space in spaces} if size in speeds.index else {}
        others = [value for space, value in speed.items() if space != OURS and pd.notna(value)]
        ours = speed.get(OURS)
        gain = ours / max(others) if others and pd.notna(ours) else None
        wins += [gain] if gain is not None else []
        row = published.loc[size]
        gain_on_published = row["published_step_s"] / row["predicted_step_s"]
        last = f"{row['samples_per_s']:.4g}" if is_measured else _ratio(gain_on_published) + _too_large(row, size[2])
        model, cluster, memory_gib, batch = size
        texts = ["–" if pd.isna(speed.get(space)) else f"{speed[space]:.4g}" for space in spaces]
        lines.append(_markdown_line([model, cluster, gib_text(memory_gib), str(batch), *texts, _ratio(gain), last]))
    origin = "as measured" if is_measured else "as predicted (simulated)"
    words = [
        f"Samples a second, {origin}; – where no plan fits. {len(cells)} cells,"
        f" {int(cells['reason'].notna().sum())} without a plan."
    ]
    if wins:
        words.append(f"The full space's plan is {median(wins):.2f} times as fast as the best other in the median.")
    return "\n".join([" ".join(words), "", *lines, ""])


def _too_large(row: "pd.Series[Any]", memory_gib: float) -> str:
    """Return a note where the published plan needs more than the budget by the same count, else an empty text."""
    over = row["published_memory_bytes"] / GIB - memory_gib
    return f" (it lacks {over:.1f} GiB)" if over > 0 else ""


def gib_text(memory_gib: float) -> str:
    """Return a budget in words: infinite where a plan may use all that each device has."""
    return "all" if memory_gib == inf else f"{memory_gib:g}"


def published_markdown(cells: pd.DataFrame, times: Sequence[Mapping[str, Any]], source: str | None) -> str:
    """Return a section on step times (s) that others state, beside ours for the same batch, cluster and budget."""
    steps_s = cells.set_index([*SIZE, "space"])["predicted_step_s"].to_dict()
    lines = [
        "## Published step times",
        "",
        f"Seconds a step as stated by {source}, beside what this project predicts (simulated) for its best plans.",
        "",
        _markdown_line(_TIMES_HEAD),
        _markdown_line(("---", "---", "---:", "---:", "---", *["---:"] * 4)),
    ]
    for each in times:
        budget = inf if each["memory_gib"] is None else each["memory_gib"]
        size = each["model"], each["cluster"], budget, each["global_batch_size"]
        ours, same_space = steps_s[*size, OURS], steps_s.get((*size, each["space"]))
        words = each["plan"], f"{each['step_s']:.4g} s", _seconds(same_space), _seconds(ours)
        place = each["model"], each["cluster"], gib_text(budget), str(each["global_batch_size"])
        lines.append(_markdown_line((*place, *words, _ratio(each["step_s"] / ours))))
    return "\n".join([*lines, ""])


def _seconds(value: float | None) -> str:
    return "–" if value is None or pd.isna(value) else f"{value:.4g} s"


def _ratio(value: float | None) -> str:
    return "–" if value is None or pd.isna(value) else f"{value:.2f}"


def front_markdown(path: Path, published_step_s: Mapping[str, float], source: str | None) -> str:
    """Return a section on a front.csv: its points, the fastest first, and counts of other sub-clusters by status.

    Times (s) that others state, by nodes, are a column and counted in the text.
    """
    rows = pd.read_csv(path, keep_default_na=False)
    points = rows[rows["status"] == str(Status.FRONT)].to_dict("records")
    plans = [read_document(path.parent / str(point["plan"]), Plan) for point in points]
    counts = rows["status"].value_counts()
    others = [f"{counts[str(status)]} are {words}" for status, words in _OTHERS.items() if str(status) in counts]
    columns = list(zip(_HEAD, _RULE, strict=True))
    table = [_cells(point, plan) for point, plan in zip(points, plans, strict=True)]
    if published_step_s:
        columns.insert(_STATED, ("published", "---:"))
        stated = [_seconds(published_step_s.get(point["nodes"])) for point in points]
        table = [(*row[:_STATED], text, *row[_STATED:]) for row, text in zip(table, stated, strict=True)]
    lines = (
        f"## Step time against price: {path.parent.name}",
        "",
        f"{plans[0].model.name} on sub-clusters of {plans[0].cluster.name}, batch {plans[0].global_batch_size}: "
        + ", ".join([f"{len(points)} of {len(rows)} are on the front", *others]) + "."
        + (f" Published: stated by {source}." if published_step_s else ""),
        "",
        *map(_markdown_line, (*zip(*columns, strict=True), *table)),
        "",
    )  # fmt: skip
    return "\n".join(lines)


def _markdown_line(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _cells(point: dict[Any, Any], plan: Plan) -> tuple[str, ...]:
    speed = plan.global_batch_size / point["step_s"]
    numbers = f"{speed:.4g}", f"{point['usd_per_hour']:.4g}", f"{1000 * point['usd_per_step']:.4g}"
    times = (f"{point[name]:.4g} s" for name in ("step_s", "simulated_step_s"))
    return point["nodes"], *times, *numbers, shape_words(plan)


def series_of(space: str) -> int:
    """Return the number of a space's sign, the same in all pictures of grids."""
    return [*map(str, Space), "even"].index(space)


def draw_grid(cells: pd.DataFrame) -> str:
    """Draw the ratio of predicted step times on a logarithmic axis; a space without a plan has no mark."""
    spaces = [space for space in dict.fromkeys(cells["space"]) if space != OURS]
    steps_s = cells.set_index([*SIZE, "space"])["predicted_step_s"].dropna().to_dict()
    rows = [tuple(size) for *size, space in steps_s if space == OURS]
    ratios = {
        (size, space): steps_s[*size, space] / steps_s[*size, OURS]
        for size, space in product(rows, spaces)
        if (*size, space) in steps_s
    }
    high = max([2.0, *ratios.values()])
    entries = [(marker(series_of(space), 6.5, 6.5, 4.5), space) for space in spaces]
    named, legend_height = legend(entries, _LEFT, _TOP, WIDTH - _LEFT)
    top = _TOP + legend_height + 10
    bottom = top + _ROW * max(1, len(rows))
    x = logarithmic_axis(1.0, high, _LEFT, WIDTH - _RIGHT, "{:g}×".format, base=2)
    empty = linear_axis(0, 1, bottom, top)._replace(tick_labels=())
    drawn = [text(0, 16, _TITLE, "strong"), named, Panel(x, empty).frame("", "step time over the full space's")]
    drawn.append(line(x.at(1), top, x.at(1), bottom, stroke=SOFT))
    for place, size in enumerate(rows):
        y = top + _ROW * (place + 0.5)
        name = _size_words(*size)
        drawn.append(text(_LEFT - 10, y + 4, name, "small", text_anchor="end"))
        drawn.append(line(_LEFT, y, WIDTH - _RIGHT, y, stroke=FAINT))
        for space in (space for space in spaces if (size, space) in ratios):
            title = f"{space}: {ratios[size, space]:.3f} times as long; {name}"
            drawn.append(marker(series_of(space), x.at(ratios[size, space]), y, 4, title))
    return picture("".join(drawn), WIDTH, bottom + 40, "step times of each space over the full space's")


def _size_words(model: str, cluster: str, memory_gib: float, batch: int) -> str:
    return f"{model}, {cluster}, {gib_text(memory_gib)} GiB, batch {batch}"
