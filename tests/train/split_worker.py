"""Run by forked_ranks: plans with split backward passes against the same plans with joint ones, to the bit."""

import logging
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from parity_worker import SETTINGS, batches
from several_chunks import joint
from tiny_models import engine_of
from torch import Tensor

from shardwright.io import read_document
from shardwright.types import Plan, Plans
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.parallelize import WeightProducts
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World, joined_world
from shardwright_train.pipeline.runner import Step

STEPS = 2


def trained(plan: Plan, groups: Groups, world: World) -> dict[str, Tensor]:
    """Loss, gradients and parameters of each step on this rank."""
    engine = engine_of(plan, world, groups, settings=SETTINGS)
    stage, parameters, found = engine.stage, engine.optimizer.parameters, dict[str, Tensor]()
    for number, batch in enumerate(batches(plan)[:STEPS], start=1):
        loss = engine.forward_backward(Step.of_batch(batch, stage.context.share, number=number))
        found[f"loss {number}"] = loss.clone()
        found |= {
            f"gradient {number} of {name}": local_tensor(p.grad).clone()
            for name, p in parameters.items()
            if p.grad is not None
        }
        engine.optimizer.step(number, loss, stop=False)
        found |= {f"{name} {number}": local_tensor(p.detach()).clone() for name, p in parameters.items()}
    return found


def _first_gradients(found: dict[str, Tensor], plan: Plan, world: World) -> dict[str, Tensor]:
    """The first step's gradients of all ranks: a V has layers on other stages, and their norm is summed otherwise."""
    place = plan.stages[plan.stage_of_rank(world.rank)].ranks.index(world.rank)
    mine = {f"{name}, part {place}": x for name, x in found.items() if name.startswith("gradient 1 ")}
    all_ranks: list[dict[str, Tensor]] = [{} for _ in range(world.size)]
    dist.all_gather_object(all_ranks, mine)
    return {name: x for each in all_ranks for name, x in each.items()}


def main(plans_file: str) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    made = list[int]()
    make = WeightProducts.make

    def counted(self: WeightProducts) -> None:
        made[-1] += len(self._left[0])
        make(self)

    WeightProducts.make = counted  # type: ignore[method-assign]
    different = list[str]()
    with joined_world("cpu") as world:
        groups = Groups("cpu")
        for plan in read_document(Path(plans_file), Plans).plans:
            torch.set_default_dtype(getattr(torch, plan.precision.parameters))
            made.append(0)
            split = trained(plan, groups, world)
            whole = trained(joint(plan), groups, world)
            if plan.schedule.turns:
                split, whole = (_first_gradients(found, plan, world) for found in (split, whole))
            assert split.keys() == whole.keys()
            names = [name for name, x in whole.items() if not torch.equal(x, split[name])]
            different += [f"{plan.name}: {len(names)} of {len(whole)} differ, such as {names[:3]}"] if names else []
            total = torch.tensor(made[-1])
            dist.all_reduce(total)
            different += [] if total > 0 else [f"{plan.name}: no product was left to a weight pass"]
    assert not different, "\n".join(different)


if __name__ == "__main__":
    main(*sys.argv[1:])
