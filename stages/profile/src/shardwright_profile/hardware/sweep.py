"""The sweep: rates, collectives, links and overlap within a time budget (only the ranks of a sweep import this)."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from shardwright_formats.semantics.sweep_plan import CollectiveKind, SweepPlan
from shardwright_formats.types.hardware_profile import Collective
from shardwright_profile.hardware.collectives import collective_call
from shardwright_profile.hardware.device_rates import rate_tasks
from shardwright_profile.hardware.messages import pair_tasks, point_tasks
from shardwright_profile.hardware.overlap import CASE_MESSAGES, overlap_tasks
from shardwright_profile.hardware.profile import Entry, OverlapEntry, PairEntry, Progress, Remark, overlap_key
from shardwright_profile.hardware.progress import Line, Workload, line_through
from shardwright_profile.hardware.session import Session, Task, timed
from shardwright_profile.hardware.timing import WARM_UP_REPEATS, Budget

_POINTS_SHARE = 0.7
"""Share of the time left after the rates; the larger messages take most of it."""
_PAIRS_SHARE = 1 / 3
"""Share of the time left after the points; overlap has the rest."""

Say = Callable[[Progress | Remark], None]


def sweep(session: Session, time_budget_s: float, say: Say) -> list[Entry]:
    """Measure everything; all ranks of the world call this and get the same entries, in the same order.

    Each entry is in the journal before the next is measured; what is there already is not measured again.
    """
    plan = SweepPlan.for_cluster(session.identity.cluster, session.identity.sizes, session.device.type)
    found: list[Entry] = []
    step, budget = 0, session.stopwatch.budget(time_budget_s)
    for series, share in _parts(session, plan, budget, say):
        for number, task, entries in timed(session, series, share * budget.left_s()):
            if session.journal.add(entries):
                text = f"{task.what}: {max(entries, key=_slowness)}"
                say(Progress(step=step + number, steps=plan.steps, text=text))
            found.extend(entries)
        step += len(series)
    return found


def _parts(
    session: Session, plan: SweepPlan, budget: Budget, say: Say
) -> Iterator[tuple[Sequence[Iterable[Task]], float]]:
    """Yield the tasks for rates, collectives, links and overlap, each with its share of the time that is left then."""
    yield [rate_tasks(session)], 1.0
    work = _workload(session, plan)
    line = _calibrated(session, plan) if plan.kinds else Line(0.0, 0.0)
    needed_s = budget.time_s - budget.left_s() + work.min_s(line)
    say(Remark(text=work.estimate(session.journal.kept_count, needed_s, budget.time_s)))
    yield point_tasks(session, plan.kinds), _POINTS_SHARE
    yield pair_tasks(session, plan.rounds), _PAIRS_SHARE
    yield overlap_tasks(session, plan.overlapped), 1.0


def _workload(session: Session, plan: SweepPlan) -> Workload:
    """Return the messages that are timed however short the budget is, except those in the journal."""
    sizes, find = session.identity.sizes, session.find

    def always(kind: CollectiveKind) -> tuple[int, ...]:
        return sizes.always(kind.key.group_size)

    return Workload(
        points=[size for kind in plan.kinds for size in always(kind) if not find("point", kind.key, size)],
        pairs=[r.message_bytes for r in plan.rounds if not find("pair", *r.pairs[0], r.message_bytes)],
        overlap=[
            size
            for kind in plan.overlapped
            for size in sizes.overlapped(kind.key.group_size)
            if size in always(kind) and not find(*overlap_key(kind.key, size, 1.0))
        ],
        case_messages=CASE_MESSAGES,
        min_repeats=session.min_repeats,
        warm_up_repeats=WARM_UP_REPEATS,
    )


def _calibrated(session: Session, plan: SweepPlan) -> Line:
    """Return the time of a collective by size: an all_reduce of the largest group at the smallest size and 1 MiB."""
    kind = next(kind for kind in plan.overlapped if kind.key.collective is Collective.ALL_REDUCE)
    sizes = session.identity.sizes.always(kind.key.group_size)
    found = []
    for size in (sizes[0], sizes[-1]):
        call = collective_call(kind, size, session.process_groups.of(kind), session.device)
        session.stopwatch.slowest_s(call, WARM_UP_REPEATS)
        found.append((size, float(np.median(session.stopwatch.slowest_s(call, WARM_UP_REPEATS)))))
    return line_through(*found)


def _slowness(entry: Entry) -> float:
    """Return the slowness by which one of several entries measured together is chosen to be shown."""
    match entry:
        case PairEntry():
            return entry.time_s
        case OverlapEntry():
            return entry.compute_slowdown
        case _:
            return 0.0
