"""The best plan of the asked space: every case solved, compared, and told about."""

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import NamedTuple

from shardwright_formats.cluster import Cluster
from shardwright_formats.errors import BadInput
from shardwright_formats.model import Model
from shardwright_formats.plan import Plan, Schedule
from shardwright_formats.schedule import actions
from shardwright_formats.strategy import DataParallel, LayerStrategy, Recompute
from shardwright_search.case import PricedCase, plan_of, priced_case, restricted
from shardwright_search.evaluate import Evaluation, evaluate
from shardwright_search.profiles import Profiles, check_profiles
from shardwright_search.request import SearchRequest, check_supported
from shardwright_search.solver.optimise import least_memory, solve
from shardwright_search.space import Case, cases

__all__ = ["NEAR", "Candidate", "Found", "Infeasible", "find_best", "memory_budget_bytes"]

NEAR = 0.01
"""Among plans whose closed form is within this share of the optimum, the least simulated time decides."""
_MOST_RUNNERS_UP = 5
_GIB = 2**30


class Candidate(NamedTuple):
    """A plan and what it is predicted to take."""

    plan: Plan
    evaluation: Evaluation


class Found(NamedTuple):
    """The chosen plan, the least closed form of the space, and the best plans of other cases."""

    chosen: Candidate
    optimum_s: float
    runners_up: tuple[Candidate, ...]
    examined: int
    solved: int


class Infeasible(NamedTuple):
    """No plan fits: why, how much is missing on a rank, and the least budget with which one fits."""

    reason: str
    missing_bytes: int
    least_bytes: int


def memory_budget_bytes(request: SearchRequest, cluster: Cluster, file: Path) -> int:
    """What one rank may use: the request's `memory_gib`, or all memory of the cluster's smallest device.

    Raises BadInput when the request allows more than a device has.
    """
    device_bytes = min(cluster.node_types[group.node_type].memory_bytes for group in cluster.nodes)
    if request.memory_gib is None:
        return device_bytes
    budget = int(request.memory_gib * _GIB)
    if budget > device_bytes:
        what = f"memory_gib {request.memory_gib:g} is more than a device has, {device_bytes / _GIB:.6g}"
        raise BadInput(file, what, "lower memory_gib or leave it null")
    return budget


def find_best(
    request: SearchRequest,
    model: Model,
    cluster: Cluster,
    profiles: Profiles,
    file: Path,
    on_case: Callable[[str], None],
) -> Found | Infeasible:
    """Solve every case of the request; `on_case` hears a line before each, `file` names the request in errors.

    Raises BadInput for a request that is not planned yet or names no plan, and for profiles that do not fit it.
    """
    check_supported(request, file)
    check_profiles(profiles, model, cluster, request.precision, request.attention)
    budget_bytes = memory_budget_bytes(request, cluster, file)
    asked = cases(request, model, cluster, file)
    priced: list[PricedCase] = []
    best: list[Candidate] = []
    for number, case in enumerate(asked, 1):
        known = min((c.evaluation.estimate.objective_s for c in best), default=None)
        so_far = "" if known is None else f", best {known * 1e3:.3f} ms a step so far"
        on_case(f"case {number}/{len(asked)}: {_words(case)}{so_far}")
        if (here := priced_case(request, model, cluster, profiles, case, budget_bytes)) is None:
            continue
        priced.append(here)
        best += _solved(request, model, cluster, profiles, here)
    if not priced:
        raise BadInput(file, "no strategy divides the batch, the model and the devices evenly", "allow other sizes")
    if not best:
        return _infeasible(priced, budget_bytes, profiles.process_bytes)
    best.sort(key=_order)
    optimum_ps = best[0].evaluation.objective_ps
    near = [c for c in best if c.evaluation.objective_ps <= optimum_ps * (1 + NEAR)]
    chosen = min(near, key=lambda c: (c.evaluation.estimate.simulated_step_time_s, _order(c)))
    plain = [c for here in priced for c in _plain_plans(request, model, cluster, profiles, here)]
    runners_up = _diverse(chosen, best, sorted(plain, key=_order)[:1])
    return Found(chosen, best[0].evaluation.estimate.objective_s, runners_up, len(asked), len(priced))


def _solved(
    request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles, priced: PricedCase
) -> Iterator[Candidate]:
    """The best plan of a case, if one fits."""
    if (solution := solve(priced.problem)) is not None:
        plan = plan_of(request, model, cluster, priced, solution)
        yield Candidate(plan, evaluate(plan, profiles))


def _plain_plans(
    request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles, priced: PricedCase
) -> Iterator[Candidate]:
    """The best plans of a case that spread every layer alike, with plain DDP and without recomputation."""
    spreads = {(s.tp_size, s.sequence_parallel) for found in priced.strategies for s in found}
    for spread in sorted(spreads):
        plain = restricted(
            priced,
            lambda s, spread=spread: (  # type: ignore[misc]
                (s.tp_size, s.sequence_parallel) == spread
                and s.data_parallel is DataParallel.DDP
                and not (isinstance(s, LayerStrategy) and s.recompute is not Recompute.NONE)
            ),
        )
        if plain is not None:
            yield from _solved(request, model, cluster, profiles, plain)


def _order(candidate: Candidate) -> tuple[object, ...]:
    """Less time, less memory, 1F1B, fewer microbatches, smaller strategies."""
    plan, evaluation = candidate
    return (
        evaluation.objective_ps,
        evaluation.estimate.memory_bytes,
        plan.schedule is not Schedule.ONE_F_ONE_B,
        plan.num_microbatches,
        len(plan.stages),
        plan.layers,
        plan.embedding,
        plan.head,
    )


def _decision(plan: Plan) -> tuple[object, ...]:
    """What a plan does, whatever it is called: schedules that give the same action lists are one."""
    count, chunks = len(plan.stages), len(plan.stages[0].layers)
    lists = tuple(actions(plan.schedule, count, plan.num_microbatches, stage, chunks) for stage in range(count))
    return plan.stages, plan.embedding, plan.head, plan.layers, plan.num_microbatches, lists


def _diverse(chosen: Candidate, best: Sequence[Candidate], plain: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """A few of the cases' best plans, by ascending closed form: such as differ most from the chosen one come first.

    First the best of each other pp_size, then the best plain plan, then of each other microbatch count, then the rest.
    """
    other_sizes = _firsts(chosen, best, lambda plan: len(plan.stages))
    other_counts = _firsts(chosen, best, lambda plan: plan.num_microbatches)
    taken: list[Candidate] = []
    known = {_decision(chosen.plan)}
    for candidate in (*other_sizes[: _MOST_RUNNERS_UP - len(plain)], *plain, *other_counts, *best):
        if len(taken) < _MOST_RUNNERS_UP and _decision(candidate.plan) not in known:
            known.add(_decision(candidate.plan))
            taken.append(candidate)
    return tuple(sorted(taken, key=_order))


def _firsts(chosen: Candidate, best: Sequence[Candidate], shape: Callable[[Plan], int]) -> list[Candidate]:
    """The best candidate of each shape but the chosen one's."""
    seen = {shape(chosen.plan)}
    firsts = []
    for candidate in best:
        if (this := shape(candidate.plan)) not in seen:
            seen.add(this)
            firsts.append(candidate)
    return firsts


def _infeasible(priced: Sequence[PricedCase], budget_bytes: int, process_bytes: int) -> Infeasible:
    """What the case with the smallest need lacks."""
    needs = [(least_memory(here.problem), here.case) for here in priced]
    need, case = min(needs, key=lambda found: found[0].memory_bytes)
    least_bytes = need.memory_bytes + process_bytes
    missing_bytes = least_bytes - budget_bytes
    # Rounded up to a number that is read back as enough.
    least_gib = ceil(least_bytes / _GIB * 1e6) / 1e6
    return Infeasible(
        f"no plan fits {budget_bytes} bytes a rank: even the leanest ({_words(case)}) lacks {missing_bytes} bytes "
        f"in pipeline stage {need.stage}: raise memory_gib to at least {least_gib:.6f}",
        missing_bytes,
        least_bytes,
    )


def _words(case: Case) -> str:
    return f"pp_size {case.pp_size}, {case.num_microbatches} microbatches, {case.schedule}"
