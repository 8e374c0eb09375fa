"""The peak memory that `check` finds in a shortened step: that of the whole one, measured ones and predictions."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from estimated import predicted_bytes
from forked_command import forked_command
from random_plans import cluster_of, precision_of
from rest_long import rest_long
from tiny_models import SEQUENCE_LENGTH, tiny

from shardwright.io import read_document, write_document
from shardwright.types import (
    HEAD,
    DataParallel,
    GradientReduction,
    LayerStrategy,
    Measurement,
    PipelineStage,
    Plan,
    Plans,
    Schedule,
    Strategy,
)
from shardwright_train.dry_run import check_roles, simulate_peak, simulate_step
from shardwright_train.models.base import family_named

GPIPE, IN_TURN, INTERLEAVED = Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED_1F1B
SPLIT = Schedule.ZERO_BUBBLE
FAMILY = family_named("llama", "test")


class Case(NamedTuple):
    """A pipeline of one layer in each range, two data-parallel ranks in each stage, and the kinds of states."""

    schedule: Schedule
    stages: int
    num_microbatches: int
    chunks: int = 1
    kind: DataParallel = DataParallel.DDP
    dtype: str = "float32"
    reduction: GradientReduction = GradientReduction.DEFERRED
    dp_size: int = 2

    def plan(self) -> Plan:
        ranges, width, way = self.stages * self.chunks, self.dp_size, self.schedule.way(self.stages, self.chunks)
        model = tiny("llama", vocab_size=64, num_hidden_layers=ranges)
        sharding: dict[str, Any] = {"tp_size": 1, "dp_size": width, "data_parallel": self.kind}
        return Plan(
            name=f"{self.schedule} {self.stages} {self.num_microbatches}",
            model=model,
            cluster=cluster_of(self.stages * width),
            global_batch_size=2 * width * self.num_microbatches,
            num_microbatches=self.num_microbatches,
            schedule=self.schedule,
            gradient_reduction=self.reduction,
            precision=precision_of(self.dtype),
            stages=tuple(
                PipelineStage(
                    ranks=tuple(range(i * width, (i + 1) * width)),
                    layers=tuple((at, at + 1) for at, (stage, _) in enumerate(way) if stage == i),
                )
                for i in range(self.stages)
            ),
            embedding=Strategy(**sharding),
            head=Strategy(**sharding),
            layers=tuple(LayerStrategy(type=kind, **sharding) for kind in model.layers),
        )


ZERO3 = {"kind": DataParallel.ZERO3, "dtype": "bfloat16"}
EVERY = {"kind": DataParallel.ZERO2, "reduction": GradientReduction.EVERY_MICROBATCH}
SUMS: tuple[dict[str, Any], ...] = (ZERO3, EVERY, {}, {"dtype": "bfloat16"})
PIPELINES: tuple[tuple[Any, ...], ...] = (
    *((IN_TURN, 1, 5), (IN_TURN, 3, 6), (GPIPE, 2, 9), (INTERLEAVED, 2, 8, 2)),
    *((IN_TURN, 4, 3), (GPIPE, 3, 16), (INTERLEAVED, 2, 9, 2), (INTERLEAVED, 3, 11, 2), (INTERLEAVED, 2, 10, 3)),
    *((SPLIT, 2, 8), (SPLIT, 3, 10), (Schedule.ZERO_BUBBLE_H2, 2, 9)),
    *((Schedule.ZERO_BUBBLE_V, 2, 19, 2), (Schedule.V_HALF, 3, 30, 2), (Schedule.V_MIN, 3, 29, 2)),
    *((Schedule.INTERLEAVED_ZERO_BUBBLE, 2, 21, 2), (Schedule.ZERO_BUBBLE_V, 3, 5, 2)),
)
FIRST = [Case(*pipeline, **states) for pipeline, states in zip(PIPELINES[:4], SUMS, strict=True)]
OTHERS = [Case(*pipeline, **SUMS[number % len(SUMS)]) for number, pipeline in enumerate(PIPELINES[4:])]


@pytest.mark.parametrize("number", rest_long(len(FIRST) - 1, range(len(FIRST) + len(OTHERS))))
def test_a_few_microbatches_give_the_peak_of_the_whole_step_to_the_byte(number: int) -> None:
    case = (*FIRST, *OTHERS)[number]
    plan = case.plan()
    for stage in plan.stages:
        shorter, _, peak_bytes = simulate_peak(plan, stage.ranks[0], FAMILY, "sdpa")
        # Short steps are simulated whole: of several chunks, of up to two groups for each, or eight rounds.
        rounds = 8 if case.schedule.splits else 2 * case.chunks
        shortest = len(plan.stages) * (rounds if case.chunks > 1 else 2 if case.schedule.splits else 1)
        assert shorter.num_microbatches < case.num_microbatches or case.num_microbatches < shortest
        assert peak_bytes == simulate_step(plan, stage.ranks[0], FAMILY, "sdpa").peak_bytes


def test_a_plan_of_gpipe_with_many_microbatches_takes_no_longer_than_one_with_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated = list[int]()

    def counting(plan: Plan, *given: Any) -> Any:
        simulated.append(plan.num_microbatches)
        return simulate_step(plan, *given)

    monkeypatch.setattr("shardwright_train.dry_run.simulate_step", counting)
    few, many = (simulate_peak(Case(GPIPE, 2, count).plan(), 0, FAMILY, "sdpa")[2] for count in (64, 128))
    assert sum(simulated) <= 2 * 9
    assert many - few > 64 * 16 * 2 * 32 * 4, "each microbatch keeps its activations"


SPLIT_MEASURED = (
    *(Case(SPLIT, n, 8, dp_size=1) for n in (2, 4)),
    *(Case(each, n, 8, 2, dp_size=1) for n in (2, 4) for each in Schedule if each.splits and each.interleaves),
)
MEASURED = {
    2: (Case(IN_TURN, 2, 8, dp_size=1), Case(GPIPE, 2, 8, dp_size=1), Case(INTERLEAVED, 2, 8, 2, dp_size=1)),
    4: (Case(IN_TURN, 4, 8, dp_size=1), Case(GPIPE, 4, 8, dp_size=1), Case(INTERLEAVED, 4, 12, 2, dp_size=1)),
    8: (Case(IN_TURN, 8, 12, dp_size=1), Case(GPIPE, 8, 12, dp_size=1), Case(INTERLEAVED, 8, 16, 2, dp_size=1)),
}


@pytest.mark.parametrize("stages", rest_long(1, MEASURED))
def test_check_prediction_and_measurement_agree(tmp_path: Path, stages: int) -> None:
    """Every stage within 1 %, and within 10 % by an estimated profile."""
    _compare(tmp_path, tuple(case.plan() for case in MEASURED[stages]), within=0.1)


@pytest.mark.parametrize("number", rest_long(1, range(len(SPLIT_MEASURED))))
def test_so_they_do_where_backward_passes_are_split(tmp_path: Path, number: int) -> None:
    """Every stage within 1 %, and within 3 % by an estimated profile."""
    _compare(tmp_path, (SPLIT_MEASURED[number].plan(),), within=0.03)


def _compare(tmp_path: Path, plans: tuple[Plan, ...], within: float) -> None:
    write_document(tmp_path / "plans.json", Plans(plans=plans))
    given = ["--steps", 1, "--warmup-steps", 1, "--out", tmp_path / "out.json"]
    done = forked_command(["measure", tmp_path / "plans.json", *given])
    _, err = done.communicate(timeout=500)
    assert done.returncode == 0, err
    for found in read_document(tmp_path / "out.json", Measurement).plans:
        checks = check_roles(found.plan, FAMILY, "sdpa", lambda _done, _all: None)
        predictions = predicted_bytes(found.plan, tmp_path)
        # On a processor a measurement begins after the step's tokens were made, and with the head their labels.
        tokens_bytes = found.plan.global_batch_size * SEQUENCE_LENGTH * 8
        last = found.plan.stage_of(HEAD)
        held = [tokens_bytes * (2 if stage == last else 1) for stage in range(len(found.plan.stages))]
        for check, before, rank, predicted in zip(checks, held, found.ranks, predictions, strict=True):
            assert check.peak_bytes - before == pytest.approx(rank.memory.peak_bytes, rel=0.01)
            assert predicted == pytest.approx(rank.memory.peak_bytes, rel=within)
