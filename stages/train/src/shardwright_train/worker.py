"""The process of one rank, `python -m shardwright_train.worker JOB DEVICE`, started by the launcher."""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.launch.heartbeat import START_UP_S, end_quietly, start_rank
from shardwright_train.options import MeasureJob, RunJob, decode_job
from shardwright_train.start import prepare_environment, without_collection

if TYPE_CHECKING:
    from shardwright_train.parallel.world import World


def main(job_file: str, device_type: str) -> None:
    """Do the job; if it fails with a ShardwrightError, the launcher prints it, and this process sets the exit code."""
    start_rank()
    # Otherwise the profiler that records memory prints messages on standard error when it starts and ends.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    job = decode_job(Path(job_file).read_bytes())
    if isinstance(job, RunJob) and job.deterministic:
        prepare_environment()
    # Imported before the ranks meet, as it takes seconds: the time limit of the first step begins when they meet.
    with without_collection():
        from shardwright_train.parallel.world import joined_world, out_of_memory_said
        from shardwright_train.torch_private import flight_recorder_trace

        work = _work_of(job)
    # The launcher must be the first to notice a hang, and request stacks and collectives: a timeout of a process group,
    # or of NCCL's heartbeat monitor, would end ranks before they have shown these.
    timeout_s = 2 * max(START_UP_S, job.hang_timeout_s)
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", f"{timeout_s:.0f}")
    with end_quietly(), joined_world(device_type, timeout_s=timeout_s) as world:
        world.heartbeat.answer(partial(flight_recorder_trace, world.backend))
        with out_of_memory_said():
            work(world)


def _work_of(job: RunJob | MeasureJob) -> "Callable[[World], None]":
    if isinstance(job, RunJob):
        from shardwright_train.training.loop import train

        return lambda world: train(job, world)
    from shardwright_train.measurement.measure import measure_plans

    return lambda world: measure_plans(job, world)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
