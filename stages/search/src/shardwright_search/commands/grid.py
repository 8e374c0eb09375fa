"""`shardwright-search grid`: many searches of one model on one cluster, in one process."""

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import msgspec

from shardwright_formats.command import show
from shardwright_formats.io import (
    BadInput,
    check_writable,
    read_bytes,
    read_document,
    sha256_of_file,
    sha256_of_value,
    write_bytes,
    write_document,
)
from shardwright_formats.types import Cluster, Model
from shardwright_search.commands.prediction import (
    Inputs,
    prediction_of_searched,
    prediction_path,
    progress,
    read_inputs,
    written,
)
from shardwright_search.options import GridOptions
from shardwright_search.search import Found, StoppedEarly, find_best
from shardwright_search.space.budget import Infeasible, budgets_of, budgets_of_stages
from shardwright_search.space.grid import CellAnswer, Grid, GridAnswers
from shardwright_search.space.request import SearchRequest

_MAX_REASON = 2**16


class _Outcome(NamedTuple):
    """The outcome of a search."""

    answer: Found | None
    reason: str | None
    """Reason why there is no plan."""
    is_stopped: bool
    """Flag of a search that was stopped before there was a plan."""
    took_s: float


class _Cells(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs that all cells share, and the folder that keeps their answers."""

    file: Path
    cluster: Cluster
    model: Model
    inputs: Inputs
    files: Mapping[str, Path]
    folder: Path
    time_limit_s: float | None
    shared: str
    """SHA-256 of all inputs of an answer but its search."""

    def key(self, search: SearchRequest) -> str:
        """Return the name under which the answer of a search is kept."""
        return sha256_of_value([self.shared, search])

    def known(self, search: SearchRequest) -> CellAnswer | None:
        """Return the answer that is kept, if it is whole: a plan and its prediction are written as one."""
        key = self.key(search)
        plan, reason = self._plan(key), self._reason(key)
        if plan.exists() and prediction_path(plan).exists():
            return CellAnswer(name=search.name, key=key, reason=None)
        if reason.exists():
            text = read_bytes(reason, _MAX_REASON).decode(errors="replace")
            return CellAnswer(name=search.name, key=key, reason=text)
        return None

    def searched(self, search: SearchRequest, report: Callable[[str], None]) -> _Outcome:
        """Return the outcome of a search; a cell that cannot be answered says why and stops no other."""
        begun, answer, reason = monotonic(), None, None
        try:
            result = find_best(
                search, self.model, self.cluster, self.inputs.profiles, self.file, report, self.time_limit_s
            )
            answer, reason = (None, result.reason) if isinstance(result, Infeasible) else (result, None)
            is_stopped = answer is not None and answer.stopped
        except BadInput as error:
            reason, is_stopped = ": ".join(map(str, error.args[1:])), isinstance(error, StoppedEarly)
        if is_stopped and self.time_limit_s is None:
            raise KeyboardInterrupt  # the search took it for the wish to have its best plan so far
        return _Outcome(answer, reason, answer is None and is_stopped, monotonic() - begun)

    def kept(self, search: SearchRequest, outcome: _Outcome) -> CellAnswer:
        """Keep the outcome of a search, and return it; not where there may be more time next time."""
        key, answer = self.key(search), outcome.answer
        if answer is None:
            if not outcome.is_stopped:
                write_bytes(self._reason(key), str(outcome.reason).encode())
            return CellAnswer(name=search.name, key=key, reason=outcome.reason)
        best_plan = answer.chosen.plan
        budgets_bytes = budgets_of_stages(best_plan, budgets_of(search, self.cluster, self.file))
        prediction = prediction_of_searched(answer, search, budgets_bytes, self.files, self.inputs.warnings)
        with written(self._plan(key), best_plan, prediction):
            return CellAnswer(name=search.name, key=key, reason=None)

    def _plan(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _reason(self, key: str) -> Path:
        return self.folder / f"{key}.reason.txt"


def grid(options: GridOptions) -> None:
    """Answer every cell that is not answered yet, and write the list of all answers."""
    asked = read_document(options.grid, Grid)
    check_writable(options.out)
    cells = _cells(options)
    answers: list[CellAnswer] = []
    started, searched = monotonic(), 0
    with progress() as report:
        for search in asked.searches:
            answer = cells.known(search)
            if answer is None:
                searched += 1
                outcome = cells.searched(search, lambda _: None)
                answer = cells.kept(search, outcome)
                left = len(asked.searches) - len(answers) - 1
                left_s = (monotonic() - started) / searched * left
                place = f"{len(answers) + 1} of {len(asked.searches)}"
                report(f"{place} {search.name} in {outcome.took_s:.3f} s, at most {left_s:.0f} s left")
            answers.append(answer)
    write_document(options.out, GridAnswers(cells=tuple(answers)))
    none = sum(answer.reason is not None for answer in answers)
    known = len(answers) - searched
    show(f"{len(answers)} cells: {len(answers) - none} plans, {none} without one; {known} were known")


def _cells(options: GridOptions) -> _Cells:
    cluster, model = read_document(options.cluster, Cluster), read_document(options.model, Model)
    inputs = read_inputs(options)
    files = {"cluster": options.cluster, "model": options.model} | inputs.files
    hashes = {role: sha256_of_file(path) for role, path in files.items()}
    return _Cells(
        file=options.grid,
        cluster=cluster,
        model=model,
        inputs=inputs,
        files=files | {"search": options.grid},
        folder=options.folder,
        time_limit_s=options.time_limit,
        shared=sha256_of_value([version("shardwright-search"), options.time_limit, hashes]),
    )
