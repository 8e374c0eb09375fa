"""Run by the launcher, one process per rank: plans with offload beside the same without, written as JSON by rank 0."""

import json
import sys
from dataclasses import replace as with_fields
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec import UNSET
from msgspec.structs import replace
from tiny_models import batch_of, engine_of
from torch import Tensor

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
from shardwright_train.pipeline.runner import Step, evaluating, run_forward

STEPS = 6
OVERFLOWS = 4
"""The step whose gradients are not finite: the third and fifth begin with updates that wait."""
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
    late: int
    """Updates that come, or start, too late."""
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
    (offloaded, kept), (other, others) = (_trained(each, world, groups) for each in (plan, plain))
    pairs = zip(kept, others, strict=True)
    differing = sum(a != b or not torch.equal(x, y) for (a, x), (b, y) in pairs)
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
        _late(offloaded),
        optimizer.state_bytes,
        other.optimizer.state_bytes,
        copies.bytes_out,
        copies.bytes_in,
        copies.most_host_bytes,
        copies.host_bytes,
    )


def _trained(plan: Plan, world: World, groups: Groups) -> tuple[Engine, list[tuple[str, Tensor]]]:
    """An engine after its steps, and what its checkpoints have after the first and the last, and an evaluation says.

    One step overflows, and before the last one is an evaluation.
    """
    engine, kept = engine_of(plan, world, groups, settings=SETTINGS), list[tuple[str, Tensor]]()
    host, share = engine.optimizer.host, engine.stage.context.share
    assert isinstance(host, CountedHost)
    for layer in engine.stage.layers:
        layer.module.register_forward_pre_hook(lambda *_, name=layer.name: host.events.append(("forward", name)))
    for number in range(1, STEPS + 1):
        batch = batch_of(plan.model, plan.global_batch_size, number)
        if number == STEPS:
            engine.late.flush()
            with evaluating(engine.stage):
                kept.append(("evaluation", run_forward(engine.stage, engine.pipeline, share.part_of(batch))))
        step = Step.of_batch(batch, share, number=number)
        engine.train_step(with_fields(step, loss_scale=inf if number == OVERFLOWS else 1.0))
        host.events.append(("stepped", ""))
        if number in (1, STEPS):
            kept += [(name, local_tensor(x.detach()).clone()) for name, x in engine.tensors().items()]
    return engine, kept


def _late(engine: Engine) -> int:
    """Layers that compute, or whose parameters are gathered, before they are updated, or before the next one's update
    has started.
    """
    streamed, gathered = list(engine.optimizer.streamed), engine.stage.gathered_ahead
    following = dict(pairwise(layer.name for layer in engine.stage.layers))
    waiting, late = list[str](), 0
    started = set[str]()
    assert isinstance(engine.optimizer.host, CountedHost)
    for event, layer in engine.optimizer.host.events:
        if event == "stepped":
            waiting, started = list(streamed), {streamed[0]} if streamed else set()
        elif event == "start":
            started.add(layer)
        elif event == "wait":
            waiting.remove(layer)
        elif event == "forward":
            after = following.get(layer)
            late += layer in waiting or (after in waiting and after in gathered)
            late += any(each not in started for each in waiting[:1])
    return late


if __name__ == "__main__":
    main(*sys.argv[1:])
