"""The table of a grid: its cells as CSV, and a page of speeds by space, published times and fronts in Markdown.

python workflow/scripts/grid_tables.py tables results/grids/galvatron --folder results/cells
python workflow/scripts/grid_tables.py plans results/grids/g/answers/m@c.json --folder results/cells --out plans.json
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import pandas as pd

from shardwright.command import POSITIONAL, Command, CommandLine, Options, run
from shardwright.display.html import Section
from shardwright.display.plan_words import layers_summary, shape_words
from shardwright.io import BadInput, read_document, read_object, write_bytes, write_document
from shardwright.types import GIB, Measurement, Plan, Plans, Prediction
from shardwright_search.rent.table import Status
from shardwright_search.space.request import Grid, GridAnswers, Space

OURS = str(Space.FULL)
SIZE = ["model", "cluster", "memory_gib", "global_batch_size"]
"""Columns that distinguish the sizes of a grid's cells."""
_HEAD = ("step, closed form", "simulated", "samples/s", "USD an hour", "USD a thousand steps")
_STATED = 2
"""Index, among the columns with numbers, of the column with published times; it follows the column with ours."""
_OTHERS = {
    Status.DOMINATED: "dominated",
    Status.NO_PLAN: "without a plan",
    Status.OPEN: "open, as the search was stopped",
}
_TIMES_HEAD = ("GiB", "batch", "published", "in its space", "full", "published / full")
_TEXTS = ["model", "cluster", "space", "layers", "plan_sha256", "reason"]


class TablesOptions(Options, frozen=True, kw_only=True):
    """Write NAME.csv and NAME.md of a grid. Times are in seconds, memory is in bytes."""

    name: Annotated[Path, POSITIONAL]
    """Folder of the grid's cells and answers; the tables are written next to it."""
    folder: Path
    """Folder of the plans."""
    measured: tuple[Path, ...] = ()
    """Measurements of the plans."""
    front: tuple[Path, ...] = ()
    """Tables of fronts (front.csv), each in the folder of its plans."""
    published_times: Path | None = None
    """Published step times (JSON): for cells, and for fronts by nodes."""


class PlansOptions(Options, frozen=True, kw_only=True):
    """Write the different plans of a list of answers into one file, for the command that measures them."""

    answers: Annotated[Path, POSITIONAL]
    """List of answers (shardwright.grid_answers, JSON)."""
    folder: Path
    """Folder of the plans."""
    given: Path
    """Folder of plans that were not searched. Steps of an even plan alternate with steps of the full space's plan for
    the same batch and the largest budget."""
    out: Path
    """The plans to write (shardwright.plans, JSON)."""


def write_tables(options: TablesOptions) -> None:
    """Write both files of a grid's results."""
    times = {
        _decision(plan.plan): median(plan.step_times_s)
        for path in options.measured
        for plan in read_document(path, Measurement).plans
    }
    cells = _typed(pd.DataFrame(_rows(options.name, options.folder, times)))
    sections = _sections(cells, options)
    write_bytes(options.name.with_name(f"{options.name.name}.csv"), cells.to_csv(index=False).encode())
    page = "\n".join(section.markdown for section in sections)
    write_bytes(options.name.with_name(f"{options.name.name}.md"), page.encode())


def _sections(cells: pd.DataFrame, options: TablesOptions) -> Iterator[Section]:
    """Yield the sections of the page."""
    stated = {} if options.published_times is None else read_object(options.published_times)
    source, cells_s, fronts_s = (stated.get(name) for name in ("source", "cells", "fronts"))
    yield grid_section(cells)
    if cells_s:
        yield published_section(cells, cells_s, source)
    for path in options.front:
        yield front_section(path, (fronts_s or {}).get(path.parent.name, {}), source)


def write_plans(options: PlansOptions) -> None:
    """Write the different plans of a list of answers, one for each decision."""
    cells = read_document(options.answers, GridAnswers).cells
    searched = [read_document(options.folder / f"{cell.key}.json", Plan) for cell in cells if cell.reason is None]
    even = [read_document(path, Plan) for path in sorted(options.given.glob("even-b*[0-9].json"))]
    if not searched and not even:
        raise BadInput(options.answers, "no cell has a plan", "allow more memory")
    plans: dict[str, Plan] = {}
    for plan in (*searched, *even):
        plans.setdefault(_decision(plan), plan)
    places = {decision: place for place, decision in enumerate(plans)}
    ours = {plan.global_batch_size: plan for plan in searched if plan.name.endswith(f"-{OURS}")}
    pairs = ((ours[plan.global_batch_size], plan) for plan in even if plan.global_batch_size in ours)
    turns = ((places[_decision(one)], places[_decision(other)]) for one, other in pairs)
    in_turns = tuple(pair for pair in turns if pair[0] != pair[1])
    write_document(options.out, Plans(plans=tuple(plans.values()), in_turns=in_turns))


def _decision(plan: Plan) -> str:
    """Return the hash of a plan without its name: cells with equal plans have the same hash."""
    return msgspec.structs.replace(plan, name="plan").sha256


def _rows(name: Path, folder: Path, times: dict[str, float]) -> Iterator[dict[str, Any]]:
    for asked in sorted((name / "asked").glob("*.json")):
        pair = asked.stem
        answers = read_document(name / "answers" / asked.name, GridAnswers).cells
        for search, answer in zip(read_document(asked, Grid).searches, answers, strict=True):
            model, _, cluster = pair.partition("@")
            size, _, _ = search.name.rpartition("-")
            published = name / "plans" / pair / f"{size}.json"
            even = name / "plans" / pair / f"even-b{search.global_batch_size}.json"
            budget = inf if search.memory_gib is None else search.memory_gib
            place = dict(zip(SIZE, (model, cluster, budget, search.global_batch_size), strict=True))
            yield {
                **place, "space": str(search.space),
                **_figures(folder / f"{answer.key}.json", answer.reason, times),
                **_published(published if search.space == OURS else None),
            }  # fmt: skip
            if search.space == OURS and even.exists():
                reason = _lack(even, search.memory_gib)
                yield {**place, "space": "even", **_figures(even, reason, times), **_published(None)}


def _lack(path: Path, memory_gib: object) -> str | None:
    """Return why a plan that was not searched for a budget does not fit it, or None."""
    held = read_document(path.with_suffix(".prediction.json"), Prediction).estimate.memory_bytes
    over = held - memory_gib * GIB if isinstance(memory_gib, float) else 0
    return f"does not fit: it exceeds the budget by {over:.0f} bytes" if over > 0 else None


def _figures(path: Path, reason: str | None, times: dict[str, float]) -> dict[str, Any]:
    """Return the figures of a cell's plan; without a plan, the reason why there is none."""
    names = (
        "predicted_step_s", "samples_per_s", "predicted_memory_bytes", "gap", "measured_step_s", "pp_size",
        "num_microbatches", "layers", "plan_sha256", "reason",
    )  # fmt: skip
    if reason is not None:
        return dict.fromkeys(names) | {"reason": reason}
    plan, prediction = read_document(path, Plan), read_document(path.with_suffix(".prediction.json"), Prediction)
    estimate = prediction.estimate
    values = (
        estimate.simulated_step_time_s, estimate.samples_per_s, estimate.memory_bytes,
        None if prediction.proof is None else prediction.proof.gap, times.get(_decision(plan)), len(plan.stages),
        plan.num_microbatches, layers_summary(plan), plan.sha256, None,
    )  # fmt: skip
    return dict(zip(names, values, strict=True))


def _published(path: Path | None) -> dict[str, Any]:
    if path is None or not path.exists():
        return {"published_step_s": None, "published_memory_bytes": None}
    estimate = read_document(path.with_suffix(".prediction.json"), Prediction).estimate
    return {"published_step_s": estimate.simulated_step_time_s, "published_memory_bytes": estimate.memory_bytes}


def _typed(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells with floats in all columns except those with text; missing numbers are NaN."""
    numbers = cells.columns.difference(["global_batch_size", *_TEXTS])
    return cells.astype(dict.fromkeys(numbers, float))


def grid_section(cells: pd.DataFrame) -> Section:
    """Return a table of samples per second by space, with the gain of `full` over the best other and the published."""
    is_measured = cells["measured_step_s"].notna().any()
    step_s = cells["measured_step_s" if is_measured else "predicted_step_s"]
    cells = cells.assign(speed=cells["global_batch_size"] / step_s)
    spaces = list(dict.fromkeys(cells["space"]))
    speeds = cells.pivot_table(index=SIZE, columns="space", values="speed", sort=False, dropna=False)
    published = cells[cells["space"] == OURS].set_index(SIZE)
    head = ["GiB", "batch", *spaces, "full / best other", "full, predicted" if is_measured else "full / published"]
    rows, wins = [], []
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
        rows.append([model, cluster, gib_text(memory_gib), str(batch), *texts, _ratio(gain), last])
    origin = "as measured" if is_measured else "as predicted (simulated)"
    words = [
        f"Samples a second, {origin}; – where no plan fits. {len(cells)} cells,"
        f" {int(cells['reason'].notna().sum())} without a plan."
    ]
    if wins:
        words.append(f"The full space's plan is {median(wins):.2f} times as fast as the best other in the median.")
    return Section("", [" ".join(words)], ("model", "cluster"), head, rows)


def _too_large(row: "pd.Series[Any]", memory_gib: float) -> str:
    """Return a note if the published plan exceeds the budget by our memory estimate, else an empty string."""
    over = row["published_memory_bytes"] / GIB - memory_gib
    return f" (over the budget by {over:.1f} GiB)" if over > 0 else ""


def gib_text(memory_gib: float) -> str:
    """Return a budget in words; infinity: all memory of each device."""
    return "all" if memory_gib == inf else f"{memory_gib:g}"


def published_section(cells: pd.DataFrame, times: Sequence[Mapping[str, Any]], source: str | None) -> Section:
    """Return a section on published step times (s), next to ours for the same batch, cluster and budget."""
    steps_s = cells.set_index([*SIZE, "space"])["predicted_step_s"].to_dict()
    words = f"Seconds a step as stated by {source}, beside what this project predicts (simulated) for its best plans."
    rows = []
    for each in times:
        budget = inf if each["memory_gib"] is None else each["memory_gib"]
        size = each["model"], each["cluster"], budget, each["global_batch_size"]
        ours, same_space = steps_s[*size, OURS], steps_s.get((*size, each["space"]))
        place = each["model"], each["cluster"], each["plan"], gib_text(budget), str(each["global_batch_size"])
        seconds = f"{each['step_s']:.4g} s", _seconds(same_space), _seconds(ours)
        rows.append((*place, *seconds, _ratio(each["step_s"] / ours)))
    return Section("Published step times", [words], ("model", "cluster", "published plan"), _TIMES_HEAD, rows)


def _seconds(value: float | None) -> str:
    return "–" if value is None or pd.isna(value) else f"{value:.4g} s"


def _ratio(value: float | None) -> str:
    return "–" if value is None or pd.isna(value) else f"{value:.2f}"


def front_section(path: Path, published_step_s: Mapping[str, float], source: str | None) -> Section:
    """Return a section on a front.csv: its points, the fastest first, and counts of other sub-clusters by status.

    Published times in seconds, by nodes, get a column, and their number is in the text.
    """
    rows = pd.read_csv(path, keep_default_na=False)
    points = rows[rows["status"] == str(Status.FRONT)].to_dict("records")
    plans = [read_document(path.parent / str(point["plan"]), Plan) for point in points]
    counts = rows["status"].value_counts()
    others = [f"{counts[str(status)]} are {words}" for status, words in _OTHERS.items() if str(status) in counts]
    numbers, table = list(_HEAD), [_numbers(point, plan) for point, plan in zip(points, plans, strict=True)]
    if published_step_s:
        numbers.insert(_STATED, "published")
        stated = [_seconds(published_step_s.get(point["nodes"])) for point in points]
        table = [(*row[:_STATED], text, *row[_STATED:]) for row, text in zip(table, stated, strict=True)]
    words = (
        f"{plans[0].model.name} on sub-clusters of {plans[0].cluster.name}, batch {plans[0].global_batch_size}: "
        + ", ".join([f"{len(points)} of {len(rows)} are on the front", *others]) + "."
        + (f" Published: stated by {source}." if published_step_s else "")
    )  # fmt: skip
    named = [(point["nodes"], shape_words(plan)) for point, plan in zip(points, plans, strict=True)]
    cells = [(*names, *row) for names, row in zip(named, table, strict=True)]
    return Section(f"Step time against price: {path.parent.name}", [words], ("nodes", "plan"), numbers, cells)


def _numbers(point: dict[Any, Any], plan: Plan) -> tuple[str, ...]:
    speed = plan.global_batch_size / point["step_s"]
    times = (f"{point[name]:.4g} s" for name in ("step_s", "simulated_step_s"))
    return *times, f"{speed:.4g}", f"{point['usd_per_hour']:.4g}", f"{1000 * point['usd_per_step']:.4g}"


APP = CommandLine(
    name="grid_tables.py",
    purpose="Show what came of a grid.",
    commands={
        "tables": Command(TablesOptions, "grid_tables:write_tables"),
        "plans": Command(PlansOptions, "grid_tables:write_plans"),
    },
)

if __name__ == "__main__":
    run(APP)
