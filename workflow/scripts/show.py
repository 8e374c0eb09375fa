"""Outputs about searches and runs: a page, a summary, a table, a picture of a plan.

python workflow/scripts/show.py page --results results --search roomy --run demo --out results/report.html
python workflow/scripts/show.py picture results/plans/tight.json --out docs/images/plan.svg
"""

from pathlib import Path
from typing import Annotated

from report import page
from results import RunOutcome, SearchOutcome, read_picture, read_profile, read_run, read_search
from shardwright.command import POSITIONAL, Command, CommandLine, Options, run, show
from shardwright.display.plan_picture import draw_plan
from shardwright.display.svg import document
from shardwright.io import read_document, write_bytes
from shardwright.types import Plan
from summaries import numbers, search_table, summary


class ResultsOptions(Options, frozen=True, kw_only=True):
    """Print plans with predicted and measured step times, and the losses of runs."""

    results: Path
    """Folder that contains plans/, measurements/, corrections/, runs/, profiles/ and pictures/."""
    search: tuple[str, ...] = ()
    """Names of searches, in the order of the page; may be repeated, like all names."""
    run: tuple[str, ...] = ()
    """Names of runs."""

    def searches(self) -> list[SearchOutcome]:
        """Return the outcomes of the searches."""
        return [read_search(self.results, name) for name in self.search]

    def runs(self) -> list[RunOutcome]:
        """Return the outcomes of the runs."""
        return [read_run(self.results, name) for name in self.run]


class PageOptions(ResultsOptions, frozen=True, kw_only=True):
    """Write one HTML page that opens offline, and print the summary."""

    profile: tuple[str, ...] = ()
    """Names of profiles, MODEL@NODE_TYPE."""
    picture: tuple[Path, ...] = ()
    """Additional pictures to show, SVG, such as rent fronts."""
    out: Path
    """The page to write; its numbers are written next to it, with the ending .json."""


class GridOptions(ResultsOptions, frozen=True, kw_only=True):
    """Write a table with one row for each search."""

    out: Path
    """The CSV to write."""


class PictureOptions(Options, frozen=True, kw_only=True):
    """Draw a plan."""

    plan: Annotated[Path, POSITIONAL]
    """The plan, JSON."""
    out: Path
    """The SVG to write."""


def write_page(options: PageOptions) -> None:
    """Write the report and its numbers, and print the summary."""
    profiles = [read_profile(options.results, name) for name in options.profile]
    searches, runs = options.searches(), options.runs()
    pictures = [read_picture(path) for path in options.picture]
    write_bytes(options.out, page(searches, runs, profiles, pictures).encode())
    write_bytes(options.out.with_suffix(".json"), numbers(searches, runs, profiles))
    show(summary(searches, runs))


def print_summary(options: ResultsOptions) -> None:
    """Print the summary."""
    show(summary(options.searches(), options.runs()))


def write_grid(options: GridOptions) -> None:
    """Write the table of searches."""
    write_bytes(options.out, search_table(options.searches()).encode())


def write_picture(options: PictureOptions) -> None:
    """Write the picture of a plan."""
    plan = read_document(options.plan, Plan)
    write_bytes(options.out, document(draw_plan(plan)).encode())


APP = CommandLine(
    name="show.py",
    purpose="Show what came of searches and runs.",
    commands={
        "page": Command(PageOptions, "show:write_page"),
        "summary": Command(ResultsOptions, "show:print_summary"),
        "grid": Command(GridOptions, "show:write_grid"),
        "picture": Command(PictureOptions, "show:write_picture"),
    },
)

if __name__ == "__main__":
    run(APP)
