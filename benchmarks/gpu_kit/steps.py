"""The steps of the kit, in order of importance, and the functions that run steps as ranks of a launch."""

import os
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from gpu_kit.setting import Setting

from shardwright.launch.ranks import launch


class Step(NamedTuple):
    """Some rows of one module."""

    name: str
    title: str
    module: str
    """Module of `gpu_kit`: `rows(setting, stack)` returns its rows, and `lines(rows)` its part of the report."""
    at_most_s: float
    """If there is a limit, no row begins after so many seconds, and a running row is ended."""
    least_s: float
    """If there is a limit, a step does not begin with fewer seconds left."""
    least_devices: int = 1


STEPS = {
    step.name: step
    for step in (
        Step("S0", "Where it runs, and whether anything starts", "start", 45, 5),
        Step(
            "S1", "Right? 13 families beside stock transformers, experts, rings, the same bits twice", "right", 80, 20
        ),
        Step("S2", "Rates beside what the device's entry assumes", "rates", 60, 20),
        Step("S3", "Fast? Tokens per second of a dense model and one with experts", "fast", 160, 30),
        Step("S4", "Predicted? Plans from shapes, from a profile, and measured", "predicted", 150, 60),
        Step("S5", "Memory of plans of 8 devices on one", "memory", 65, 20),
        Step("S6", "Two ranks on one device, over gloo", "two_ranks", 60, 30),
        Step("S7", "Checkpoints of the dense model", "checkpoint", 45, 20),
        Step("S8", "Schedules and kinds of parallelism over NCCL", "several", 240, 60, least_devices=2),
        Step("S9", "Two plans measured in turns, a run that resumes, and a hang", "turns", 240, 60, least_devices=2),
    )
}


def launch_ranks(setting: Setting, module: str, ranks: int, limit_s: float, *, one_device: bool = False) -> Any:  # noqa: ANN401
    """Launch ranks that call `of_rank(setting, world)` of a module of `gpu_kit`; return rank 0's result.

    `one_device`: all ranks are on the first device and use gloo. Raises RunFailed if a rank fails.
    """
    folder = setting.work / "ranks"
    folder.mkdir(parents=True, exist_ok=True)
    job, out = folder / f"{module}.job", folder / f"{module}.out"
    job.write_bytes(msgspec.json.encode(setting, enc_hook=str))
    out.unlink(missing_ok=True)
    launch(rank_command(module, job, out, one_device), range(ranks), ranks, hang_timeout_s=limit_s)
    return msgspec.json.decode(out.read_bytes())


def rank_command(module: str, job: Path, out: Path, one_device: bool = False) -> list[str]:
    """Return the command that runs a rank."""
    place = "one" if one_device else "own"
    return [sys.executable, "-m", "gpu_kit.steps", module, str(job), str(out), place]


def run_rank(module: str, job: Path, out: Path, one_device: bool) -> None:
    """Run one rank of a launch: call the module's `of_rank`; rank 0 writes the result."""
    from gpu_kit.worlds import joined_on_one_device

    from shardwright.launch.heartbeat import end_quietly, start_rank
    from shardwright_train.parallel.world import joined_world

    start_rank()
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    setting = msgspec.json.decode(job.read_bytes(), type=Setting, dec_hook=lambda kind, value: kind(value))
    work = import_module(f"gpu_kit.{module}").of_rank
    joined = joined_on_one_device if one_device else joined_world
    with end_quietly(), joined(setting.device_type, timeout_s=240) as world:
        result = work(setting, world)
        if world.rank == 0:
            out.write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    run_rank(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "one")
