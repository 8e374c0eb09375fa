"""Run by the launcher, one process per rank: what some plans save, others go on from."""

import json
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from tiny_models import batch_of, engine_of

from shardwright.io import read_document
from shardwright.types import Plan, Plans
from shardwright_train.checkpoints.folders import Identity, Progress, folder_of_step
from shardwright_train.checkpoints.tensors import Saver, read_tensors, total_bytes
from shardwright_train.engine.engine import Engine
from shardwright_train.engine.learning_rate import Hyperparameters
from shardwright_train.options import RunOptions
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import joined_world
from shardwright_train.pipeline.runner import Step

SETTINGS = Hyperparameters(learning_rate=1e-2, warmup_steps=1, steps=4, weight_decay=0.1, clip_norm=0.5)
JOB = RunOptions(plan=Path(), data=Path(), out=Path(), checkpoints=Path(), steps=1)
STEP = 1


def saved(folder: Path, engine: Engine, identity: Identity) -> Path:
    """Where an engine's tensors are, once they are saved."""
    folder.mkdir(parents=True, exist_ok=True)
    saver = Saver(
        folder=folder,
        identity=identity,
        parent=None,
        keep_last=1,
        keep_every=0,
        asynchronous=False,
        group=dist.group.WORLD,
        bytes_in_all=total_bytes(engine.tensors()),
        expert_orders=engine.expert_orders(),
    )
    samples = STEP * identity.global_batch_size
    saver.save(engine.tensors(), msgspec.structs.replace(Progress.begin(1.0), step=STEP, samples=samples, updates=STEP))
    return folder_of_step(folder, STEP)


def outcomes(engine: Engine, plan: Plan, steps: range) -> list[float]:
    """Loss and gradient norm of some steps, which tell of parameters and moments."""
    told, share = [], engine.stage.context.share
    for number in steps:
        batch = batch_of(plan.model, plan.global_batch_size, number)
        told.append(engine.train_step(Step.of_batch(batch, share, number=number)))
    return [number for one in told for number in (one.loss, one.grad_norm)]


def main(plans_file: str, folder: str, result_file: str, *checkpoints: str) -> None:
    """What plans tell of two steps after the first, by name, once each has saved that; or after others' checkpoints.

    With checkpoints, each plan goes on from each of them, and tells under both names, a line break between.
    """
    torch.set_default_dtype(torch.float64)
    found = {}
    with joined_world("cpu") as world:
        groups = Groups("cpu")
        for plan in read_document(Path(plans_file), Plans).plans:
            if not checkpoints:
                engine = engine_of(plan, world, groups, settings=SETTINGS)
                outcomes(engine, plan, range(1, 2))
                saved(Path(folder, plan.name), engine, Identity.of_run(JOB, plan, data_sha256="0" * 64))
                found[plan.name] = outcomes(engine, plan, range(2, 4))
            for kept in map(Path, checkpoints):
                engine = engine_of(plan, world, groups, settings=SETTINGS, updates=1)
                read_tensors(kept, engine.tensors(), engine.expert_orders())
                found[f"{kept.parent.name}\n{plan.name}"] = outcomes(engine, plan, range(2, 4))
        if world.rank == 0:
            Path(result_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
