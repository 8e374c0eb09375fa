"""Corrections learned from measured plans: a factor for each term, and profiles with the factors applied."""

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from shardwright.io import BadInput, sha256_of_file
from shardwright.plan.schedules.passes import Pass, middle
from shardwright.types.hardware_profile import Collective
from shardwright.types.measurement import PlanMeasurement, RankMeasurement
from shardwright.types.plan import GradientReduction, Plan
from shardwright.types.prediction import Correction, CorrectionFactor, StagePrediction, Term
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import Profiles, Scaling, scaled

_FEWEST_PLANS = 3
"""With fewer plans a factor is called thin: their median is an extreme or a mean."""
_REDUCTIONS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)


class Evidence(NamedTuple):
    """One term on one rank of one measured plan, in seconds or bytes."""

    term: Term
    plan_sha256: str
    measured: float
    predicted: float
    limit: float = inf
    """The largest value to which a correction may raise the prediction: for memory, the bytes of the rank's device, as
    the plan ran on it."""


def evidence_of(measured: PlanMeasurement, profiles: Profiles) -> tuple[Evidence, ...]:
    """Return measurement and prediction of all terms that a measured plan can distinguish, for each rank.

    With one microbatch, backward pass and reduction cannot be told apart, so only the forward pass and memory are
    returned. A reduction after each microbatch is not returned: its predicted time is subtracted from the backward
    pass. Measured times are divided by the machine's slowdown since it was profiled. Raises BadInput as `evaluate`
    does.
    """
    stages = evaluate(measured.plan, profiles).estimate.stages
    slowdown = measured.slowdown(profiles.reference_s)
    return tuple(
        Evidence(term, measured.plan.sha256, value, predicted, max(value, _device_bytes(measured.plan, rank)))
        if term is Term.MEMORY
        else Evidence(term, measured.plan.sha256, value / slowdown, predicted)
        for rank in measured.ranks
        for term, value, predicted in _terms(measured, rank, stages[rank.stage], profiles.step_overhead_s)
        if predicted > 0
    )


def _device_bytes(plan: Plan, rank: RankMeasurement) -> int:
    return plan.cluster.of_rank(rank.rank).memory_bytes


def learned(evidence: Iterable[Evidence]) -> tuple[dict[Term, CorrectionFactor], tuple[str, ...]]:
    """Return the factor of each term, and warnings if evidence is thin or plans contradict each other."""
    by_term: dict[Term, dict[str, list[float]]] = {term: {} for term in Term}
    most = dict.fromkeys(Term, inf)
    for each in evidence:
        by_term[each.term].setdefault(each.plan_sha256, []).append(each.measured / each.predicted)
        most[each.term] = min(most[each.term], each.limit / each.predicted)
    factors: dict[Term, CorrectionFactor] = {}
    warnings: list[str] = []
    for term, ratios in by_term.items():
        if not ratios:
            warnings.append(f"{term}: no measured plan distinguishes it, so that it stays as predicted")
            continue
        # At the end of a step every rank waits for the slowest: the rank that waited least shows the time itself.
        plans = [min(ranks) if term is Term.STEP_END else median(ranks) for ranks in ratios.values()]
        if (factor := median(plans)) <= 0:
            warnings.append(f"{term}: noise outweighs it in the measured plans, so that it stays as predicted")
            continue
        if len(plans) < _FEWEST_PLANS:
            warnings.append(f"{term}: thin: {len(plans)} plan(s)")
        lowest, highest = min(plans), max(plans)
        if factor > most[term]:
            warnings.append(
                f"{term}: {most[term]:.3f}, not the median {factor:.3f}, by which a plan that ran would not fit"
            )
            factor = most[term]
            lowest = min(lowest, factor)
        if lowest < 1 < highest:
            share = f"from {lowest:.2f} to {highest:.2f} of what is predicted"
            warnings.append(f"{term}: plans contradict one another: {share}")
        num_ranks = sum(map(len, ratios.values()))
        factors[term] = CorrectionFactor(
            factor=factor, lowest=lowest, highest=highest, num_plans=len(plans), num_ranks=num_ranks
        )
    return factors, tuple(warnings)


def factor_of(correction: Correction, term: Term) -> float:
    """Return the factor of a term: 1 if there is none."""
    known = correction.factors.get(term)
    return 1.0 if known is None else known.factor


def check_learned_from(correction: Correction, file: Path, hardware: Path, profiles: Sequence[Path]) -> None:
    """Raise BadInput, naming the correction's file, if it was learned with other profiles than these."""
    given = (sha256_of_file(hardware), tuple(map(sha256_of_file, profiles)))
    if (correction.hardware_sha256, correction.profiles_sha256) != given:
        names = ", ".join(path.name for path in (hardware, *profiles))
        raise BadInput(file, f"was learned from other profiles than {names}", "learn a correction from these")


def corrected(profiles: Profiles, correction: Correction) -> Profiles:
    """Return the profiles with each time multiplied by its term's factor.

    The collectives of reductions are corrected, too. The factor of memory applies to a rank's total: it becomes part of
    `memory_factor`.
    """
    sync, end = factor_of(correction, Term.GRADIENT_SYNC), factor_of(correction, Term.STEP_END)
    scaling = Scaling(
        forward=factor_of(correction, Term.FORWARD),
        backward=factor_of(correction, Term.BACKWARD),
        reduction=sync,
        optimizer=end,
        step_overhead=end,
        memory=factor_of(correction, Term.MEMORY),
        collectives=[sync if point.collective in _REDUCTIONS else 1.0 for point in profiles.hardware.points.rows],
    )
    return scaled(profiles, scaling)


def _terms(
    measured: PlanMeasurement, rank: RankMeasurement, stage: StagePrediction, overhead_s: float
) -> Iterator[tuple[Term, float, float]]:
    """Yield each term that this rank can distinguish, with its measurement and its stage's prediction."""
    terms = stage.time_terms_s
    # Half of what is gathered and moved comes in forward, half in backward; neither is corrected here.
    overlapped_s = (terms["gathers"] + terms["redistribution"]) / 2
    forward_s = sum(median(segment.forward_s) for segment in rank.segments)
    yield Term.FORWARD, forward_s - overlapped_s, terms["forward"]
    yield Term.MEMORY, rank.memory.peak_bytes + rank.memory.process_bytes, stage.memory_bytes
    if measured.plan.num_microbatches == 1:
        return
    backward_s = sum(median(segment.backward_s) for segment in rank.segments)
    overlapped_s += terms["gradient_sync_every_microbatch"]
    yield Term.BACKWARD, backward_s - overlapped_s, terms["backward"]
    if measured.plan.gradient_reduction is GradientReduction.DEFERRED:
        yield Term.GRADIENT_SYNC, median(rank.gradient_reduction_s), terms["gradient_sync"]
    yield Term.STEP_END, _step_end_s(rank, measured.median_repeat), terms["optimizer"] + overhead_s


def _step_end_s(rank: RankMeasurement, repeat: int) -> float:
    """Return the seconds of a step in one repeat that are neither passes, nor waiting for messages, nor reduction.

    They are the optimizer's step and the overhead around it. As a profile counts the optimizer's fixed part in the
    step's overhead, the two are only known together.
    """
    backward_s: dict[int, float] = {}
    for each in rank.passes:
        if each.kind == "backward":
            backward_s[each.microbatch] = backward_s.get(each.microbatch, 0.0) + each.time_s
    passes = [backward_s[microbatch] for microbatch in sorted(backward_s)]
    waited_s = rank.gradient_reduction_s[repeat] - (passes[-1] - fmean(middle(passes, Pass.BACKWARD)))
    return rank.step_s[repeat] - sum(each.wait_s + each.time_s for each in rank.passes) - waited_s
