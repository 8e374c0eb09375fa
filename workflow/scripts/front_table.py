"""A front of step time against price as a Markdown table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from shardwright_formats.display.plan_words import shape_words
from shardwright_formats.io import read_document
from shardwright_formats.types import Plan
from shardwright_search.rent.table import Status

_HEAD = ("nodes", "step, closed form", "simulated", "samples/s", "USD an hour", "USD a thousand steps", "plan")
_RULE = ("---", *["---:"] * 5, "---")
_OTHERS = {
    Status.DOMINATED: "dominated",
    Status.NO_PLAN: "without a plan",
    Status.OPEN: "open, as the search was stopped",
}


def front_markdown(path: Path) -> str:
    """Return a section on a front.csv: its points, the fastest first, and counts of other sub-clusters by status."""
    rows = pd.read_csv(path, keep_default_na=False)
    points = rows[rows["status"] == str(Status.FRONT)].to_dict("records")
    plans = [read_document(path.parent / str(point["plan"]), Plan) for point in points]
    counts = rows["status"].value_counts()
    others = [f"{counts[str(status)]} are {words}" for status, words in _OTHERS.items() if str(status) in counts]
    lines = (
        f"## Step time against price: {path.parent.name}",
        "",
        f"{plans[0].model.name} on sub-clusters of {plans[0].cluster.name}, batch {plans[0].global_batch_size}: "
        + ", ".join([f"{len(points)} of {len(rows)} are on the front", *others]) + ".",
        "",
        *map(markdown_line, (_HEAD, _RULE, *map(_cells, points, plans))),
        "",
    )  # fmt: skip
    return "\n".join(lines)


def markdown_line(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _cells(point: dict[Any, Any], plan: Plan) -> tuple[str, ...]:
    speed = plan.global_batch_size / point["step_s"]
    numbers = f"{speed:.4g}", f"{point['usd_per_hour']:.4g}", f"{1000 * point['usd_per_step']:.4g}"
    times = (f"{point[name]:.4g} s" for name in ("step_s", "simulated_step_s"))
    return point["nodes"], *times, *numbers, shape_words(plan)
