"""Six schedules as AMD's Primus measured them, Llama 2 7B's layers on eight MI300X, against what is predicted of them.

Batch, length and states are not published. The FLOPs of a token are those of 16 layers at 4096 tokens; memory is in
GiB, for its shares are of 192 GiB; moments in bfloat16 are an assumption, without which 11 to 30 % more is predicted.
The row "zbb" takes as long as split passes in two chunks, as it is labelled, and holds what they do in one.
"""

import csv
from pathlib import Path

import pytest

from shardwright.models.description import model_of_config
from shardwright.models.registry import read_presets
from shardwright.types import DataParallel, Plan, Schedule
from shardwright_search.advise.question import question_of
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions, UniformRequest
from shardwright_search.uniform_plan import uniform_plan

FILE = Path(__file__).parents[2] / "../shared/reference/schedules/primus_schedules.csv"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="the measured schedules are not beside the clone")
READ = {
    "1f1b": Schedule.ONE_F_ONE_B,
    "1f1b-interleaved": Schedule.INTERLEAVED_1F1B,
    "zbb": Schedule.INTERLEAVED_ZERO_BUBBLE,
    "zbv": Schedule.ZERO_BUBBLE_V,
    "v-half": Schedule.V_HALF,
    "v-min": Schedule.V_MIN,
}
LAYERS, LENGTH, STAGES = 16, 4096, 8
NOT_OF_THE_ALLOCATOR = ("process", "communicators")


def rows() -> list[dict[str, str]]:
    with FILE.open() as file:
        return [row for row in csv.DictReader(file) if row["model"] == "Llama2-7B"]


def predicted(microbatches: int, one_chunk: bool) -> dict[str, tuple[float, float]]:
    """Step time in seconds and GiB on the fullest rank of each row; `one_chunk`: of "zbb"."""
    options = AdviseOptions(model="llama-2-7b", gpus="1x8:MI300X", batch=microbatches, seq=LENGTH, target="megatron")
    question = question_of(options)
    config = {**read_presets()["llama-2-7b"].config, "num_hidden_layers": LAYERS}
    model = model_of_config(config, question.model.name, LENGTH, "config.json")
    found = {}
    for name, schedule in READ.items():
        if one_chunk and name == "zbb":
            schedule = Schedule.ZERO_BUBBLE
        request = UniformRequest(
            global_batch_size=microbatches, num_microbatches=microbatches, pp_size=STAGES, schedule=schedule,
            layer_ranges=2 if schedule.interleaves else 1, precision_compute="bfloat16", optimizer="adamw-bf16",
            data_parallel=DataParallel.ZERO2, attention=question.request.attention,
        )  # fmt: skip
        plan: Plan = uniform_plan(name, request, model, question.cluster)
        estimate = evaluate(plan, question.profiles, timeline=False).estimate
        held = (stage.memory_terms_bytes for stage in estimate.stages)
        most = max(sum(size for term, size in each.items() if term not in NOT_OF_THE_ALLOCATOR) for each in held)
        found[name] = estimate.simulated_step_time_s, most / 2**30
    return found


@pytest.mark.parametrize("microbatches", [16, 32])
def test_the_six_are_in_the_order_in_which_they_were_measured(microbatches: int) -> None:
    measured = {row["schedule"]: float(row["tokens_per_s_per_device"]) for row in rows()}
    steps = {name: step_s for name, (step_s, _) in predicted(microbatches, one_chunk=False).items()}
    assert sorted(steps, key=steps.__getitem__) == sorted(measured, key=measured.__getitem__, reverse=True)


def test_their_memory_is_within_a_tenth() -> None:
    found = predicted(32, one_chunk=True)
    for row in rows():
        assert found[row["schedule"]][1] == pytest.approx(float(row["max_memory_gb"]), rel=0.1), row["schedule"]
