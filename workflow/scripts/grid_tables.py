"""Tables of a grid: CSV and HDF5 of every cell, a Markdown table of searches and baselines, and a picture.

python workflow/scripts/grid_tables.py tables results/grids/galvatron --folder results/cells
python workflow/scripts/grid_tables.py plans results/grids/g/answers/m@c.json --folder results/cells --out plans.json
"""

from collections.abc import Iterator
from math import inf
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import h5py
import msgspec
import pandas as pd

from grid_html import grid_html
from grid_page import OURS, SIZE, draw_grid, front_markdown, grid_markdown, published_markdown
from shardwright_formats.command import POSITIONAL, Command, CommandLine, Options, run
from shardwright_formats.display.plan_words import layers_summary
from shardwright_formats.display.svg import document
from shardwright_formats.io import BadInput, atomic_path, read_document, read_object, write_bytes, write_document
from shardwright_formats.types import GIB, Measurement, Plan, Plans, Prediction
from shardwright_search.space.request import Grid, GridAnswers

_TEXTS = ["model", "cluster", "space", "layers", "plan_sha256", "reason"]


class TablesOptions(Options, frozen=True, kw_only=True):
    """Write NAME.csv, NAME.h5, NAME.md, NAME.svg and NAME.html of a grid. Times are in s, memory is in bytes."""

    name: Annotated[Path, POSITIONAL]
    """Folder of the grid's cells and answers; the tables are written next to it."""
    folder: Path
    """Folder of the plans."""
    measured: tuple[Path, ...] = ()
    """Measurements of the plans."""
    front: tuple[Path, ...] = ()
    """Tables of fronts, front.csv, each with its plans in the same folder."""
    published_times: Path | None = None
    """Step times that others state (JSON): of cells, and of fronts by nodes."""


class PlansOptions(Options, frozen=True, kw_only=True):
    """Write the different plans of a list of answers in one file, for the command that measures them."""

    answers: Annotated[Path, POSITIONAL]
    """List of answers (shardwright.grid_answers, JSON)."""
    folder: Path
    """Folder of the plans."""
    even: Path | None = None
    """Folder of even plans: each is measured in turns with the full space's of its batch and the largest budget."""
    out: Path
    """The plans to write (shardwright.plans, JSON)."""


def write_tables(options: TablesOptions) -> None:
    """Write the five files of a grid's results."""
    times = {
        _decision(plan.plan): median(plan.step_times_s)
        for path in options.measured
        for plan in read_document(path, Measurement).plans
    }
    cells = _typed(pd.DataFrame(_rows(options.name, options.folder, times)))
    out = {end: options.name.with_name(f"{options.name.name}.{end}") for end in ("csv", "h5", "md", "svg", "html")}
    write_bytes(out["csv"], cells.to_csv(index=False).encode())
    _write_hdf5(out["h5"], cells)
    sections, drawing = list(_sections(cells, options)), draw_grid(cells)
    write_bytes(out["md"], "\n".join(sections).encode())
    write_bytes(out["svg"], document(drawing).encode())
    write_bytes(out["html"], grid_html(options.name.name, cells, sections, drawing, options.front).encode())


def _sections(cells: pd.DataFrame, options: TablesOptions) -> Iterator[str]:
    """Yield the sections of the page."""
    stated = {} if options.published_times is None else read_object(options.published_times)
    source, cells_s, fronts_s = (stated.get(name) for name in ("source", "cells", "fronts"))
    yield grid_markdown(cells)
    if cells_s:
        yield published_markdown(cells, cells_s, source)
    for path in options.front:
        yield front_markdown(path, (fronts_s or {}).get(path.parent.name, {}), source)


def write_plans(options: PlansOptions) -> None:
    """Write the different plans of a list of answers, one for each decision."""
    cells = read_document(options.answers, GridAnswers).cells
    searched = [read_document(options.folder / f"{cell.key}.json", Plan) for cell in cells if cell.reason is None]
    even = [read_document(path, Plan) for path in sorted(options.even.glob("b*[0-9].json"))] if options.even else []
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
    """Return the hash that plans of several cells share if they differ in the cell's name alone."""
    return msgspec.structs.replace(plan, name="plan").sha256


def _rows(name: Path, folder: Path, times: dict[str, float]) -> Iterator[dict[str, Any]]:
    for asked in sorted((name / "asked").glob("*.json")):
        pair = asked.stem
        answers = read_document(name / "answers" / asked.name, GridAnswers).cells
        for search, answer in zip(read_document(asked, Grid).searches, answers, strict=True):
            model, _, cluster = pair.partition("@")
            size, _, _ = search.name.rpartition("-")
            published = name / "published" / pair / f"{size}.json"
            even = name / "even" / pair / f"b{search.global_batch_size}.json"
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
    return f"does not fit: it lacks {over:.0f} bytes" if over > 0 else None


def _figures(path: Path, reason: str | None, times: dict[str, float]) -> dict[str, Any]:
    """Return the figures of the plan of a cell; without a plan, the reason why there is none."""
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
    """Return the cells with numbers in all columns but texts; NaN where there is none, even in a whole column."""
    numbers = cells.columns.difference(["global_batch_size", *_TEXTS])
    return cells.astype(dict.fromkeys(numbers, float))


def _write_hdf5(path: Path, cells: pd.DataFrame) -> None:
    """Write one dataset for each column, in the order of the rows; absent values are NaN, or an empty text."""
    with atomic_path(path) as temporary, h5py.File(temporary, "w") as file:
        for column in cells:
            if column in _TEXTS:
                texts = cells[column].fillna("").astype(str).to_list()
                file.create_dataset(str(column), data=texts, dtype=h5py.string_dtype())
            else:
                file.create_dataset(str(column), data=cells[column].to_numpy())


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
