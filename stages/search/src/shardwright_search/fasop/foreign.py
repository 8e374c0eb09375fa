"""Partitions of other tables of the same fields, FASOP's own for one: where they are faster they are taken."""

import ast
import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from shardwright_formats.io import BadInput, read_bytes
from shardwright_search.fasop.estimate import Estimate, batches, priced
from shardwright_search.fasop.problem import Candidate, Problem

_NEEDED = ("mbs", "tp", "dp", "pp", "node placement", "partition")
_MAX_BYTES = 2**28
_MAX_CELL = 2**16

Partitions = Mapping[Candidate, tuple[int, ...]]
"""Layers of each stage, embedding and head counted."""


def read_foreign(file: Path, problem: Problem, every: Iterable[Candidate]) -> Partitions:
    """Those of a table; of a candidate that it has twice the first.

    Raises BadInput, with the line, for what is no candidate here, and for what does not cut its layers.
    """
    try:
        lines = read_bytes(file, _MAX_BYTES).decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise BadInput(file, "holds more than ASCII text", "pass a table of FASOP's fields") from None
    reader = csv.DictReader(lines)
    missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        raise BadInput(file, f"has no column {missing[0]!r}", "pass a table of FASOP's fields")
    known, found = set(every), dict[Candidate, tuple[int, ...]]()
    for cells in reader:
        own, layers = _row(file, reader.line_num, cells, problem)
        if own not in known:
            raise BadInput(file, f"line {reader.line_num} is no candidate of this cluster", "leave it out")
        if len(layers) != own.pp_size or sum(layers) != len(problem.kinds) or min(layers) < 1:
            what = f"line {reader.line_num} does not cut {len(problem.kinds)} layers into {own.pp_size} stages"
            raise BadInput(file, what, "correct it; embedding and head are layers")
        found.setdefault(own, layers)
    return found


def _row(file: Path, line: int, cells: Mapping[str, str | None], problem: Problem) -> tuple[Candidate, tuple[int, ...]]:
    names = [own.name for own in problem.node_types]
    try:
        mbs, tp, dp, pp, placed, cut = ((cells[name] or "")[:_MAX_CELL] for name in _NEEDED)
        nodes = tuple(names.index(str(name)) for name in ast.literal_eval(placed))
        layers = tuple(int(count) for count in ast.literal_eval(cut))
        return Candidate(nodes, int(tp), int(dp), int(float(pp)), int(mbs)), layers
    except (ValueError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError):
        what = f"line {line} is no row of FASOP's fields with nodes of {' and '.join(names)}"
        raise BadInput(file, what, "correct it") from None


def joined(problem: Problem, found: Sequence[Estimate], foreign: Partitions) -> list[Estimate]:
    """Each candidate with the faster of both partitions, the fastest first; its own where they take as long."""
    others = {
        other.candidate: other
        for batch in batches(problem, foreign)
        for other in priced(problem, batch, np.array([np.cumsum([0, *foreign[own]]) for own in batch.candidates]))
    }
    each = (min(own, others.get(own.candidate, own), key=_step_s) for own in found)
    return sorted(each, key=_step_s)


def _step_s(estimate: Estimate) -> float:
    return estimate.step_s
