"""A schedule that is entered as docs/architecture.md says is searched, priced and simulated, or refused by name."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.plan.schedules import registry
from shardwright.plan.schedules.schedule import PipelineSchedule
from shardwright.types import DataParallel, Schedule
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import System, UniformRequest
from shardwright_search.search import find_best
from shardwright_search.systems.registry import SYSTEMS
from shardwright_search.uniform_plan import uniform_plan

CONFIG = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def _member() -> Schedule:
    """A name that `Schedule` does not have."""
    member = str.__new__(Schedule, "eager")
    member._name_, member._value_ = "EAGER", "eager"
    member.interleaves = member.splits = member.turns = False
    return member


EAGER = _member()


class _Eager(PipelineSchedule):
    """1F1B that does twice as many forward passes ahead, so that sends are hidden."""

    name = EAGER

    def num_ahead(self, num_stages, num_microbatches, stage, num_chunks):
        return 2 * (num_stages - 1 - stage)


@pytest.fixture(autouse=True)
def _entered(monkeypatch):
    monkeypatch.setitem(registry._SCHEDULES, EAGER, _Eager())


def test_a_made_up_schedule_is_searched_priced_and_simulated(make):
    """It takes as long as 1F1B by the closed form, holds more, and may be faster by what sends take."""
    model, cluster = make.model(4), make.cluster(2)
    profiles = make.profiles(model, cluster)
    kinds = EAGER, Schedule.ONE_F_ONE_B
    asked = make.request(num_microbatches=[4], pp_sizes=[2])
    mine, usual = (
        find_best(replace(asked, schedules=(kind,)), model, cluster, profiles, Path("s.json"), lambda line: None)
        for kind in kinds
    )
    assert mine.chosen.plan.schedule is EAGER and mine.optimum_s == mine.bound_s == usual.optimum_s
    eager, other = (evaluate(replace(mine.chosen.plan, schedule=kind), profiles).estimate for kind in kinds)
    assert eager.objective_s == other.objective_s and eager.memory_bytes > other.memory_bytes
    assert eager.simulated_step_time_s < other.simulated_step_time_s


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_without_the_schedule_refuses_it_by_name(make, system):
    """Those without pipelines refuse the pipeline."""
    model = model_of_config(CONFIG, "m", 64, "config.json")
    compute = "bfloat16" if system is System.MEGATRON_BRIDGE else "float32"
    request = UniformRequest(
        global_batch_size=16, num_microbatches=4, pp_size=2, precision_compute=compute, data_parallel=DataParallel.ZERO2
    )
    plan = uniform_plan("mine", replace(request, schedule=EAGER), model, make.cluster(4))
    with pytest.raises(BadInput, match=r"plan\.json: .* cannot express (the schedule eager|2 pipeline stages)"):
        SYSTEMS[system].export(plan, "plan.json")
