"""Run by the launcher, one process per rank: plans with offload beside the same without, written as JSON by rank 0."""

import json
import sys
from dataclasses import replace as with_fields
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec import UNSET
from msgspec.structs import replace
from tiny_models import batch_of, engine_of

from shardwright.io import read_document
from shardwright.plan.offload import host_states
from shardwright.types import Plan, Plans
from shardwright_train.engine.engine import Engine
from shardwright_train.engine.host import CountedHost
from shardwright_train.engine.learning_rate import ANY
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.host_activations import CountedCopies
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World, joined_world
from shardwright_train.pipeline.runner import Step

STEPS = 3
SETTINGS = with_fields(ANY, learning_rate=1e-2, steps=STEPS, clip_norm=0.5)


class Seen(NamedTuple):
    """What a rank saw of a plan with offload."""

    differing: int
    """Tensors of a checkpoint that are not equal to the bit without offload."""
    formula_bytes: int
    """Bytes in host memory."""
    held_bytes: int
    bytes_in: int
    """Bytes of all steps."""
    bytes_out: int
    most_bytes: int
    largest_bytes: int
    """Bytes of the largest parameter's states."""
    on_device: int
    """Bytes of states on the device, with and without offload."""
    without: int
    moved_out: int = 0
    """Bytes of activations that went to the host in all steps, came back, are there at most, and at the end."""
    moved_in: int = 0
    most_moved: int = 0
    left: int = 0


def main(plans_file: str, result_file: str) -> None:
    """Train every plan with and without offload, and compare what a checkpoint would have."""
    results: dict[str, list[Seen]] = {}
    with joined_world("cpu") as world:
        groups = Groups("cpu")
        for plan in read_document(Path(plans_file), Plans).plans:
            torch.set_default_dtype(getattr(torch, plan.precision.parameters))
            seen = _compared(plan, world, groups)
            every: list[Seen | None] = [None] * world.size
            dist.all_gather_object(every, seen)
            results[plan.name] = [each for each in every if each is not None]
        if world.rank == 0:
            Path(result_file).write_text(json.dumps(results))


def _compared(plan: Plan, world: World, groups: Groups) -> Seen:
    plain = replace(plan, layers=tuple(replace(layer, offload=UNSET) for layer in plan.layers))
    offloaded, other = _trained(plan, world, groups), _trained(plain, world, groups)
    pairs = zip(offloaded.tensors().items(), other.tensors().items(), strict=True)
    differing = sum(a != b or not torch.equal(local_tensor(x), local_tensor(y)) for (a, x), (b, y) in pairs)
    optimizer, host = offloaded.optimizer, offloaded.optimizer.host
    assert isinstance(host, CountedHost)
    sizes = [sum(x.nbytes for x in states.values()) for states in optimizer.host_states]
    formula = host_states(plan, world.rank)
    activations = offloaded.stage.context.host_activations
    copies = CountedCopies() if activations is None else activations.copies
    assert isinstance(copies, CountedCopies)
    return Seen(
        differing,
        sum(formula),
        sum(sizes),
        host.bytes_in,
        host.bytes_out,
        host.most_bytes,
        max(formula, default=0),
        optimizer.state_bytes,
        other.optimizer.state_bytes,
        copies.bytes_out,
        copies.bytes_in,
        copies.most_host_bytes,
        copies.host_bytes,
    )


def _trained(plan: Plan, world: World, groups: Groups) -> Engine:
    engine = engine_of(plan, world, groups, settings=SETTINGS)
    for number in range(1, STEPS + 1):
        batch = batch_of(plan.model, plan.global_batch_size, number)
        engine.train_step(Step.of_batch(batch, engine.stage.context.share, number=number))
    return engine


if __name__ == "__main__":
    main(*sys.argv[1:])
