"""FASOP's tables beside ours: the same candidates, its own layer times, each difference with its cause and a figure.

    python benchmarks/fasop.py [--reference ../shared/reference/fasop] [--out benchmarks/results/fasop.md]

The reference has the tables that FASOP's commit 93cb38b writes, and its layer times; it is not part of this repository.
Its estimate and its partition are written anew in peers/fasop_published.py and peers/fasop_partition.py. First they are
compared with its tables; then its named defects are mended one at a time; then its partitions and its fastest
candidates are priced without these defects in a closed form (peers/fasop_estimate.py), and simulated. Our partitions
minimize that form exactly (peers/fasop_exact.py).
"""

import argparse
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import numpy as np
from fasop_compare import Table, defects_of, partitions_of, read_table, repeated_of, tops_of
from fasop_estimate import batches, estimates
from fasop_exact import check
from fasop_inputs import CASES, problem_of
from fasop_problem import candidates

ROOT = Path(__file__).resolve().parents[1]
_PEER_S = {
    "bert": "0.4",
    "bert_het": "1.5",
    "gpt2": "1.1",
    "gpt2_het": "10",
    "T5": "9",
    "T5_het": "66",
    "gpt2XL_pareto_n4": "32",
}
"""Seconds that FASOP's search took on this kind of machine, as its reference says."""
_LARGE = 8


def main() -> int:
    """Write the page; exit code 2, with one line, where the reference is not there."""
    parser = argparse.ArgumentParser(description="FASOP's tables beside ours")
    parser.add_argument("--reference", type=Path, default=ROOT / "../shared/reference/fasop")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/fasop.md")
    options = parser.parse_args()
    times = options.reference / "layer_forward_times.csv"
    if not times.is_file():
        print(f"error: {times}: is not there: give the folder of FASOP's tables", file=sys.stderr)
        return 2
    tables = [read_table(options.reference, case) for case in CASES]
    page = "\n".join(_page(tables, times))
    options.out.write_text(page)
    print(page)
    return 0


def _page(tables: list[Table], times: Path) -> Iterator[str]:
    day = datetime.now(UTC)
    yield f"<!-- python benchmarks/fasop.py, {day.day} {day:%B %Y}; CPU seconds of one thread; no step was measured -->"
    yield "Why and how: [docs/fasop.md](../../docs/fasop.md).\n"
    yield from _side_by_side(tables)
    yield from _large(times)
    yield from _partitions(tables)
    yield from _defects(tables)
    yield from _repeated(tables)


def _name(table: Table) -> str:
    return table.case.table.removeprefix("head_rerun_")


def _side_by_side(tables: list[Table]) -> Iterator[str]:
    yield "## The fastest candidates\n"
    yield (
        "In the closed form without defects, with FASOP's own layer times. `FASOP's` is its own fastest row of those"
        " that fit by its own flag, with its partition, priced alike. Both are simulated, too: 1F1B,"
        " asynchronous sends.\n"
    )
    yield from _head("table", "candidates", "CPU s", "FASOP s", "ours, s a step", "FASOP's", "ours / FASOP's")
    losses = []
    for table in tables:
        started = time.process_time()
        found = estimates(table.problem, [row.own for row in table.rows])
        spent = time.process_time() - started
        tops = tops_of(table, found)
        ratio = tops.ours_s / tops.theirs_s
        cells = (f"{len(found):,}", f"{spent:.2f}", _PEER_S[_name(table)], f"{tops.ours_s:.4f}", f"{tops.theirs_s:.4f}")
        yield f"| {_name(table)} | {' | '.join(cells)} | {ratio:.3f} |"
        if tops.ours_simulated_s > tops.theirs_simulated_s * (1 + 1e-9):
            losses.append((table, tops))
    yield ""
    for table, tops in losses:
        yield (
            f"The simulator disagrees on {_name(table)}: {tops.ours_simulated_s:.4f} s against"
            f" {tops.theirs_simulated_s:.4f} s.\n"
        )
    if not losses:
        yield "The simulator agrees on each of them.\n"


def _large(times: Path) -> Iterator[str]:
    problem = problem_of(CASES[-1], times)
    counts = [own for own in product(range(_LARGE + 1), repeat=2) if any(own)]
    started = time.process_time()
    found = estimates(problem, [own for own_counts in counts for own in candidates(problem, own_counts)])
    spent = time.process_time() - started
    fitting = [own for own in found if not own.memory.is_oom]
    yield (
        f"GPT-2 XL on 0 to {_LARGE} A100 nodes and 0 to {_LARGE} A10 nodes of 8: {len(found):,} candidates of"
        f" {len(counts)} clusters in {spent:.1f} CPU s, {len(found) - len(fitting):,} out of memory; the fastest that"
        f" fits takes {fitting[0].step_s:.4f} s a step. FASOP did not finish in 1,500 s.\n"
    )


def _partitions(tables: list[Table]) -> Iterator[str]:
    yield "## Partitions\n"
    yield (
        "Of the rows with several stages: how many of FASOP's partitions have a longer bottleneck than the least, which"
        " is exact, and by how much (its own measure: middle stages receive, others neither send nor receive, and the"
        " layers are those that it priced); how many of ours take longer in the closed form than FASOP's with the"
        " all-reduce at the end, which no partition is chosen by; how many take longer when both are simulated, and the"
        " mean of ours over FASOP's, simulated.\n"
    )
    results = [
        check(batch.pipelines, batch.candidates)
        for own in tables
        for batch in batches(own.problem, [r.own for r in own.rows])
    ]
    tried, wrong = sum(result.tried for result in results), sum(len(result.wrong) for result in results)
    yield (
        f"Of {tried:,} of all {sum(len(own.rows) for own in tables):,} candidates every partition was tried"
        f": {wrong or 'none'} better than ours.\n"
    )
    yield from _head(
        "table", "rows", "FASOP's above the least bottleneck", "by up to", "in its own measure", "by up to",
        "ours slower in the closed form", "by up to", "ours slower simulated", "by up to", "mean simulated",
    )  # fmt: skip
    for table in tables:
        found = partitions_of(table)
        cells = [f"{found.rows:,}"]
        for own in (found.missed, found.missed_own, found.slower, found.slower_simulated):
            cells += [str(len(own)), f"{max(own, default=0):.1%}"]
        yield f"| {_name(table)} | {' | '.join([*cells, f'{np.mean(found.ratios):.3f}'])} |"
    yield ""


def _defects(tables: list[Table]) -> Iterator[str]:
    yield "## FASOP's named defects, mended one at a time\n"
    yield (
        "What mending one does to FASOP's own figures over all rows of all its tables: how many change, by how much at"
        " most, and for how many the answer whether they fit.\n"
    )
    yield from _head("defect", "rows changed", "least", "most", "other answer to fits")
    for found in defects_of(tables):
        cells = f"{found.changed:,} of {found.rows:,}", f"{found.least:+.1%}", f"{found.most:+.1%}", f"{found.flags:,}"
        yield f"| {found.text} | {' | '.join(cells)} |"
    yield ""


def _repeated(tables: list[Table]) -> Iterator[str]:
    yield "## How well FASOP's tables are repeated\n"
    yield (
        "Its estimate, written anew, beside its tables: times, memory and flags of every row, and its partitions."
        " `other layers`: rows whose printed partition is not the one that its time is of, a defect that nothing named."
        " Those that are not repeated take as long to 15 digits.\n"
    )
    yield from _head("table", "rows", "largest difference", "other flags", "partitions repeated", "other layers")
    for table in tables:
        found = repeated_of(table)
        cells = len(table.rows), f"{found.difference:.0e}", found.flags, found.partitions, found.other_layers
        yield f"| {_name(table)} | {' | '.join(map(str, cells))} |"


def _head(*names: str) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield f"| --- |{' ---: |' * (len(names) - 1)}"


if __name__ == "__main__":
    sys.exit(main())
