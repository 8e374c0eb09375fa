"""`shardwright grid`: many searches of one model on one cluster, in one process."""

from pathlib import Path
from time import monotonic
from typing import NamedTuple

from msgspec.structs import replace

from shardwright.command import show
from shardwright.io import (
    BadInput,
    check_writable,
    read_bytes,
    read_document,
    sha256_of_file,
    sha256_of_value,
    write_bytes,
    write_document,
)
from shardwright.io.versions import product_version
from shardwright.types import Cluster, Model
from shardwright_search.commands.prediction import (
    Inputs,
    prediction_of_searched,
    prediction_path,
    progress,
    read_inputs,
    written,
)
from shardwright_search.cost_model.expert_load import StatedLoad
from shardwright_search.options import GridOptions
from shardwright_search.search import SearchAnswer, StoppedEarly, find_best
from shardwright_search.simplest import simplified
from shardwright_search.solver.stopping import was_interrupted
from shardwright_search.space.budget import Infeasible, allowed_bytes, budgets_of, with_spare
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import CellAnswer, Grid, GridAnswers, SearchRequest

_MAX_REASON = 2**16


class _Cells(NamedTuple):
    """Inputs that all cells share, and the folder that keeps their answers."""

    options: GridOptions
    cluster: Cluster
    model: Model
    inputs: Inputs
    shared: str
    """SHA-256 of all inputs of an answer except its search."""

    def key(self, search: SearchRequest) -> str:
        """Return the file name under which the answer of a search is stored."""
        return sha256_of_value([self.shared, search])

    def known(self, search: SearchRequest) -> CellAnswer | None:
        """Return the stored answer, if it is complete: a plan and its prediction."""
        key = self.key(search)
        plan, reason = self._plan(key), self._reason(key)
        if plan.exists() and prediction_path(plan).exists():
            return CellAnswer(name=search.name, key=key, reason=None)
        if reason.exists():
            text = read_bytes(reason, _MAX_REASON).decode(errors="replace")
            return CellAnswer(name=search.name, key=key, reason=text)
        return None

    def searched(self, search: SearchRequest, priced: dict[SearchRequest, Instance]) -> CellAnswer:
        """Search a cell of the grid and store the answer, unless more time may improve it.

        A cell without a plan stores the reason, and does not stop the others. `priced`: prices by search without its
        name, budget and batch size; cells that differ only in these share them.
        """
        alike = replace(search, name="alike", memory_gib=None, global_batch_size=1)
        key, file, time_limit_s, began_s = self.key(search), self.options.grid, self.options.time_limit, monotonic()
        given = search, self.model, self.cluster, self.inputs.profiles, file
        try:
            found = find_best(*given, lambda _: None, time_limit_s, priced=priced.get(alike))
            answer = simplified(found, search, file)
            reason = answer.reason if isinstance(answer, Infeasible) else None
            is_stopped = answer.stopped
        except BadInput as error:
            answer, reason, is_stopped = None, ": ".join(map(str, error.args[1:])), isinstance(error, StoppedEarly)
        if is_stopped and was_interrupted(began_s, time_limit_s):
            raise KeyboardInterrupt  # the search took it for the wish to have its best plan so far
        if isinstance(answer, SearchAnswer):
            priced[alike] = answer.instance
            plan, files = answer.chosen.plan, self.inputs.files | {"search": file}
            budgets = budgets_of(with_spare(search, self.cluster, self.inputs.profiles), self.cluster, file)
            budgets_bytes = allowed_bytes(plan, answer.chosen.evaluation.estimate, budgets)
            prediction = prediction_of_searched(answer, search, budgets_bytes, files, self.inputs.warnings)
            with written(self._plan(key), plan, prediction):
                return CellAnswer(name=search.name, key=key, reason=None)
        if not is_stopped:
            write_bytes(self._reason(key), str(reason).encode())
        return CellAnswer(name=search.name, key=key, reason=reason)

    def _plan(self, key: str) -> Path:
        return self.options.folder / f"{key}.json"

    def _reason(self, key: str) -> Path:
        return self.options.folder / f"{key}.reason.txt"


def grid(options: GridOptions) -> None:
    """Answer every cell that is not answered yet, and write the list of all answers."""
    searches = read_document(options.grid, Grid).searches
    check_writable(options.out)
    cells = _cells(options)
    answers, priced = list[CellAnswer](), dict[SearchRequest, Instance]()
    started, searched = monotonic(), 0
    with progress() as report:
        for number, search in enumerate(searches, 1):
            answer = cells.known(search)
            if answer is None:
                begun, searched = monotonic(), searched + 1
                answer = cells.searched(search, priced)
                ended = monotonic()
                left_s = (ended - started) / searched * (len(searches) - number)
                place, took_s = f"{number} of {len(searches)}", ended - begun
                report(f"{place} {search.name} in {took_s:.3f} s, at most {left_s:.0f} s left")
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
    shared = sha256_of_value([product_version(), options.time_limit, hashes, *_stated(inputs)])
    return _Cells(options, cluster, model, inputs._replace(files=files), shared)


def _stated(inputs: Inputs) -> tuple[float, ...]:
    """Return the imbalance if it is given as a number, which no file contains; else nothing."""
    load = inputs.profiles.load
    return (load.ratio,) if isinstance(load, StatedLoad) else ()
