"""The report: what was found, on what, and what is not there."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module

from gpu_kit.rows import Results, Values, outcome
from gpu_kit.setting import NULL, REHEARSAL
from gpu_kit.steps import Step


def page_of(results: Results, steps: Mapping[str, Step]) -> str:
    """Markdown: a section for each step, then the rows that failed and those that were not reached."""
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


def table(columns: str, rows: list[list[object]]) -> list[str]:
    """Lines of a table; columns are separated by bars."""
    names = columns.split("|")
    head = [f"| {' | '.join(name.strip() for name in names)} |", f"|{' --- |' * len(names)}"]
    return [*head, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def ratio(value: float | None, other: float | None) -> str:
    """The ratio of two numbers, or a dash where one is not known."""
    return f"{value / other:.2f}" if value is not None and other else "-"


def scaled(value: float | None, unit: float, form: str = ".2f") -> str:
    """A number in a unit, or a dash where it is not known."""
    return "-" if value is None else f"{value / unit:{form}}"
