"""Run by the launcher, one process per rank: what one plan saves, each of the others goes on from."""

import json
import sys
from pathlib import Path

import torch
from tiny_models import batch_of, engine_of

from shardwright_formats.io.json import read_document
from shardwright_formats.types.plan import Plan, Plans
from shardwright_train.engine.engine import Engine
from shardwright_train.engine.learning_rate import Hyperparameters
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import joined_world
from shardwright_train.pipeline.runner import Step
from shardwright_train.training.checkpoint import Progress, load, save

SETTINGS = Hyperparameters(learning_rate=1e-2, warmup_steps=1, steps=4, weight_decay=0.1, clip_norm=0.5)
PROGRESS = Progress(
    step=1,
    plan_sha256="",
    data_sha256="",
    seed=0,
    first_loss=0.0,
    last_loss=0.0,
    wall_s=0.0,
    updates=1,
    loss_scale=1.0,
    steps_without_overflow=0,
)


def outcomes(engine: Engine, plan: Plan, steps: range) -> list[float]:
    """Loss and gradient norm of some steps, which tell of parameters and moments."""
    told, share = [], engine.stage.context.share
    for number in steps:
        batch = batch_of(plan.model, plan.global_batch_size, number)
        told.append(engine.train_step(Step.of(batch, share, number=number)))
    return [number for one in told for number in (one.loss, one.grad_norm)]


def main(plans_file: str, folder: str, result_file: str) -> None:
    """Of every plan what it tells of the steps behind the first plan's checkpoint, by name; the second saves too."""
    torch.set_default_dtype(torch.float64)
    first, second, *others = read_document(Path(plans_file), Plans).plans
    found = {}
    with joined_world("cpu") as world:
        groups = Groups("cpu")
        saving = engine_of(first, world, groups, settings=SETTINGS)
        outcomes(saving, first, range(1, 2))
        saved = save(Path(folder, first.name), saving.tensors(), PROGRESS, keep=1)
        found[first.name] = outcomes(saving, first, range(2, 4))
        for plan in (second, *others):
            engine = engine_of(plan, world, groups, settings=SETTINGS, updates=1)
            load(saved, engine.tensors())
            if plan is second:
                save(Path(folder, plan.name), engine.tensors(), PROGRESS, keep=1)
            found[plan.name] = outcomes(engine, plan, range(2, 4))
        if world.rank == 0:
            Path(result_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
