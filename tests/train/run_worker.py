"""Run by forked ranks: one run, as the command would start it."""

from pathlib import Path

from shardwright_train.options import RunOptions, decode_job
from shardwright_train.parallel.world import joined_world
from shardwright_train.training.loop import train


def main(job_file: str) -> None:
    """Train."""
    job = decode_job(Path(job_file).read_bytes())
    assert isinstance(job, RunOptions)
    with joined_world("cpu") as world:
        train(job, world)
