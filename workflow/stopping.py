"""The time before its limit at which a job of Slurm asks for the signal that lets a run stop in order."""

import os
from math import ceil
from pathlib import Path

from shardwright_formats.io import BadInput, read_document
from shardwright_formats.types import Plan, Prediction

START_S = 30.0
"""Seconds for the signal's way to the ranks and their end, besides steps and saves: an assumption."""
SAVE_BYTES_PER_S = 200e6
"""Bytes per second that a shared file system takes in: a low assumption; a run's `grace_s` overrides it."""
_STATE_BYTES = 12
"""Bytes of a parameter in a checkpoint: itself and AdamW's two moments, in 32 bits."""
_SAVES = 2
"""Number of saves to allow for: one may be under way when the signal comes."""
_STEPS = 2
"""Number of steps to allow for: the one that the signal comes in, and one in case steps are slower than predicted."""


def signal_lead_s(plan: Path, prediction: Path, grace_s: float | None, runtime_min: int) -> int:
    """Return the seconds before a job's end at which Slurm is to signal it: `grace_s`, else the time of a stop.

    A stop takes two predicted steps, two saves and a start. Raises FileNotFoundError while the files are not there yet,
    BadInput where half of the job would be spent so.
    """
    lead_s = grace_s
    if lead_s is None:
        for file in (plan, prediction):
            os.stat(str(file))
        found = read_document(plan, Plan)
        save_s = _STATE_BYTES * found.model.parameter_count / SAVE_BYTES_PER_S
        lead_s = START_S + _STEPS * _predicted_step_s(found, read_document(prediction, Prediction)) + _SAVES * save_s
    if lead_s > 30 * runtime_min:
        what = f"a stop in order takes up to {ceil(lead_s)} s of a job of {runtime_min} min"
        raise BadInput(plan, what, "raise node_types.<name>.slurm.runtime_min")
    return ceil(lead_s)


def _predicted_step_s(plan: Plan, prediction: Prediction) -> float:
    """Return the predicted step time of the plan: the chosen one or, if the measured winner was selected, that one."""
    estimates = {prediction.plan_sha256: prediction.estimate}
    estimates |= {runner_up.plan.sha256: runner_up.estimate for runner_up in prediction.runners_up}
    return estimates[plan.sha256].simulated_step_time_s
