"""The numbers of the report, for programs."""

from collections.abc import Sequence
from typing import Any

import msgspec

from answer import fits_by, provenance
from results import Comparison, ProfileOutcome, RunOutcome, SearchOutcome
from shardwright_formats.display.node_types import node_type_uses
from shardwright_formats.display.plan_words import layers_summary


def numbers(
    searches: Sequence[SearchOutcome], runs: Sequence[RunOutcome], profiles: Sequence[ProfileOutcome] = ()
) -> bytes:
    """Return JSON by name: predictions and measurements of searches, runs and profiles; times in s, sizes in bytes."""
    every = {
        "searches": {search.name: _search(search) for search in searches},
        "runs": {run.name: {"result": run.result, "steps": run.steps} for run in runs},
        "profiles": {of.name: {"origin": of.profile.origin, "fits": of.profile.fits.rows} for of in profiles},
    }
    return msgspec.json.format(msgspec.json.encode(every), indent=1) + b"\n"


def _search(search: SearchOutcome) -> dict[str, Any]:
    prediction = search.prediction
    return {
        "plan_sha256": prediction.plan_sha256,
        "memory_budget_bytes": prediction.memory_budget_bytes,
        "proof": prediction.proof,
        "warnings": prediction.warnings,
        "not_measured": list(provenance(search)),
        "plans": {of.role: _plan(search, of) for of in search.comparisons},
        "correction": None if search.correction is None else search.correction.factors,
    }


def _plan(search: SearchOutcome, of: Comparison) -> dict[str, Any]:
    return {
        "plan_sha256": of.plan.sha256,
        "selected": of.taken,
        "global_batch_size": of.plan.global_batch_size,
        "num_microbatches": of.plan.num_microbatches,
        "pp_size": len(of.plan.stages),
        "layers": layers_summary(of.plan),
        "predicted": of.estimate,
        "predicted_memory_bytes": of.estimate.memory_bytes,
        "measured": of.measured,
        "measured_step_time_s": of.measured_time_s,
        "measured_memory_bytes": of.measured_bytes,
        "slowdown": of.slowdown,
        "fits_by_bytes": fits_by(search, of),
        "node_types": [use._asdict() for use in node_type_uses(of.plan, of.estimate)],
    }
