"""The prediction that stands beside a searched or evaluated plan."""

from collections.abc import Mapping
from pathlib import Path

from shardwright_formats.files import sha256_of_file
from shardwright_formats.plan import Plan
from shardwright_formats.prediction import Prediction, Proof, RunnerUp
from shardwright_search.evaluate import Evaluation
from shardwright_search.optimal import NEAR, Found
from shardwright_search.request import SearchRequest

__all__ = ["prediction_of_evaluated", "prediction_of_searched", "prediction_path"]


def prediction_path(plan_path: Path) -> Path:
    """Where the prediction of a plan file lies."""
    return plan_path.with_suffix(".prediction.json")


def prediction_of_evaluated(plan: Plan, evaluation: Evaluation, files: Mapping[str, Path]) -> Prediction:
    """What is believed about a plan that was given."""
    return Prediction(
        plan_sha256=plan.sha256,
        memory_budget_bytes=None,
        estimate=evaluation.estimate,
        proof=None,
        runners_up=(),
        warnings=evaluation.warnings,
        inputs_sha256={role: sha256_of_file(path) for role, path in files.items()},
    )


def prediction_of_searched(
    found: Found, request: SearchRequest, budget_bytes: int, files: Mapping[str, Path]
) -> Prediction:
    """What is believed about a plan that was searched, with the proof and the plans it was preferred to."""
    plan, evaluation = found.chosen
    objective_s = evaluation.estimate.objective_s
    return Prediction(
        plan_sha256=plan.sha256,
        memory_budget_bytes=budget_bytes,
        estimate=evaluation.estimate,
        proof=Proof(
            objective="closed form",
            objective_s=objective_s,
            objective_bound_s=found.optimum_s,
            gap=objective_s / found.optimum_s - 1,
            scope=_scope(request),
            examined=found.examined,
            solved=found.solved,
        ),
        runners_up=tuple(RunnerUp(plan=c.plan, estimate=c.evaluation.estimate) for c in found.runners_up),
        warnings=evaluation.warnings,
        inputs_sha256={role: sha256_of_file(path) for role, path in files.items()},
    )


def _scope(request: SearchRequest) -> str:
    def names(field: str) -> str:
        return ", ".join(str(value) for value in getattr(request, field) or ("every divisor",))

    fields = ("pp_sizes", "tp_sizes", "num_microbatches", "schedules")
    kinds = ("data_parallel", "sequence_parallel", "recompute")
    listed = "; ".join(f"{field} {names(field)}" for field in (*fields, *kinds))
    return (
        "no plan of this space has a smaller closed form than objective_bound_s: any cut of the layers into pipeline "
        "stages of equal width with a layer or more each, any strategy for each layer, the embedding and the head, "
        f"consecutive tensor-parallel ranks, {listed}; among the cases' best plans within {NEAR:.0%} of it "
        "the one with the least simulated time was taken"
    )
