"""Run by the launcher, one process per rank: weights of a folder under one plan, saved, under another, and trained."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from checkpoint_worker import JOB, saved
from in_one_format import compute_in_the_inputs_format
from parity_worker import SETTINGS, Reference, batches, worst
from stock_experts import with_balance
from tiny_models import made_by_first, stock_model
from torch import Tensor, nn

from shardwright.io import read_document
from shardwright.types import Plan, Plans
from shardwright_train.checkpoints.folders import Identity
from shardwright_train.checkpoints.tensors import read_tensors
from shardwright_train.engine.engine import Engine, build_engine
from shardwright_train.models.base import family_named
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World, joined_world
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.runner import Step
from shardwright_train.weights.reading import open_weights


class Loaded(Reference):
    """What the stock model makes of three steps after from_pretrained."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        stock_class: Any = type(stock_model(plan.model))
        family = family_named(plan.model.family, "plan")
        # Stock gpt-oss has sinks in the eager kernel alone.
        kernel = "eager" if family.facts.attention.sinks else family.plain_kernel
        stock: nn.Module = stock_class.from_pretrained(folder, dtype=torch.float64, attn_implementation=kernel)
        self.losses, self.auxiliary, self.shares, self.norms, self.further = [], [], [], [], []
        self._train(plan, with_balance(stock.train()))


def engine_with(plan: Plan, folder: Path, world: World, groups: Groups) -> Engine:
    """This rank's part of a plan, with the weights of a folder."""
    family = family_named(plan.model.family, "plan")
    torch.set_default_dtype(getattr(torch, plan.precision.parameters))
    context = RankContext(
        plan=plan,
        family=family,
        rank=world.rank,
        groups=groups,
        attention=family.plain_kernel,
        device=world.device,
        seed=0,
        weights=open_weights(folder, plan.model, family, allow_new=False),
    )
    return build_engine(context, SETTINGS)


def shards(engine: Engine) -> dict[str, Tensor]:
    return {name: local_tensor(p.detach()).clone() for name, p in engine.optimizer.parameters.items()}


def passed_on(first: Plan, second: Plan, folder: Path, world: World, groups: Groups) -> dict[str, float]:
    """From one file under the first plan, through its checkpoint into the second, which trains; differences."""
    identity = Identity.of_run(JOB, first, data_sha256="0" * 64)
    engine = engine_with(first, folder / "single", world, groups)
    checkpoint = saved(folder / "first", engine, identity)
    engine = engine_with(second, folder / "sharded", world, groups)
    straight = shards(engine)
    for parameter in engine.optimizer.parameters.values():
        local_tensor(parameter.detach()).fill_(torch.nan)
    read_tensors(checkpoint, engine.tensors(), engine.expert_orders())
    resumed = shards(engine)
    saved(folder / "second", engine, identity)
    reference = made_by_first(world, Loaded, second, folder / "single")
    loss_error = 0.0
    for number, batch in enumerate(batches(second), start=1):
        outcome = engine.train_step(Step.of_batch(batch, engine.stage.context.share, number=number))
        loss_error = max(loss_error, abs(outcome.loss - reference.losses[number - 1]))
    learning = engine.optimizer.parameters
    held = shards(engine).items()
    mine = (x for name, x in held if learning[name].requires_grad or name.endswith("correction_bias"))
    trained = zip(mine, reference.part(reference.parameters, engine.stage), strict=True)
    return {
        "resumed": worst([(resumed[name], x) for name, x in straight.items()]),
        "loss": loss_error,
        "parameters": worst(list(trained)),
    }


def main(plans_file: str, folder: str, result_file: str) -> None:
    """Each pair of plans, on the weights in the folder of the second one's name."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    compute_in_the_inputs_format()
    plans = read_document(Path(plans_file), Plans).plans
    found = {}
    with joined_world("cpu") as world:
        groups = Groups("cpu")
        for first, second in zip(plans[::2], plans[1::2], strict=True):
            found[second.name] = passed_on(first, second, Path(folder, second.name), world, groups)
        if world.rank == 0:
            Path(result_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
