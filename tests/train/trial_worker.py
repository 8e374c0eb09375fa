"""Run by forked ranks: what trying pipeline stages alone changes, and what it takes, written as JSON by rank 0."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import batch_of, engine_of
from torch import Tensor

from shardwright.io import read_document
from shardwright.types import Plan, Plans
from shardwright_train.engine.engine import Engine
from shardwright_train.measurement.profiles import record_memory
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World, joined_world
from shardwright_train.pipeline.runner import Step


def _steps(engine: Engine, plan: Plan) -> tuple[list[Tensor], list[int]]:
    """Bits of gradients, parameters, moments and random state over two steps, and the peak memory of each in bytes."""
    seen, peaks = [], []
    for number in (1, 2):
        work = Step.of_batch(
            batch_of(plan.model, plan.global_batch_size, number), engine.stage.context.share, number=number
        )
        with record_memory(engine.stage.context.device) as record:
            record.hook("start")
            loss = engine.forward_backward(work)
            record.hook("reduced")
        peaks.append(max(interval.peak_bytes for interval in record.intervals))
        seen += [loss.clone(), *(local_tensor(p.grad).clone() for p in engine.optimizer.parameters.values())]  # type: ignore[arg-type]
        engine.optimizer.step(number, loss, stop=False)
    return [*seen, *(local_tensor(x) for x in engine.tensors().values()), torch.get_rng_state()], peaks


def _tried(engine: Engine, plan: Plan) -> int:
    """Peak memory of trying a stage alone, in bytes."""
    work = Step.of_batch(batch_of(plan.model, plan.global_batch_size, 1), engine.stage.context.share)
    with record_memory(engine.stage.context.device) as record:
        record.hook("start")
        engine.try_alone(work)
        record.hook("tried")
    assert all(p.grad is None for p in engine.optimizer.parameters.values())
    return max(interval.peak_bytes for interval in record.intervals)


def _found(plan: Plan, world: World, groups: Groups) -> dict[str, Any]:
    plain, _ = _steps(engine_of(plan, world, groups), plan)
    engine = engine_of(plan, world, groups)
    assert engine.optimizer
    tried = _tried(engine, plan)
    after, peaks = _steps(engine, plan)
    equal = torch.tensor(len(plain) == len(after) and all(map(torch.equal, plain, after)))
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    memory: list[tuple[int, int]] = [(0, 0)] * world.size
    dist.all_gather_object(memory, (tried, peaks[0]))
    return {"equal": bool(equal), "memory": memory}


def main(plans_file: str, result_file: str) -> None:
    """Try each plan."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    with joined_world("cpu") as world:
        groups = Groups("cpu")
        plans = read_document(Path(plans_file), Plans).plans
        found = {plan.name: _found(plan, world, groups) for plan in plans}
        if world.rank == 0:
            Path(result_file).write_text(json.dumps(found))
