"""A real pipeline against its simulation: the same order on every rank, and every cause before its effect."""

from itertools import pairwise
from statistics import median

import pytest
from forked_command import forked_command
from random_plans import cluster_of
from tiny_models import tiny

from shardwright.io import read_document, write_document
from shardwright.types.measurement import Measurement, PassTime, PlanMeasurement
from shardwright.types.plan import PipelineStage, Plan, Plans, Precision, Schedule
from shardwright.types.strategy import LayerStrategy, Strategy
from shardwright_search.simulation.simulator import Simulation, StageTimes, simulate

DeviceGroup = tuple[str, int, int]
"""Of a pass in the pipeline: its kind, microbatch and layer range, counted through all stages and chunks."""

UNEQUAL, IN_TURNS = (((0, 3),), ((3, 4),)), (((0, 1), (2, 3)), ((1, 2), (3, 4)))
PLANS = {
    "gpipe": (Schedule.GPIPE, UNEQUAL, 3),
    "1f1b": (Schedule.ONE_F_ONE_B, UNEQUAL, 4),
    "interleaved": (Schedule.INTERLEAVED_1F1B, IN_TURNS, 4),
    "interleaved, with a rest": (Schedule.INTERLEAVED_1F1B, IN_TURNS, 5),
}


def _plan(name: str) -> Plan:
    """Two pipeline stages of a rank each."""
    schedule, ranges, num_microbatches = PLANS[name]
    model, one = tiny("llama", vocab_size=64), {"tp_size": 1, "dp_size": 1}
    return Plan(
        name=name,
        model=model,
        cluster=cluster_of(2),
        global_batch_size=2 * num_microbatches,
        num_microbatches=num_microbatches,
        schedule=schedule,
        precision=Precision(parameters="float32", compute="float32", reduce="float32"),
        stages=tuple(PipelineStage(ranks=(rank,), layers=layers) for rank, layers in enumerate(ranges)),
        embedding=Strategy(**one),
        head=Strategy(**one),
        layers=tuple(LayerStrategy(type=type_, **one) for type_ in model.layers),
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PlanMeasurement]:
    folder = tmp_path_factory.mktemp("timeline")
    write_document(folder / "plans.json", Plans(plans=tuple(map(_plan, PLANS))))
    asked = ["--steps", 3, "--warmup-steps", 1, "--out", folder / "out.json"]
    done = forked_command(["measure", folder / "plans.json", *asked])
    _, err = done.communicate(timeout=300)
    assert done.returncode == 0, err
    return {found.plan.name: found for found in read_document(folder / "out.json", Measurement).plans}


def _range_number(stage: int, chunk: int) -> int:
    return 2 * chunk + stage


def _simulated(found: PlanMeasurement) -> Simulation:
    """The plan's step from the median times of its measured passes."""
    plan, times = found.plan, {}
    for rank in found.ranks:
        for one in rank.passes:
            own = times.setdefault(_range_number(rank.stage, one.chunk), {"forward": [], "backward": []})
            own[one.kind].append(round(one.time_s * 1e12))
    ranges = [
        StageTimes(round(median(times[i]["forward"])), round(median(times[i]["backward"])), 0, 0, 0)
        for i in range(len(times))
    ]
    return simulate(ranges, plan.schedule, plan.num_microbatches, len(plan.stages[0].layers))


@pytest.mark.parametrize("name", PLANS)
def test_every_rank_acts_in_the_order_of_the_simulation(measured: dict[str, PlanMeasurement], name: str) -> None:
    events = _simulated(measured[name]).events
    for rank in measured[name].ranks:
        passes = sorted(rank.passes, key=lambda one: one.start_s)
        wanted = [(str(e.kind), e.microbatch, e.chunk) for e in events if e.stage == rank.stage]
        assert [(one.kind, one.microbatch, one.chunk) for one in passes] == wanted
        assert all(one.start_s + one.time_s <= other.start_s for one, other in pairwise(passes))


@pytest.mark.parametrize("name", PLANS)
def test_across_ranks_every_cause_comes_before_its_effect(measured: dict[str, PlanMeasurement], name: str) -> None:
    """Under one and the same shift of the clocks, for each rank counts from its own start of the step.

    Messages from rank 0 tell how far rank 1's clock can be behind at most, messages to rank 0 how far ahead.
    """
    passes: dict[DeviceGroup, tuple[int, PassTime]] = {}
    for rank in measured[name].ranks:
        for one in rank.passes:
            passes[one.kind, one.microbatch, _range_number(rank.stage, one.chunk)] = rank.rank, one
    slack: dict[tuple[int, int], list[float]] = {(0, 1): [], (1, 0): []}
    for (kind, microbatch, number), (rank, one) in passes.items():
        following = passes.get((kind, microbatch, number + (1 if kind == "forward" else -1)))
        if following is not None:
            slack[rank, following[0]].append(following[1].start_s - one.start_s - one.time_s)
        if kind == "forward":
            _, back = passes["backward", microbatch, number]
            assert one.start_s + one.time_s <= back.start_s
    ranges = len(measured[name].plan.stages[0].layers) * 2
    assert sum(map(len, slack.values())) == 2 * measured[name].plan.num_microbatches * (ranges - 1)
    assert min(slack[0, 1]) + min(slack[1, 0]) >= 0
