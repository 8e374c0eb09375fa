"""How far published runs are from what is predicted of them: errors, ranks, the choice of a plan, and what fits."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from accuracy_parts.figures import spearman
from accuracy_parts.public.pricing import Factors, Priced, Unpriced, priced
from accuracy_parts.public.runs import Run

from shardwright.estimate.notes import memory_range

_FEWEST = 5
"""Minimum number of runs in a group for which rank correlation and choice are reported."""
_WHERE = ("predicted over", "predicted near the limit", "predicted to fit")
"""Over: even the lower end of the predicted range exceeds the limit; to fit: even its upper end does not."""
_CONTRADICTED = 1.5
"""Ratio of a run's GPU time to its twin's GPU time above which the twin contradicts the run."""
_REPEATED = 1.25
"""Spread of repeated runs of one plan in the playbook, as a ratio."""
_FAR = 0.4
"""Relative error of a time above which a cause is looked for."""
_CALIBRATED_ON = 8
"""Number of devices of the runs from which factors are learned; these runs are then left out."""


class Group(NamedTuple):
    """Comparison of runs that do the same work on the same devices."""

    name: str
    runs: int
    rank_correlation: float
    chosen_over_best: float
    """Measured time of the plan that is predicted to be the fastest that fits, over the best measured time."""
    contradicted: int
    """Number of runs that their twins contradict."""
    chosen_of_others: float
    """As `chosen_over_best`, among the runs that are not contradicted."""


def compared(runs: Sequence[Run], calibrate: bool) -> tuple[list[Priced], list[Unpriced], Factors]:
    """Return the priced and the unpriced runs, and the factors; with `calibrate` only runs on over 8 devices.

    The factors are 1 or, with `calibrate`, learned from the runs on 8 devices: the medians of measured over predicted
    step time, used for both passes, and memory. The factor of memory is so small that each of these runs fits.
    """
    factors = Factors()
    if calibrate:
        known = [one for one in priced([r for r in runs if _teaches(r)], factors) if isinstance(one, Priced)]
        if not known:
            return [], [], factors
        times = [1 / (1 + one.time_error) for one in known]
        sizes = [1 / (1 + one.memory_error) for one in known if one.run.measured_bytes]
        fitting = min(one.limit_bytes / one.memory_bytes for one in known)
        factors = Factors(median(times), min(median(sizes), fitting) if sizes else 1.0)
        runs = [run for run in runs if run.devices > _CALIBRATED_ON]
    found = list(priced(runs, factors))
    return [p for p in found if isinstance(p, Priced)], [p for p in found if isinstance(p, Unpriced)], factors


def tables(found: Sequence[Priced]) -> dict[str, Any]:
    """Return all figures that are reported for one set of priced runs."""
    ran = [one for one in found if one.run.measured_s]
    read = [one for one in ran if one.run.measured_bytes]
    groups = list(_groups(ran))
    return {
        "time": _errors([one.time_error for one in ran]),
        "memory": _errors([one.memory_error for one in read]),
        "groups": [group._asdict() for group in groups],
        "fits": _fits(found),
    }


def contradicted(runs: Iterable[Run]) -> list[Run]:
    """Return the measured runs that took over 1.5 times the GPU time of a twin on as many or more GPUs.

    Twins differ only in data parallelism: its kind or its number of ranks. More ranks cost more GPU time and make the
    pipeline's bubble larger, so a run on fewer GPUs should not take more GPU time.
    """
    twins: dict[str, list[Run]] = {}
    for run in runs:
        if run.measured_s:
            same = (run.tp_size, run.pp_size, run.cp_size, run.chunks, run.ep_size, run.etp_size, run.micro_batch_size)
            more = (run.set, run.config, run.sequence_length, run.machine, run.global_batch_size, run.recompute)
            key = repr((*same, *more, run.compiled, run.compute, run.habits, run.modules))
            twins.setdefault(key, []).append(run)
    return [
        run
        for own in twins.values()
        for run in own
        if any(
            _gpu_s(run) > _CONTRADICTED * _gpu_s(other)
            for other in own
            if other.devices >= run.devices and other is not run
        )
    ]


def far_off(found: Iterable[Priced]) -> dict[str, list[str]]:
    """Return the runs whose predicted times are over 40 % off, by presumed cause."""
    ran = [one for one in found if one.run.measured_s]
    of_twins = contradicted(one.run for one in ran)
    named: dict[str, list[str]] = {}
    for one in ran:
        if abs(one.time_error) <= _FAR:
            continue
        if one.run in of_twins:
            cause = "took over 1.5 times the GPU time of a twin"
        elif any(_outdone_by(one.run, other.run) for other in ran):
            cause = "took longer than on half as many GPUs, or than with smaller micro-batches"
        elif one.run.tp_size > one.run.machine.devices_per_node:
            cause = "tensor parallelism over nodes"
        else:
            cause = "not explained by other runs"
        named.setdefault(cause, []).append(f"{one.run.set}: {one.run.name}, {one.time_error:+.0%}")
    return named


def _outdone_by(run: Run, other: Run) -> bool:
    """Return whether a run's step took longer than `other`'s, in spite of more ranks or larger micro-batches.

    The plans are otherwise equal. The difference must exceed the spread of repeats and the larger pipeline bubble that
    fewer micro-batches cause.
    """
    same = all(getattr(run, name) == getattr(other, name) for name in _SAME)
    devices, samples = other.devices / run.devices, other.micro_batch_size / run.micro_batch_size
    if not same or run.measured_s is None or other.measured_s is None or devices > 1 or samples > 1:
        return False
    longer = devices * _with_bubble(run) / _with_bubble(other)
    return devices * samples < 1 and run.measured_s > _REPEATED * max(longer, 1.0) * other.measured_s


_SAME = ("set", "config", "sequence_length", "machine", "global_batch_size", "recompute", "compiled", "compute")
_SAME += ("tp_size", "pp_size", "cp_size", "chunks", "ep_size", "etp_size", "data_parallel", "habits", "modules")


def _with_bubble(run: Run) -> float:
    return 1 + (run.pp_size - 1) / (run.num_microbatches * run.chunks)


def _gpu_s(run: Run) -> float:
    return (run.measured_s or 0.0) * run.devices


def _teaches(run: Run) -> bool:
    return run.devices == _CALIBRATED_ON and run.measured_s is not None


def _errors(signed: Sequence[float]) -> dict[str, float]:
    if not signed:
        return {}
    sizes = [abs(error) for error in signed]
    return {
        "runs": len(signed),
        "median": median(sizes),
        "mean": fmean(sizes),
        "worst": max(sizes),
        "bias": median(signed),
    }


def _groups(ran: Iterable[Priced]) -> Iterable[Group]:
    by_name: dict[str, list[Priced]] = {}
    ran = list(ran)
    doubtful = contradicted(one.run for one in ran)
    for one in ran:
        by_name.setdefault(one.run.group, []).append(one)
    for name, own in by_name.items():
        if len(own) < _FEWEST:
            continue
        times = [one.run.measured_s or 0.0 for one in own]
        correlation = spearman([one.time_s for one in own], times)
        others = [one for one in own if one.run not in doubtful]
        yield Group(name, len(own), correlation, _choice(own), len(own) - len(others), _choice(others))


def _choice(own: Sequence[Priced]) -> float:
    fitting = [one for one in own if one.memory_bytes <= one.limit_bytes] or own
    chosen = min(fitting, key=lambda one: one.time_s)
    return (chosen.run.measured_s or 0.0) / min(one.run.measured_s or 0.0 for one in own)


def _fits(found: Sequence[Priced]) -> dict[str, int]:
    """Return the numbers of runs by whether they ran and by whether they are predicted to fit."""
    counts = {f"{how}, {where}": 0 for how in ("ran", "failed") for where in _WHERE}
    for one in found:
        low, high = memory_range(one.memory_bytes)
        where = _WHERE[0 if low > one.limit_bytes else 1 if high > one.limit_bytes else 2]
        counts[f"{'ran' if one.run.measured_s else 'failed'}, {where}"] += 1
    return counts


# The effect of each term of the estimates on their errors: first without all terms, then adding one after another.


class Term(NamedTuple):
    """One term of the estimates."""

    name: str
    without: Callable[[Run], Run]
    """Function that returns a run as it was described before the estimates had the term."""


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
    """Print and return the errors of each set of runs without any term, and after adding each further term."""
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
    """Yield the runs without any term, and after adding each further term, each with a label."""
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
