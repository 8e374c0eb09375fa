"""Tables of a grid: CSV and HDF5 of every cell, a Markdown table of searches and baselines, and a picture.

python workflow/scripts/grid_tables.py tables results/grids/galvatron --folder results/cells
python workflow/scripts/grid_tables.py plans results/grids/g/answers/m@c.json --folder results/cells --out plans.json
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import h5py
import msgspec
import pandas as pd

from front_table import front_markdown, markdown_line
from grid_picture import draw_grid
from shardwright_formats.command import POSITIONAL, Command, CommandLine, Options, run
from shardwright_formats.display.plan_words import layers_summary
from shardwright_formats.display.svg import document
from shardwright_formats.io import BadInput, atomic_path, read_document, write_bytes, write_document
from shardwright_formats.types import GIB, Measurement, Plan, Plans, Prediction
from shardwright_search.space.request import Grid, GridAnswers, Space

_OURS = str(Space.FULL)
_TEXTS = ["model", "cluster", "space", "layers", "plan_sha256", "reason"]
_SIZE = ["model", "cluster", "memory_gib", "global_batch_size"]


class TablesOptions(Options, frozen=True, kw_only=True):
    """Write NAME.csv, NAME.h5, NAME.md and NAME.svg of a grid. Times are in s, memory is in bytes."""

    name: Annotated[Path, POSITIONAL]
    """Folder of the grid's cells and answers; the tables are written next to it."""
    folder: Path
    """Folder of the plans."""
    measured: tuple[Path, ...] = ()
    """Measurements of the plans."""
    front: tuple[Path, ...] = ()
    """Tables of fronts, front.csv, each with its plans in the same folder."""


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
    """Write the four files of a grid's results."""
    times = {
        _decision(plan.plan): median(plan.step_times_s)
        for path in options.measured
        for plan in read_document(path, Measurement).plans
    }
    cells = _typed(pd.DataFrame(_rows(options.name, options.folder, times)))
    out = {end: options.name.with_name(f"{options.name.name}.{end}") for end in ("csv", "h5", "md", "svg")}
    write_bytes(out["csv"], cells.to_csv(index=False).encode())
    _write_hdf5(out["h5"], cells)
    write_bytes(out["md"], "\n".join([_markdown(cells), *map(front_markdown, options.front)]).encode())
    write_bytes(out["svg"], document(draw_grid(cells, _SIZE, _OURS)).encode())


def write_plans(options: PlansOptions) -> None:
    """Write the different plans of a list of answers, one for each decision."""
    cells = read_document(options.answers, GridAnswers).cells
    found = [read_document(options.folder / f"{cell.key}.json", Plan) for cell in cells if cell.reason is None]
    even = [read_document(path, Plan) for path in sorted(options.even.glob("b*[0-9].json"))] if options.even else []
    if not found and not even:
        raise BadInput(options.answers, "no cell has a plan", "allow more memory")
    plans: dict[str, Plan] = {}
    for plan in (*found, *even):
        plans.setdefault(_decision(plan), plan)
    places = {decision: place for place, decision in enumerate(plans)}
    ours = {plan.global_batch_size: plan for plan in found if plan.name.endswith(f"-{_OURS}")}
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
            of = dict(zip(_SIZE, (model, cluster, search.memory_gib, search.global_batch_size), strict=True))
            yield {
                **of, "space": str(search.space),
                **_found(folder / f"{answer.key}.json", answer.reason, times),
                **_published(published if search.space == _OURS else None),
            }  # fmt: skip
            if search.space == _OURS and even.exists():
                reason = _lack(even, search.memory_gib)
                yield {**of, "space": "even", **_found(even, reason, times), **_published(None)}


def _lack(path: Path, memory_gib: object) -> str | None:
    """Return why a plan that was not searched for a budget does not fit it, or None."""
    held = read_document(path.with_suffix(".prediction.json"), Prediction).estimate.memory_bytes
    over = held - memory_gib * GIB if isinstance(memory_gib, float) else 0
    return f"does not fit: it lacks {over:.0f} bytes" if over > 0 else None


def _found(path: Path, reason: str | None, times: dict[str, float]) -> dict[str, Any]:
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


def _markdown(cells: pd.DataFrame) -> str:
    """Return a table of samples per second by space, with the full space's gain over the best other and published."""
    is_measured = cells["measured_step_s"].notna().any()
    cells = cells.assign(speed=_speed(cells, measured=is_measured))
    spaces = list(dict.fromkeys(cells["space"]))
    speeds = cells.pivot_table(index=_SIZE, columns="space", values="speed", sort=False, dropna=False)
    published = cells[cells["space"] == _OURS].set_index(_SIZE)
    head = ["model", "cluster", "GiB", "batch", *spaces, "full / best other", "full / published"]
    if is_measured:
        head[-1] = "full, predicted"
    lines = [markdown_line(head), markdown_line(["---", "---", *["---:"] * (len(head) - 2)])]
    wins = []
    for size in dict.fromkeys(map(tuple, cells[_SIZE].to_numpy().tolist())):
        found = {space: speeds.loc[size].get(space) for space in spaces} if size in speeds.index else {}
        others = [speed for space, speed in found.items() if space != _OURS and pd.notna(speed)]
        ours = found.get(_OURS)
        gain = ours / max(others) if others and pd.notna(ours) else None
        wins += [gain] if gain is not None else []
        row = published.loc[size]
        beside = row["published_step_s"] / row["predicted_step_s"]
        last = f"{row['samples_per_s']:.4g}" if is_measured else _ratio(beside) + _too_large(row, size[2])
        model, cluster, memory_gib, batch = size
        texts = ["–" if pd.isna(found.get(space)) else f"{found[space]:.4g}" for space in spaces]
        lines.append(markdown_line([model, cluster, f"{memory_gib:g}", str(batch), *texts, _ratio(gain), last]))
    what = "as measured" if is_measured else "as predicted (simulated)"
    words = [
        f"Samples a second, {what}; – where no plan fits. {len(cells)} cells,"
        f" {int(cells['reason'].notna().sum())} without a plan."
    ]
    if wins:
        words.append(f"The full space's plan is {median(wins):.2f} times as fast as the best other in the median.")
    return "\n".join([" ".join(words), "", *lines, ""])


def _speed(cells: pd.DataFrame, *, measured: bool) -> "pd.Series[float]":
    return cells["global_batch_size"] / cells["measured_step_s" if measured else "predicted_step_s"]


def _too_large(row: "pd.Series[Any]", memory_gib: float) -> str:
    """Return a note where the published plan needs more than the budget by the same count, else an empty text."""
    over = row["published_memory_bytes"] / GIB - memory_gib
    return f" (it lacks {over:.1f} GiB)" if over > 0 else ""


def _ratio(value: float | None) -> str:
    return "–" if value is None or pd.isna(value) else f"{value:.2f}"


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
