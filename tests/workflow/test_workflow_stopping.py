"""When a run asks for the signal at which it stops in order, and what a changed prediction reruns."""

import json

import msgspec
import pytest
from sample_results import write_sample_results

from shardwright_formats.io import BadInput, read_document, write_document
from shardwright_formats.types import Plan, Prediction
from slurm_jobs import SAVE_BYTES_PER_S, START_S, signal_lead_s


@pytest.fixture
def files(tmp_path):
    write_sample_results(tmp_path, search="roomy", run="demo")
    return tmp_path / "plans/roomy.json", tmp_path / "plans/roomy.prediction.json"


def test_the_signal_comes_two_steps_and_two_saves_before_the_end(files):
    plan, prediction = read_document(files[0], Plan), read_document(files[1], Prediction)
    for step_s in (0.5, 100.0):
        slow = msgspec.structs.replace(prediction.estimate, simulated_step_time_s=step_s)
        write_document(files[1], msgspec.structs.replace(prediction, estimate=slow))
        saves_s = 2 * 12 * plan.model.parameter_count / SAVE_BYTES_PER_S
        assert 0 <= signal_lead_s(*files, None, 1440) - (START_S + 2 * step_s + saves_s) < 1
    assert signal_lead_s(*files, 12.5, 1440) == 13


def test_a_selected_runner_up_has_a_step_of_its_own(files):
    prediction = read_document(files[1], Prediction)
    slow = msgspec.structs.replace(prediction.runners_up[0].estimate, simulated_step_time_s=300.0)
    runner_up = msgspec.structs.replace(prediction.runners_up[0], estimate=slow)
    write_document(files[1], msgspec.structs.replace(prediction, runners_up=(runner_up,)))
    write_document(files[0], runner_up.plan)
    assert signal_lead_s(*files, None, 1440) > 630


def test_a_job_that_is_too_short_to_stop_in_order_is_refused(files):
    with pytest.raises(BadInput, match=r"takes up to 31 s of a job of 1 min: raise node_types\.<name>\.slurm"):
        signal_lead_s(*files, None, 1)


def test_another_prediction_of_the_same_plan_is_no_reason_to_train_again(finished):
    prediction = finished.folder / "results/plans/roomy.prediction.json"
    changed = json.loads(prediction.read_text())
    changed["estimate"]["simulated_step_time_s"] *= 100
    prediction.write_text(json.dumps(changed))
    assert "run" not in finished.snakemake("runs", "-n").jobs
