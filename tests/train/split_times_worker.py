"""Run by forked_ranks: steps of pipelines of slowed stages, as measured and as simulated with their passes' times."""

import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec.structs import replace
from several_chunks import SCHEDULES, in_chunks
from tiny_models import batch_of, engine_of

from shardwright.io import read_document
from shardwright.plan.schedules.passes import Pass
from shardwright.types import Plan, Plans, Schedule
from shardwright_search.simulation.simulator import StageTimes, simulate
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World, joined_world
from shardwright_train.pipeline.runner import MicrobatchChunk, Step

UNIT_S = 0.03
SLOWER = {Pass.FORWARD: 2.0, Pass.BACKWARD: 2.6, Pass.WEIGHT: 1.4}
"""What each pass waits, in units; a joint backward pass waits as long as both of its parts."""


class Slowed:
    """A hook that makes a stage's passes longer, and keeps how long each kind took."""

    def __init__(self, rank: int, splits: bool) -> None:
        self.times = defaultdict[str, list[float]](list)
        pace = UNIT_S * (1 + 0.15 * (rank % 3))
        self._waits = {str(kind): pace * units for kind, units in SLOWER.items()}
        self._waits["backward"] += 0 if splits else self._waits["weight"]
        self._begun = 0.0

    def __call__(self, name: str, at: MicrobatchChunk | None = None) -> None:
        kind, _, event = name.partition(".")
        if kind not in self._waits:
            return
        if event == ("begin" if kind == "weight" else "wait"):
            self._begun = time.perf_counter()
        elif event == "end":
            time.sleep(self._waits[kind])
            self.times[kind].append(time.perf_counter() - self._begun)


def compared(plan: Plan, groups: Groups, world: World) -> tuple[float, float]:
    """The seconds of a step as measured, and as simulated with the mean times of each stage's passes."""
    engine = engine_of(plan, world, groups)
    step = Step.of_batch(batch_of(plan.model, plan.global_batch_size, 0), engine.stage.context.share)
    engine.forward_backward(step)
    engine.optimizer.forget_gradients()
    hook = Slowed(world.rank, plan.schedule.splits)
    dist.barrier()
    begun = time.perf_counter()
    engine.forward_backward(step, hook)
    took = time.perf_counter() - begun
    mine = took, {kind: statistics.fmean(times) for kind, times in hook.times.items()}
    ranks: list[tuple[float, dict[str, float]]] = [mine] * world.size
    dist.all_gather_object(ranks, mine)
    chunks = len(plan.stages[0].layers)
    ranges = [_times(ranks[stage][1], plan.schedule.splits) for stage, _ in plan.schedule.way(len(plan.stages), chunks)]
    simulated = simulate(ranges, plan.schedule, plan.num_microbatches, chunks)
    return max(took for took, _ in ranks), simulated.step_ps * 1e-12


def _times(passes_s: dict[str, float], splits: bool) -> StageTimes:
    """The mean times of a stage's passes, whichever of its chunks they are of."""
    times_ps = {kind: round(mean_s * 1e12) for kind, mean_s in passes_s.items()}
    further_ps = {Pass.WEIGHT: times_ps["weight"]} if splits else {}
    return StageTimes(times_ps["forward"], times_ps["backward"], 0, 0, 0, further_ps=further_ps)


TIMED = Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE, Schedule.ZERO_BUBBLE_H2, *SCHEDULES


def main(plans_file: str, result_file: str, schedules: str) -> None:
    found = {}
    with joined_world("cpu") as world:
        groups = Groups("cpu")
        for plan in read_document(Path(plans_file), Plans).plans:
            torch.set_default_dtype(torch.float32)
            for schedule in map(Schedule, schedules.split()):
                chunks = in_chunks(plan, schedule) if schedule in SCHEDULES else replace(plan, schedule=schedule)
                found[str(schedule)] = compared(chunks, groups, world)
        if world.rank == 0:
            Path(result_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
