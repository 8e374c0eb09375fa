"""Measured plans: times and memory by segment for every rank; what is counted agrees with what is known."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from shardwright_formats.errors import BadInput
from shardwright_formats.files import read_document, write_document
from shardwright_formats.measurement import Measurement, PlanMeasurement
from shardwright_formats.plan import GradientReduction, Plan, Plans
from shardwright_formats.strategy import DataParallel, Recompute
from shardwright_train.launch import Nodes
from shardwright_train.measure import segments_of_memory, timing_of_step
from shardwright_train.record import Interval, MemoryInterval
from shardwright_train.start import start_measure

PlanMaker = Callable[..., Plan]
REPEATS = 2


def _alike(plan: Plan, name: str, **layer_fields: object) -> Plan:
    layers = tuple(msgspec.structs.replace(layer, **layer_fields) for layer in plan.layers)  # type: ignore[arg-type]
    return msgspec.structs.replace(
        plan, name=name, layers=layers, num_microbatches=2, gradient_reduction=GradientReduction.DEFERRED
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, random_plan: PlanMaker) -> dict[str, PlanMeasurement]:
    folder = tmp_path_factory.mktemp("measure")
    shared = {"tp_size": 1, "dp_size": 2, "data_parallel": DataParallel.DDP}
    one_stage, two_stages = random_plan(1, 2, "float32", stages=1), random_plan(1, 2, "float32", stages=2)
    plans = (
        _alike(one_stage, "kept", **shared, recompute=Recompute.NONE),
        _alike(one_stage, "recomputed", **shared, recompute=Recompute.FULL),
        _alike(one_stage, "sharded", **(shared | {"data_parallel": DataParallel.ZERO3}), recompute=Recompute.NONE),
        _alike(two_stages, "pipeline", recompute=Recompute.NONE),
    )
    write_document(folder / "plans.json", Plans(plans=plans))
    start_measure([folder / "plans.json"], folder / "out.json", REPEATS, 1, Nodes())
    return {m.plan.name: m for m in read_document(folder / "out.json", Measurement).plans}


def test_every_rank_reports_every_segment_it_has(measured: dict[str, PlanMeasurement]) -> None:
    names = [[s.name for s in rank.segments] for rank in measured["kept"].ranks]
    assert names == [["embedding", "layers", "head"]] * 2
    assert [[s.name for s in r.segments] for r in measured["pipeline"].ranks] == [
        ["embedding", "layers"],
        ["layers", "head"],
    ]
    for rank in (rank for plan in measured.values() for rank in plan.ranks):
        repeats = len(rank.step_s)
        assert REPEATS <= repeats == len(rank.optimizer_s) <= 3 * REPEATS
        assert all(len(s.forward_s) == len(s.backward_s) == repeats for s in rank.segments)
        assert [s.name for s in rank.memory.segments] == [s.name for s in rank.segments]


def test_the_parts_of_a_step_are_no_longer_than_the_step(measured: dict[str, PlanMeasurement]) -> None:
    for rank in (rank for plan in measured.values() for rank in plan.ranks):
        for i, step_s in enumerate(rank.step_s):
            assert 0 < sum(s.forward_s[i] + s.backward_s[i] for s in rank.segments) + rank.optimizer_s[i] < step_s


def test_counted_states_are_those_of_the_shapes(measured: dict[str, PlanMeasurement]) -> None:
    for name, shards in (("kept", 1), ("sharded", 2)):
        model = measured[name].plan.model
        memory = measured[name].ranks[0].memory
        blocks = 4 * len(model.layers) * model.types["block"].parameter_count() // shards
        embedding_and_head = (
            measured["kept"].ranks[0].memory.parameters_bytes
            - 4 * len(model.layers) * model.types["block"].parameter_count()
        )
        assert memory.parameters_bytes == memory.gradients_bytes == blocks + embedding_and_head
        assert memory.optimizer_bytes == 2 * memory.parameters_bytes


def test_recompute_trades_memory_for_time(measured: dict[str, PlanMeasurement]) -> None:
    kept, recomputed = (measured[name].ranks[0] for name in ("kept", "recomputed"))
    layers = [next(s for s in rank.memory.segments if s.name == "layers") for rank in (kept, recomputed)]
    assert layers[1].activation_bytes < layers[0].activation_bytes / 4
    assert recomputed.memory.peak_bytes < kept.memory.peak_bytes


def test_replicas_count_the_same_memory(measured: dict[str, PlanMeasurement]) -> None:
    for plan in ("kept", "recomputed", "sharded"):
        first, second = (rank.memory for rank in measured[plan].ranks)
        assert first.segments == second.segments
        assert first.peak_bytes == second.peak_bytes


def test_a_step_is_cut_at_its_marks() -> None:
    times = [
        ("forward", 0.5), ("layers.forward", 3.0), ("forward", 0.5), ("layers.forward", 1.0),
        ("backward", 0.25), ("layers.backward", 2.0), ("backward", 0.25), ("layers.backward", 2.5),
        ("reduced", 0.125), ("optimizer", 4.0),
    ]  # fmt: skip
    timing = timing_of_step([Interval(*pair) for pair in times])
    assert timing.forward_s == {"layers": 1.0}, "the first forward pass also gathers"
    assert timing.backward_s == {"layers": 2.0}, "the last backward pass also reduces"
    assert timing.gradient_reduction_s == 0.5
    assert timing.optimizer_s == 4.0
    assert timing.step_s == sum(time_s for _, time_s in times)


def test_memory_is_told_apart_by_what_stays_and_what_was_held_for_a_moment() -> None:
    intervals = [
        MemoryInterval("layers.forward", 0, 100, 100),
        MemoryInterval("layers.forward", 100, 150, 180),
        MemoryInterval("layers.backward", 150, 90, 155),
        MemoryInterval("layers.backward", 90, 20, 97),
    ]
    (layers,) = segments_of_memory(intervals)
    assert (layers.activation_bytes, layers.forward_transient_bytes, layers.backward_transient_bytes) == (50, 30, 7)


def test_a_plan_for_another_number_of_nodes_is_refused(tmp_path: Path, random_plan: PlanMaker) -> None:
    write_document(tmp_path / "plan.json", random_plan(0, 2, "float32"))
    with pytest.raises(BadInput, match=r"plan\.json: the plan is for 1 nodes, --nnodes is 2"):
        start_measure([tmp_path / "plan.json"], tmp_path / "out.json", 1, 1, Nodes(2, 0, "127.0.0.1:1"))
    assert not (tmp_path / "out.json").exists()
