"""FASOP's tables read, and compared with what was written anew and with the estimates without its defects."""

import ast
import csv
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fasop_estimate import (
    Batch,
    FasopEstimate,
    batches,
    estimate_of,
    priced,
)
from fasop_exact import fastest_partitions, min_bottlenecks, stage_times
from fasop_inputs import CASES, Case, problem_of
from fasop_partition import chosen
from fasop_problem import Candidate, FasopProblem
from fasop_published import DEFECTS, PricedCase, Published, published

from shardwright.types import Schedule
from shardwright_search.simulation.simulator import StageTimes, step_time_ps

__all__ = ["CASES", "Row", "Table", "defects_of", "partitions_of", "read_table", "repeated_of", "tops_of"]
_SAME = 1e-9


class Row(NamedTuple):
    """One of FASOP's, as its table has it."""

    own: Candidate
    layers: tuple[int, ...]
    told: Published
    usd: float


class Table(NamedTuple):
    """One of FASOP's, fastest first."""

    case: Case
    problem: FasopProblem
    rows: tuple[Row, ...]


def read_table(reference: Path, case: Case) -> Table:
    """Its rows; its times file is beside the results."""
    with (reference / "results" / f"{case.table}.csv").open() as lines:
        rows = tuple(_row(cells) for cells in csv.DictReader(lines))
    return Table(case, problem_of(case, reference / "layer_forward_times.csv"), rows)


def _row(cells: dict[str, str]) -> Row:
    placed = ast.literal_eval(cells["node placement"])
    own = Candidate(
        int(cells["tp"]),
        int(cells["dp"]),
        int(float(cells["pp"])),
        int(cells["mbs"]),
        nodes=tuple(0 if name.startswith("p4d") else 1 for name in placed),
    )
    names = ("estimated time (s/step)", "pipeline time", "DP all-reduce time", "embedding layer all-reduce time")
    told = Published(
        *(float(cells[name]) for name in names),
        cells["is_oom"] == "True",
        float(cells["oom_gpumem"].strip("tensor([])")),
        cells["is_fsdp_oom"] == "True",
        float(cells["fsdpoom_gpumem"].strip("tensor([])")),
    )
    return Row(own, tuple(ast.literal_eval(cells["partition"])), told, float(cells["price_per_step"]))


class Repeated(NamedTuple):
    """How well a table is repeated."""

    difference: float
    """The largest relative one of times and memory."""
    flags: int
    partitions: int
    other_layers: int


def repeated_of(table: Table) -> Repeated:
    """Times are of the layers that FASOP priced, memory and all-reduce of those that it printed."""
    largest, flags, same, other = 0.0, 0, 0, 0
    for row in table.rows:
        found = chosen(table.problem, row.own)
        same += found.printed == row.layers
        layers = found.priced if found.printed == row.layers else row.layers
        other += layers != row.layers
        timed, printed = _published(table, row, layers), _published(table, row, row.layers)
        pairs = [(timed.step_s, row.told.step_s), (timed.pipeline_s, row.told.pipeline_s)]
        pairs += [(getattr(printed, name), getattr(row.told, name)) for name in ("reduction_s", "tied_s")]
        pairs += [(getattr(printed, name), getattr(row.told, name)) for name in ("gib", "sharded_gib")]
        largest = max(largest, *(abs(a - b) / b if b else abs(a) for a, b in pairs))
        flags += (printed.is_oom, printed.is_sharded_oom) != (row.told.is_oom, row.told.is_sharded_oom)
    return Repeated(largest, flags, same, other)


def _published(table: Table, row: Row, layers: Sequence[int], mended: Sequence[str] = ()) -> Published:
    return _known(table.case.table, table.problem, row.own, tuple(layers), tuple(mended))


@cache
def _known(
    _: str, problem: FasopProblem, own: Candidate, layers: tuple[int, ...], mended: tuple[str, ...]
) -> Published:
    return published(problem, own, layers, mended)


class Defect(NamedTuple):
    """What mending one does; changes are relative, of the first figure that it is about."""

    text: str
    rows: int
    changed: int
    least: float
    most: float
    flags: int


def defects_of(tables: Sequence[Table]) -> Iterator[Defect]:
    """One after another, and the layers that were printed and not priced."""
    for name, text in DEFECTS.items():
        before, after = [], []
        for table in tables:
            for row in table.rows:
                before.append(_published(table, row, row.layers))
                after.append(_published(table, row, row.layers, [name]))
        yield _defect(text, before, after, _ABOUT.get(name, "step_s"))
    yield _heads(tables)
    yield _price(tables)
    yield _decoder(tables)
    layers = [(table, row, chosen(table.problem, row.own)) for table in tables for row in table.rows]
    yield _defect(
        "the printed partition is not the one that the time is of (not among the named ones)",
        [_published(table, row, found.priced) for table, row, found in layers],
        [_published(table, row, found.printed) for table, row, found in layers],
        "step_s",
    )


_ABOUT = {"sharded": "sharded_gib", "limits": "gib", "reported": "gib"}


def _heads(tables: Sequence[Table]) -> Defect:
    """The public GPT-2 XL has 25 attention heads."""
    some = [table for table in tables if table.case.model == "gpt2XL"]
    before = [published(table.problem, row.own, row.layers) for table in some for row in table.rows]
    after = []
    for table in some:
        public = _with_heads(table.problem, 25)
        after += [published(public, row.own, row.layers) for row in table.rows]
    return _defect("GPT-2 XL with 16 heads, where the public one has 25: its memory", before, after, "gib")


def _price(tables: Sequence[Table]) -> Defect:
    """Nodes of 4 A100 at half the price of a p4d.24xlarge; the others' price is of nodes of 4."""
    some = [(table, row) for table in tables if table.case.setting == "default" for row in table.rows]
    changes = []
    for table, row in some:
        prices = [own.usd_per_hour or 0.0 for own in table.problem.node_types]
        whole, half = (sum((first, prices[1])[kind] for kind in row.own.nodes) for first in (prices[0], prices[0] / 2))
        changes.append(half / whole - 1)
    text = "an A100 node of 4 GPUs has the price of one of 8: the price of a step"
    return _of_changes(text, changes, 0)


def _decoder(tables: Sequence[Table]) -> Defect:
    """The pipeline's time by FASOP's own simulation."""
    some = [(table, row) for table in tables if table.case.model == "T5" for row in table.rows]
    changes = []
    for table, row in some:
        partitions = (chosen(table.problem, row.own, own_times).printed for own_times in (False, True))
        before, after = (_published(table, row, layers).step_s for layers in partitions)
        changes.append(after / before - 1)
    return _of_changes("T5's decoder is partitioned with the times of the encoder's layers", changes, 0)


def _with_heads(problem: FasopProblem, heads: int) -> FasopProblem:
    return FasopProblem(**{name: getattr(problem, name) for name in FasopProblem.__struct_fields__} | {"heads": heads})


def _defect(text: str, before: Sequence[Published], after: Sequence[Published], name: str) -> Defect:
    changes = [getattr(b, name) / getattr(a, name) - 1 for a, b in zip(before, after, strict=True)]
    flags = sum(
        (a.is_oom, a.is_sharded_oom) != (b.is_oom, b.is_sharded_oom) for a, b in zip(before, after, strict=True)
    )
    return _of_changes(text, changes, flags)


def _of_changes(text: str, changes: Sequence[float], flags: int) -> Defect:
    real = [change for change in changes if abs(change) > _SAME]
    return Defect(text, len(changes), len(real), min(real, default=0), max(real, default=0), flags)


class Partitions(NamedTuple):
    """Of rows with several stages; by how much, relative."""

    rows: int
    missed: list[float]
    """FASOP's bottleneck above the least."""
    missed_own: list[float]
    """The same in its own measure."""
    slower: list[float]
    """Our partition in the closed form with its all-reduce."""
    slower_simulated: list[float]
    ratios: list[float]
    """Of simulated times, of all rows."""


def partitions_of(table: Table) -> Partitions:
    """Ours and FASOP's printed partition of each candidate."""
    theirs = {row.own: row.layers for row in table.rows}
    found = Partitions(0, [], [], [], [], [])
    for batch in batches(table.problem, theirs):
        if batch.candidates[0].pp_size > 1:
            _compare(table.problem, batch, theirs, found)
    return found._replace(rows=sum(own.pp_size > 1 for own in theirs))


def _compare(problem: FasopProblem, batch: Batch, theirs: dict[Candidate, tuple[int, ...]], found: Partitions) -> None:
    cuts = np.array([np.cumsum([0, *theirs[own]]) for own in batch.candidates])
    ours = fastest_partitions(batch.pipelines)
    least = min_bottlenecks(batch.pipelines)
    bottlenecks = stage_times(batch.pipelines, cuts).max(axis=1)
    found.missed.extend((bottlenecks / least - 1)[bottlenecks > least].tolist())
    found.missed_own.extend(_missed_own(problem, batch, theirs))
    pairs = list(zip(priced(problem, batch, ours), priced(problem, batch, cuts), strict=True))
    found.slower.extend(_longer([(mine.step_s, other.step_s) for mine, other in pairs]))
    played = [(simulated_s(problem, batch, i, ours), simulated_s(problem, batch, i, cuts)) for i in range(len(pairs))]
    found.slower_simulated.extend(_longer(played))
    found.ratios.extend(mine / other for mine, other in played)


def _missed_own(problem: FasopProblem, batch: Batch, theirs: dict[Candidate, tuple[int, ...]]) -> Iterator[float]:
    """Middle stages wait for what they receive, others for nothing; layers are those that FASOP priced."""
    sends = np.zeros_like(batch.pipelines.sends)
    cuts = []
    for number, own in enumerate(batch.candidates):
        case, taken = PricedCase.of(problem, own), chosen(problem, own)
        sends[number, 1:-1] = [round(case.send_s(stage) * 1e12) for stage in range(own.pp_size - 2)]
        cuts.append(np.cumsum([0, *(taken.priced if taken.printed == theirs[own] else theirs[own])]))
    pipelines = batch.pipelines._replace(sends=sends)
    least, bottlenecks = min_bottlenecks(pipelines), stage_times(pipelines, np.array(cuts)).max(axis=1)
    yield from (bottlenecks / least - 1)[bottlenecks > least].tolist()


def _longer(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return [mine / other - 1 for mine, other in pairs if mine > other * (1 + _SAME)]


def simulated_s(problem: FasopProblem, batch: Batch, number: int, cuts: np.ndarray) -> float:
    """A candidate's pipeline alone, played by this project's simulator: a third of a layer's time is forward."""
    one = batch.pipelines.some(np.array([number]))
    work = stage_times(one._replace(sends=one.sends * 0), cuts[number][None, :])[0].tolist()
    sends = [0]
    for both in one.sends[0].tolist():
        sends.append(both - sends[-1])
    ranges = [
        StageTimes(forward_ps=time // 3, backward_ps=time - time // 3, send_ps=send, gradient_sync_ps=0, optimizer_ps=0)
        for time, send in zip(work, sends[1:], strict=True)
    ]
    count = batch.candidates[number].num_microbatches(problem.batch)
    return step_time_ps(ranges, Schedule.ONE_F_ONE_B, count) * 1e-12


class Tops(NamedTuple):
    """The fastest of both that fit, in the closed form and simulated; seconds."""

    ours: FasopEstimate
    theirs: FasopEstimate
    ours_s: float
    theirs_s: float
    ours_simulated_s: float
    theirs_simulated_s: float


def tops_of(table: Table, found: Sequence[FasopEstimate]) -> Tops:
    """FASOP's fastest row that fits by its own flag, priced as ours."""
    row = next(row for row in table.rows if not row.told.is_oom)
    theirs = estimate_of(table.problem, row.own, row.layers)
    ours = next(own for own in found if not own.memory.is_oom)
    played = [_step_simulated_s(table.problem, own) for own in (ours, theirs)]
    return Tops(ours, theirs, ours.step_s, theirs.step_s, *played)


def _step_simulated_s(problem: FasopProblem, own: FasopEstimate) -> float:
    (batch,) = batches(problem, [own.candidate])
    cuts = np.cumsum([0, *own.partition])[None, :]
    return simulated_s(problem, batch, 0, cuts) + own.reduction_s + own.tied_s
