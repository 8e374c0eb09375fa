"""The trial of each pipeline stage alone before the first step, to find a lack of memory early."""

import sys
import time
from pathlib import Path

import torch.distributed as dist

from shardwright_train.engine.engine import Engine
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.runner import Step
from shardwright_train.training.out_of_memory import lack_of_memory_explained


def try_stages(engine: Engine, step: Step, world: World, group: dist.ProcessGroup, file: Path) -> None:
    """Run each pipeline stage alone on a step's samples, all at once; leaves no gradients, and prints the result.

    `group` is one of all ranks, `file` the plan's. Raises OutOfMemory where a device lacks memory.
    """
    plan = engine.stage.context.plan
    world.heartbeat.begin("while each pipeline stage is tried alone")
    began = time.monotonic()
    with lack_of_memory_explained(file, plan, engine):
        tried = engine.try_alone(step)
    dist.barrier(group=group)
    if world.rank == 0:
        compiled = ", blocks compiled in it" if plan.compile else ""
        took = (
            f"{time.monotonic() - began:.1f} s, {tried} of {plan.num_microbatches} microbatches in the first{compiled}"
        )
        print(f"tried each pipeline stage alone: {took} (--no-trial leaves it out)", file=sys.stderr, flush=True)
