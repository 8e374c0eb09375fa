"""How far published runs are from what is predicted of them: errors, ranks, the choice of a plan, and what fits."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from accuracy_parts.figures import spearman
from accuracy_parts.public.pricing import Factors, Priced, Unpriced, priced
from accuracy_parts.public.runs import Run

from shardwright.estimate.notes import memory_range

_FEWEST = 5
"""Runs of a group that a rank correlation and a choice are told of."""
_WHERE = ("predicted over", "predicted near the limit", "predicted to fit")
"""Over: even the lower end of the range; to fit: the upper end, too."""
_CONTRADICTED = 1.5
"""GPU time over that of a twin from which a run is contradicted."""
_REPEATED = 1.25
"""Spread of the playbook's repeats of one plan."""
_FAR = 0.4
"""Error of a time over which it wants a cause."""
_CALIBRATED_ON = 8
"""Devices of the runs that factors are learned from; these runs are then left out."""


class Group(NamedTuple):
    """Runs that could take one another's place."""

    name: str
    runs: int
    rank_correlation: float
    chosen_over_best: float
    """Measured time of the plan that is predicted to be the fastest that fits, over the best measured one's."""
    contradicted: int
    """Runs that their twins contradict."""
    chosen_of_others: float
    """The choice over the best, both among the other runs."""


def compared(runs: Sequence[Run], calibrate: bool) -> tuple[list[Priced], list[Unpriced], Factors]:
    """Return the runs priced; with `calibrate` those on more devices than the ones that both factors are learned from.

    The factors are medians of measured over predicted, of step times for forward and backward passes alike; that of
    memory at most what lets each of these runs fit.
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
    """Everything that is told of one set of priced runs."""
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

    Twins differ in data parallelism alone, its ranks or its kind. With more ranks it costs GPU time, and the bubble of
    the pipeline grows, so that fewer take no more.
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
    """Return the runs whose times are over 40 % off, by what is known of them."""
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
    """Return whether a step took longer than another one, in spite of more ranks or larger micro-batches, beyond repeats.

    The plans are the same otherwise. With fewer micro-batches a pipeline waits a larger share of the step.
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
    """Runs by whether they ran and by what is predicted of their memory."""
    counts = {f"{how}, {where}": 0 for how in ("ran", "failed") for where in _WHERE}
    for one in found:
        low, high = memory_range(one.memory_bytes)
        where = _WHERE[0 if low > one.limit_bytes else 1 if high > one.limit_bytes else 2]
        counts[f"{'ran' if one.run.measured_s else 'failed'}, {where}"] += 1
    return counts


# What each term of the estimates does to their errors: all undone, then one after another taken in.


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
