"""Split backward passes in several chunks: cut, simulated, priced, searched, exported; refused by name elsewhere."""

import random
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from shardwright.estimate.weight_passes import NO_WEIGHT_PASS, WeightPass
from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.plan.schedules.passes import Pass
from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import EMBEDDING, HEAD, DataParallel, Schedule
from shardwright_search.commands.prediction import prediction_of_searched
from shardwright_search.cost_model import stage_costs
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import System, UniformRequest
from shardwright_search.search import find_best
from shardwright_search.simulation.simulator import StageTimes, lower_bound_ps, simulate, step_time_ps
from shardwright_search.split_backward import even_ranges
from shardwright_search.systems.entry import Setting
from shardwright_search.systems.registry import SYSTEMS
from shardwright_search.uniform_plan import uniform_plan

SEVERAL = [schedule for schedule in Schedule if schedule.splits and schedule.interleaves]
LLAMA = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
TITAN = {Schedule.INTERLEAVED_ZERO_BUBBLE: "InterleavedZeroBubble", Schedule.ZERO_BUBBLE_V: "ZBVZeroBubble"}


def exported(schedule: Schedule, system: System, make, **changes: object):
    model = model_of_config(LLAMA, "m", 64, "config.json")
    compute = "bfloat16" if system is System.MEGATRON_BRIDGE else "float32"
    request = UniformRequest(
        global_batch_size=16, num_microbatches=4, pp_size=2, layer_ranges=2, schedule=schedule,
        precision_compute=compute, data_parallel=DataParallel.ZERO2, **changes,
    )  # fmt: skip
    plan = uniform_plan("mine", request, model, make.cluster(4))
    return plan, SYSTEMS[system].export(plan, "plan.json")


def test_ranges_have_the_least_sum_of_squares() -> None:
    draw = random.Random(0)
    for _ in range(100):
        layers = draw.randint(2, 7)
        count, times = draw.randint(2, min(6, layers + 2)), [draw.randint(1, 9) for _ in range(layers + 2)]

        def squares(ranges, times=times) -> int:
            inner = [sum(times[low + 1 : high + 1]) for low, high in ranges]
            return sum(x * x for x in (inner[0] + times[0], *inner[1:-1], inner[-1] + times[-1]))

        every = (list(pairwise((0, *cuts, layers))) for cuts in combinations(range(layers + 1), count - 1))
        least = min(squares(ranges) for ranges in every if all(low < high for low, high in ranges[1:-1]))
        found = even_ranges(times, count)
        assert len(found) == count and squares(found) == least


@pytest.mark.parametrize("schedule", SEVERAL)
def test_the_simulated_step_is_the_played_list(schedule: Schedule) -> None:
    """Of random times and messages: each pass begins when its stage is free and what it needs has come."""
    draw = random.Random(str(schedule))
    for p, m in ((2, 3), (3, 7), (4, 8), (4, 4)):
        way = schedule.way(p, 2)
        ranges = []
        for (here, _), (there, _) in zip(way, (*way[1:], way[-1]), strict=True):
            times = [draw.randint(1, 9) for _ in range(3)]
            ranges.append(StageTimes(*times[:2], 0 if here == there else 1, 0, 0, further_ps={Pass.WEIGHT: times[2]}))
        step_ps = simulate(ranges, schedule, m, 2).step_ps
        assert step_ps == step_time_ps(ranges, schedule, m, 2) == _played(ranges, schedule, p, m)
        assert lower_bound_ps(ranges, m, 2, schedule.turns) <= step_ps


def _played(ranges, schedule: Schedule, p: int, m: int) -> int:
    way, over, free = schedule.way(p, 2), {}, [0] * p
    waiting = [list(schedule_of(schedule).actions(p, m, stage, 2)) for stage in range(p)]
    while any(waiting):
        for stage, own in enumerate(waiting):
            while own:
                kind, i, chunk = own[0]
                here = way.index((stage, chunk))
                before = here - kind.way
                if not kind.way:
                    needs, sent = (Pass.BACKWARD, here, i), 0
                elif not 0 <= before < len(way):
                    needs, sent = (Pass.FORWARD, here, i), 0
                else:
                    needs, sent = (kind, before, i), ranges[min(here, before)].send_ps
                first = kind is Pass.FORWARD and here == 0
                if not first and needs not in over:
                    break
                takes = ranges[here].pass_times(kind, last=False).busy_ps
                begins = free[stage] if first else max(free[stage], over[needs] + sent)
                over[kind, here, i] = free[stage] = begins + takes
                own.pop(0)
    return max(free)


@pytest.mark.parametrize("schedule", SEVERAL)
def test_the_search_finds_a_plan_by_simulation_near_the_best_of_1f1b(make, monkeypatch, schedule: Schedule) -> None:
    block = WeightPass(0.45, 1000)
    weight_pass = lambda model, name, *_: block if name == "block" else NO_WEIGHT_PASS  # noqa: E731
    monkeypatch.setattr(stage_costs, "weight_pass", weight_pass)
    model, cluster = make.model(8), make.cluster(2)
    given = model, cluster, make.profiles(model, cluster), Path("s.json"), lambda line: None
    request = make.request(num_microbatches=[4], pp_sizes=[2])
    plain = find_best(replace(request, schedules=(Schedule.ONE_F_ONE_B,)), *given)
    asked = replace(request, schedules=(Schedule.ONE_F_ONE_B, schedule))
    found = find_best(asked, *given)
    plan, estimate = found.chosen.plan, found.chosen.evaluation.estimate
    assert plan.schedule is schedule and found.split > 0 and [len(stage.layers) for stage in plan.stages] == [2, 2]
    assert (plan.stage_of(EMBEDDING), plan.stage_of(HEAD)) == (0, 0 if schedule.turns else 1)
    assert estimate.simulated_step_time_s < plain.chosen.evaluation.estimate.simulated_step_time_s
    assert estimate.simulated_lower_bound_s <= estimate.simulated_step_time_s
    assert (found.optimum_s, found.bound_s) == (plain.optimum_s, plain.bound_s)
    told = prediction_of_searched(found, asked, (1 << 30,) * 2, {}).proof.scope
    assert f"under {schedule} was taken; how much faster another plan" in told
    again = evaluate(plan, given[2]).estimate
    assert again.simulated_step_time_s == estimate.simulated_step_time_s


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("schedule", SEVERAL)
def test_systems_have_them_or_refuse_them_by_name(make, schedule: Schedule, system: System) -> None:
    if system is System.TORCHTITAN and schedule in TITAN:
        plan, found = exported(schedule, system, make)
        assert f'pipeline_parallel_schedule = "{TITAN[schedule]}"' in found.text
        assert any("torch orders the passes" in note for note in found.notes)
        read = SYSTEMS[system].read(found.text, "torchtitan.toml", Setting(plan.model, plan.cluster, 16)).plan
        assert (read.schedule, read.stages) == (schedule, plan.stages)
        return
    with pytest.raises(BadInput, match=rf"cannot express (the schedule {schedule}|2 pipeline stages|\d layer ranges)"):
        exported(schedule, system, make)


def test_what_torch_refuses_is_not_exported(make) -> None:
    with pytest.raises(BadInput, match="cannot express the schedule interleaved_zero_bubble: choose gpipe or 1f1b"):
        model = model_of_config(LLAMA, "m", 64, "config.json")
        request = UniformRequest(
            global_batch_size=16, num_microbatches=4, pp_size=2, schedule=Schedule.INTERLEAVED_ZERO_BUBBLE,
            precision_compute="float32", data_parallel=DataParallel.ZERO2,
        )  # fmt: skip
        plan = uniform_plan("mine", request, model, make.cluster(4))
        SYSTEMS[System.TORCHTITAN].export(plan, "plan.json")
    with pytest.raises(BadInput, match="compile under zero_bubble_v"):
        exported(Schedule.ZERO_BUBBLE_V, System.TORCHTITAN, make, compile=True)
