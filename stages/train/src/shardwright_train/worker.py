"""One rank: `python -m shardwright_train.worker JOB`, started by the launcher with its place in the environment."""

import os
import sys
import warnings
from pathlib import Path

from shardwright_formats.errors import ShardwrightError
from shardwright_formats.files import read_any_document
from shardwright_train.jobs import MeasureJob, RunJob

__all__ = ["main"]


def main(job_file: str, device_type: str) -> None:
    """Do the job; an error that all ranks raise together is printed by the first and sets the exit code."""
    # The profiler that records memory greets and takes leave on standard error otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # PyTorch 2.13 renames two collectives; the old names are the only ones that 2.11 has.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    from shardwright_train.world import joined_world

    job = read_any_document(Path(job_file), RunJob, MeasureJob)
    with joined_world(device_type) as world:
        try:
            if isinstance(job, RunJob):
                from shardwright_train.loop import train

                train(job, world)
            elif isinstance(job, MeasureJob):
                from shardwright_train.measure import measure_plans

                measure_plans(job, world)
        except ShardwrightError as error:
            if world.rank == 0:
                print(f"error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
