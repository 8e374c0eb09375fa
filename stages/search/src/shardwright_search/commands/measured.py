"""`shardwright-search select` and `correct`: the winner of the measured plans, and correction factors from them."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from shardwright_formats.command import show
from shardwright_formats.io import BadInput, NothingFits, atomic_path, read_document, sha256_of_file, write_document
from shardwright_formats.types import Correction, Measurement, Plan, PlanMeasurement, Prediction
from shardwright_search.commands.prediction import prediction_path, read_prediction
from shardwright_search.cost_model.calibration import Evidence, evidence_of, learned
from shardwright_search.cost_model.profiles import Profiles, read_profiles
from shardwright_search.options import CorrectOptions, SelectOptions


def select(options: SelectOptions) -> None:
    """Write the measured winner."""
    predicted = read_document(options.plan, Plan)
    prediction = read_prediction(options.plan, predicted)
    measurement = read_document(options.measurement, Measurement)
    measured = measurement.plans
    _check_alike(options.measurement, measurement, predicted)
    winner = fastest_that_fits(measured, _budget_bytes(options.plan, prediction), options.measurement)
    with atomic_path(options.out) as path:
        write_document(path, winner.plan)
        show(measurement_report(winner, measured, predicted, prediction))


def fastest_that_fits(measured: Sequence[PlanMeasurement], budget_bytes: int, file: Path) -> PlanMeasurement:
    """Return the plan with the least median time per sample among those whose fullest rank stayed within the budget.

    Times are compared at equal speed of the machine. Raises NothingFits, naming the file of the measurement.
    """
    if not measured:
        raise NothingFits(f"{file}: every plan ran out of memory: search with a smaller memory_gib")
    fitting = [each for each in measured if each.peak_bytes <= budget_bytes]
    if not fitting:
        missing = min(each.peak_bytes for each in measured) - budget_bytes
        raise NothingFits(
            f"{file}: no measured plan fits {budget_bytes} bytes a rank: even the leanest took {missing} bytes more: "
            "raise memory_gib, or search with a correction"
        )
    return min(fitting, key=_sample_s)


def measurement_report(
    winner: PlanMeasurement, measured: Sequence[PlanMeasurement], plan: Plan, prediction: Prediction
) -> str:
    """Return in one line which plan won and by how much."""
    roles = {plan.sha256: "the predicted best"}
    for number, other in enumerate(prediction.runners_up, start=1):
        roles.setdefault(other.plan.sha256, f"runner-up {number}")

    def named(each: PlanMeasurement) -> str:
        role = roles.get(each.plan.sha256, f"plan {each.plan.name}")
        return f"{role} ({len(each.plan.stages)} pipeline stage(s), {each.plan.num_microbatches} microbatch(es))"

    line = f"{plan.name}: {named(winner)} is the measured best, {median(winner.step_times_s) * 1e3:.1f} ms a step"
    predicted = next((each for each in measured if each.plan.sha256 == plan.sha256), None)
    if predicted is None:
        return f"{line}; the predicted best ran out of memory"
    if winner is not predicted:
        return f"{line}; {named(predicted)} takes {_more(predicted, winner)} and {predicted.peak_bytes} bytes a rank"
    others = [each for each in measured if each is not winner]
    if not others:
        return f"{line}; no other was measured"
    next_best = min(others, key=_sample_s)
    return f"{line}; {named(next_best)} takes {_more(next_best, winner)} and {next_best.peak_bytes} bytes a rank"


def _more(other: PlanMeasurement, winner: PlanMeasurement) -> str:
    return f"{_sample_s(other) / _sample_s(winner) - 1:+.1%} time a sample"


def _sample_s(measured: PlanMeasurement) -> float:
    """Return the time of a sample at equal speed: in times of the reference workload."""
    return median(measured.step_times_s) / measured.reference_s / measured.plan.global_batch_size


def _budget_bytes(path: Path, prediction: Prediction) -> int:
    if prediction.memory_budget_bytes is None:
        raise BadInput(prediction_path(path), "has no memory budget", "take a plan that was searched")
    return prediction.memory_budget_bytes


def _check_alike(file: Path, measurement: Measurement, plan: Plan) -> None:
    """Raise BadInput unless the plan itself was measured, beside plans for the same model and cluster only."""
    plans = [*(each.plan for each in measurement.plans), *(each.plan for each in measurement.failed)]
    if plan.sha256 not in {each.sha256 for each in plans}:
        raise BadInput(file, f"does not hold the plan {plan.name}", "measure the plan and its prediction again")
    for each in plans:
        if (each.model, each.cluster) != (plan.model, plan.cluster):
            raise BadInput(file, f"holds a plan of {each.model.name} on {each.cluster.name}", "measure apart")


def correct(options: CorrectOptions) -> None:
    """Write the correction that the measured plans teach."""
    profiles = read_profiles([options.hardware], [options.profile])
    evidence = [each for path in options.measurements for each in _evidence_in(path, profiles)]
    factors, warnings = learned(evidence)
    correction = Correction(
        factors=factors,
        plans_sha256=tuple(dict.fromkeys(each.plan_sha256 for each in evidence)),
        measurements_sha256=tuple(map(sha256_of_file, options.measurements)),
        hardware_sha256=sha256_of_file(options.hardware),
        profiles_sha256=(sha256_of_file(options.profile),),
        warnings=warnings,
    )
    lines = [
        f"{term}: {x.factor:.3f} x predicted ({x.lowest:.3f} to {x.highest:.3f}; {x.num_plans} plans)"
        for term, x in factors.items()
    ]
    with atomic_path(options.out) as path:
        write_document(path, correction)
        show("\n".join([*lines, *(f"warning: {warning}" for warning in warnings)]))


def _evidence_in(path: Path, profiles: Profiles) -> list[Evidence]:
    measurement = read_document(path, Measurement)
    if measurement.device != profiles.origin.device:
        problem = f"was measured on {measurement.device!r}, the profile on {profiles.origin.device!r}"
        raise BadInput(path, problem, "take the profiles of that device")
    if not measurement.plans:
        raise BadInput(path, "every plan of it ran out of memory", "measure plans that fit")
    return [one for measured in measurement.plans for one in evidence_of(measured, profiles)]
