"""What each term of the estimates does to their errors: all undone, then one after another taken in."""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from accuracy_parts.public.report import compared, tables
from accuracy_parts.public.runs import Run

__all__ = ["TERMS", "Term", "told_by_term"]


class Term(NamedTuple):
    """One term of the estimates."""

    name: str
    without: Callable[[Run], Run]
    """The run as it was stated before the estimates had the term."""


TERMS = (
    Term("the host takes 42 us for a kernel, not 15", lambda run: run._replace(launch_us=15.0)),
    Term("rates by collective", lambda run: _with_machine(run, gbit_s_by_collective=())),
    Term("the measured step between nodes", lambda run: _with_machine(run, step_us=None)),
    Term("the runtime's attention kernel", lambda run: _without_habits(run, "attention")),
    Term("as few kernels as it starts", lambda run: _without_habits(run, "few_kernels")),
    Term("tensor-parallel messages that it hides", lambda run: _without_habits(run, "message_pieces")),
    Term("data parallelism beside computation", lambda run: _without_habits(run, "overlap")),
    Term("nanotron's floor of pipelines between nodes", lambda run: _uncounted(run, "pipelined_block_ms")),
    Term("what the runtime holds in memory", lambda run: _without_habits(run, "held")),
)


def _without_habits(run: Run, *habits: str) -> Run:
    return run._replace(habits_left_out=(*run.habits_left_out, *habits))


def _uncounted(run: Run, field: str) -> Run:
    return run._replace(uncounted=(*run.uncounted, field))


def _with_machine(run: Run, **stated: Any) -> Run:  # noqa: ANN401 (the types are those of the machine's fields)
    return run._replace(machine=run.machine._replace(**stated))


def told_by_term(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Print and return the errors of each set of runs without any term, and as one after another is taken in."""
    kept = []
    print(f"{'':60} {'time':>7} {'bias':>7} {'pp 1':>7} {'memory':>7} {'ranks':>6}")
    for name in dict.fromkeys(run.set for run in runs):
        print(name)
        for label, stated in _taken_in([run for run in runs if run.set == name]):
            row = {"set": name, "with": label, **_figures(stated)}
            kept.append(row)
            figures = [f"{row[what]:7.1%}" if row[what] is not None else "      -" for what in _SHARES]
            ranks = f"{row['ranks']:6.2f}" if row["ranks"] is not None else "     -"
            print(f"    {label:56} {' '.join(figures)} {ranks}")
    return kept


_SHARES = ("time", "bias", "time_pp1", "memory")


def _taken_in(runs: Sequence[Run]) -> Iterator[tuple[str, Sequence[Run]]]:
    """Yield the runs without any term, and with each further one."""
    labels = ["before", *(f"+ {term.name}" for term in TERMS)]
    for taken, label in enumerate(labels):
        stated = list(runs)
        for term in TERMS[taken:]:
            stated = [term.without(run) for run in stated]
        yield label, stated


def _figures(runs: Sequence[Run]) -> dict[str, Any]:
    found, _, _ = compared(runs, calibrate=False)
    table, flat = tables(found), tables([one for one in found if one.run.pp_size == 1])
    groups = table["groups"]
    return {
        "runs": table["time"]["runs"],
        "time": table["time"]["median"],
        "bias": table["time"]["bias"],
        "time_pp1": flat["time"].get("median"),
        "memory": table["memory"].get("median"),
        "ranks": fmean(group["rank_correlation"] for group in groups) if groups else None,
    }
