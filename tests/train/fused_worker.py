"""Run by the launcher, one process per rank: plans with and without flash-attn's kernels, compared by rank 0's JSON.

The kernels are stand-ins written in PyTorch (flash_attn_stand_in.py): what is tested is what surrounds them.
"""

import json
import sys
from pathlib import Path

import flash_attn_stand_in
import msgspec
import torch
import torch.distributed as dist
from tiny_models import batch_of, engine_of

from shardwright.io import read_document
from shardwright.types import Plan, Plans
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World, joined_world
from shardwright_train.pipeline.runner import Step


def step_of(plan: Plan, groups: Groups, world: World) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and this rank's part of every gradient."""
    engine = engine_of(plan, world, groups)
    loss = engine.forward_backward(
        Step.of_batch(batch_of(plan.model, plan.global_batch_size, 0), engine.stage.context.share)
    )
    dist.all_reduce(loss)
    parameters = engine.optimizer.parameters
    return loss, {name: local_tensor(p.grad) for name, p in parameters.items() if p.grad is not None}


def main(plans_file: str, result_file: str) -> None:
    flash_attn_stand_in.install()
    results = {}
    with joined_world("cpu") as world:
        groups = Groups("cpu")
        for plan in read_document(Path(plans_file), Plans).plans:
            torch.set_default_dtype(getattr(torch, plan.precision.parameters))
            wanted_loss, wanted = step_of(msgspec.structs.replace(plan, fused=()), groups, world)
            assert not flash_attn_stand_in.CALLS
            loss, gradients = step_of(plan, groups, world)
            parts = [(gradients[name], x) for name, x in wanted.items() if x.numel()]
            assert gradients.keys() == wanted.keys()
            errors = [(loss - wanted_loss).abs(), *((mine - x).abs().max().double() for mine, x in parts)]
            seen = torch.stack([torch.stack(errors).max(), *(x.abs().max().double() for _, x in parts)])
            error, largest = seen[0], seen[1:].max()
            dist.all_reduce(error, dist.ReduceOp.MAX)
            results[plan.name] = {
                "error": error.item(),
                "largest": largest.item(),
                "called": sorted(flash_attn_stand_in.CALLS),
            }
            flash_attn_stand_in.CALLS.clear()
        if world.rank == 0:
            Path(result_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
