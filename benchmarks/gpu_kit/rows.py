"""Rows of results: each is tried separately, and written as soon as it is known."""

import gc
import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from gpu_kit.setting import NULL, REHEARSAL, Setting, today
from gpu_kit.steps import Step

from shardwright.io import write_bytes

Values = dict[str, Any]
_STOPPED = (75, 130, 143)
"""Exit codes of processes that were asked to end."""


class Row(NamedTuple):
    """A piece of work with a result of its own."""

    name: str
    do: Callable[[], Values]


class RowTimedOut(Exception):
    """A row took longer than the time that its step had left."""


class Results:
    """The results so far, by step and row, in a file that is rewritten after every row."""

    def __init__(self, path: Path, setting: Setting, keep_failed: bool) -> None:
        """Take over rows of a file from the same device, versions and sources; failed ones only if `keep_failed`."""
        self._path, self._identity = path, setting.identity()
        self.steps: dict[str, dict[str, Any]] = {}
        before = json.loads(path.read_bytes()) if path.is_file() else {}
        # A commit may change only other files, which affects no result: it is noted, but not compared.
        if before and all(before.get(key) == value for key, value in self._identity.items() if key != "commit"):
            for name, step in before["steps"].items():
                kept = {row: found for row, found in step["rows"].items() if keep_failed or "error" not in found}
                self.steps[name] = step | {"rows": kept, "not_reached": []}

    def has(self, step: str, row: str) -> bool:
        """Return whether a row has a result or an error."""
        return row in self.steps.get(step, {}).get("rows", {})

    def rows(self, step: str) -> dict[str, Values]:
        """Return those rows of a step that succeeded."""
        return {name: row for name, row in self.steps.get(step, {}).get("rows", {}).items() if "error" not in row}

    def add(self, step: str, title: str, row: str, found: Values) -> None:
        """Add a row, and write the file."""
        entry = self.steps.setdefault(step, {"title": title, "seconds": 0.0, "rows": {}, "not_reached": []})
        entry["rows"][row] = found
        entry["seconds"] = round(entry["seconds"] + found["row_s"], 2)
        self.write()

    def leave(self, step: str, title: str, rows: list[str]) -> None:
        """Note the rows of a step for which there was no time, and write the file."""
        entry = self.steps.setdefault(step, {"title": title, "seconds": 0.0, "rows": {}, "not_reached": []})
        entry["not_reached"] = rows
        self.write()

    @property
    def failed(self) -> list[str]:
        """Return step, row and error of each row that failed."""
        return [
            f"{step}: {row}: {found['error']}"
            for step, entry in self.steps.items()
            for row, found in entry["rows"].items()
            if "error" in found
        ]

    @property
    def not_reached(self) -> list[str]:
        """Return step and row of each row for which there was no time."""
        return [f"{step}: {row}" for step, entry in self.steps.items() for row in entry["not_reached"]]

    def whole(self) -> Values:
        """Return the whole content of the file."""
        return {**self._identity, "date": today(), "steps": dict(sorted(self.steps.items()))}

    def write(self) -> None:
        """Write the file completely or not at all."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(self._path, (json.dumps(in_json(self.whole()), indent=1, allow_nan=False) + "\n").encode())


def tried(row: Row, setting: Setting, left_s: float) -> Values:
    """Return the result or the error of a row, with the seconds that it took."""
    began = time.monotonic()
    found = outcome(row.do, left_s)
    gc.collect()
    if setting.on_cuda:
        setting.give_memory_back()
    return {**found, "row_s": round(time.monotonic() - began, 3)}


def outcome(do: Callable[[], Values], left_s: float = math.inf) -> Values:
    """Return the result of a call, or its error and where it was raised."""
    try:
        with ended_after(left_s):
            return do()
    except SystemExit as ended:
        if ended.code in _STOPPED:
            raise
        # Commands of this project end in this way if they fail.
        return {"error": f"it ended with {ended.code}"}
    # The only place of the kit that catches everything: a device is available for minutes, and a fault in one row (an
    # operator that a version does not have, memory, a wrong assumption of the kit) must not cost the others.
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", "at": _place(error)}


def _place(error: BaseException) -> str:
    """Return the innermost three lines of this project's code through which an error passed."""
    places, trace = [], error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if "shardwright" in name or "gpu_kit" in name:
            places.append(f"{Path(name).parent.name}/{Path(name).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " < ".join(reversed(places[-3:]))


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Raise RowTimedOut if the `with` block takes longer, as soon as Python's interpreter handles the signal."""
    if math.isinf(seconds):
        yield
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        raise RowTimedOut(f"it took longer than the {seconds:.0f} s that its step had left")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def in_json(value: Any) -> Any:  # noqa: ANN401
    """Return a value that JSON can represent: numbers that are not finite become text."""
    if isinstance(value, Mapping):
        return {str(key): in_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [in_json(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# The report: the results, the device, and the rows that are missing.


def page_of(results: Results, steps: Mapping[str, Step]) -> str:
    """Return the report in Markdown: a section for each step, then the rows that failed or were not reached."""
    whole = results.whole()
    no_result = whole["what"] in (REHEARSAL, NULL)
    title = f"# {whole['what'].capitalize()}: no result" if no_result else f"# {whole['devices']} x {whole['device']}"
    page = [title, "", f"{whole['versions']}; {whole['date']}; commit {whole['commit']}.", ""]
    for name, entry in whole["steps"].items():
        said = f" ({whole['what']})" if no_result else ""
        page += [f"## {name}: {entry['title']}{said}", ""]
        told = outcome(partial(_told, steps[name], results.rows(name)))
        page += [*told.get("lines", [f"These rows cannot be told: {told.get('error')} ({told.get('at')})."]), ""]
        page += [f"Took {entry['seconds']:.0f} s.", ""]
    page += ["FAILED ROWS:", *(f"- {row}" for row in results.failed or ["none"]), ""]
    page += ["NOT REACHED:", *(f"- {row}" for row in results.not_reached or ["none"]), ""]
    return "\n".join(page)


def _told(step: Step, rows: Values) -> Values:
    return {"lines": import_module(f"gpu_kit.{step.module}").lines(rows) if rows else ["Nothing."]}


def ratio(value: float | None, other: float | None) -> str:
    """Return the ratio of two numbers as text, or a dash if one is not known."""
    return f"{value / other:.2f}" if value is not None and other else "-"


def scaled(value: float | None, unit: float, form: str = ".2f") -> str:
    """Return a number in a unit as text, or a dash if it is not known."""
    return "-" if value is None else f"{value / unit:{form}}"
