"""A table with one row for each search."""

import csv
import io
from collections.abc import Sequence

from results import SearchOutcome
from shardwright_formats.display.plan_words import layers_summary

_COLUMNS = (
    "search", "model", "cluster", "ranks", "global_batch_size", "memory_budget_bytes", "pp_size", "num_microbatches",
    "schedule", "layers", "predicted_step_time_s", "samples_per_s", "usd_per_step", "predicted_memory_bytes", "gap",
    "plan_sha256",
)  # fmt: skip


def table(searches: Sequence[SearchOutcome]) -> str:
    """Return the rows as CSV, with a header."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows(_row(search) for search in searches)
    return out.getvalue()


def _row(search: SearchOutcome) -> tuple[object, ...]:
    plan, prediction = search.plan, search.prediction
    estimate = prediction.estimate
    return (
        search.name,
        plan.model.name,
        plan.cluster.name,
        plan.world_size,
        plan.global_batch_size,
        prediction.memory_budget_bytes,
        len(plan.stages),
        plan.num_microbatches,
        str(plan.schedule),
        layers_summary(plan),
        estimate.simulated_step_time_s,
        estimate.samples_per_s,
        estimate.usd_per_step,
        estimate.memory_bytes,
        None if prediction.proof is None else prediction.proof.gap,
        plan.sha256,
    )
