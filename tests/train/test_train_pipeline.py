"""Messages between pipeline stages where the first one of two ranks makes them wait for each other, as NCCL's does."""

import json
from pathlib import Path

import msgspec
import pytest
from forked_ranks import run_worker
from random_plans import random_plan
from tiny_models import tiny

from shardwright.io import write_document
from shardwright.types import PipelineStage, Plans, Schedule

RANGES = {
    Schedule.INTERLEAVED_1F1B: (((0, 1), (2, 3)), ((1, 2), (3, 4))),
    Schedule.ONE_F_ONE_B: (((0, 2),), ((2, 4),)),
    Schedule.GPIPE: (((0, 2),), ((2, 4),)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have run a step of every schedule, of an odd number of microbatches."""
    folder = tmp_path_factory.mktemp("meeting")
    given = random_plan(tiny("llama"), 0, 2, stages=2)
    plans = [
        msgspec.structs.replace(
            given,
            name=schedule,
            schedule=schedule,
            num_microbatches=5,
            global_batch_size=10,
            stages=tuple(PipelineStage(ranks=(i,), layers=layers) for i, layers in enumerate(ranges)),
        )
        for schedule, ranges in RANGES.items()
    ]
    write_document(folder / "plans.json", Plans(plans=tuple(plans)))
    run_worker("meeting_worker", [str(folder / "plans.json"), str(folder)], 2)
    return folder


def test_every_schedule_comes_to_its_end_where_first_messages_wait_for_both_ranks(folder: Path) -> None:
    losses = json.loads((folder / "losses.json").read_bytes())
    assert list(losses) == list(RANGES)
    assert max(losses.values()) - min(losses.values()) < 1e-9, "the schedules differ in order alone"


def test_two_ranks_that_meet_in_the_midst_of_a_schedule_are_seen_to_wait_for_ever(folder: Path) -> None:
    said = [(folder / f"{rank}.said").read_text() for rank in range(2)]
    assert "Wait timeout" in said and "over" not in said
