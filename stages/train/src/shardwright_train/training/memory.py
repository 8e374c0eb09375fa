"""Device memory of a run: a trial before the first step, masks that plans do not count, and out-of-memory reports."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.io import OutOfMemory, read_document
from shardwright.launch.backend import on_accelerator
from shardwright.types import GIB, MIB, Plan, Prediction, StagePrediction
from shardwright_train.engine.engine import Engine
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.world import World, out_of_memory_said
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.runner import Step, mask_bytes

_STATES = ("parameters", "gradients", "optimizer")


@contextmanager
def lack_of_memory_explained(file: Path, plan: Plan, engine: Engine) -> Iterator[None]:
    """Raise PyTorch's out-of-memory error as OutOfMemory, with a one-line explanation.

    `file` is the plan's; the prediction is searched next to it.
    """
    try:
        with out_of_memory_said():
            yield
    except OutOfMemory as error:
        resident = _resident(engine)
        needed = sum(resident.values()) + (error.asked_bytes or 0)
        report = f"{error.asked_bytes / GIB:.2f} GiB requested" if error.asked_bytes else str(error).split(". ")[0]
        report += f"; held {_sizes_text(resident)}"
        prediction = prediction_of(file, plan)
        if prediction is None:
            report += "; there is no prediction next to the plan"
        else:
            stage = prediction.estimate.stages[engine.stage.context.stage_index]
            alternative = _fitting_plan(prediction, stage, needed, plan, file)
            report += f", predicted {_sizes_text(_by_category(stage))}; {alternative}"
        raise OutOfMemory(report, asked_bytes=error.asked_bytes) from None


def _resident(engine: Engine) -> dict[str, int]:
    """Return the bytes on this rank's device by category, the rest of PyTorch's memory last."""
    parameters = list(engine.optimizer.parameters.values())
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    device = engine.stage.context.device
    sizes = (sum(local_tensor(p).nbytes for p in parameters), sum(g.nbytes for g in gradients))
    resident = dict(zip(_STATES, (*sizes, engine.optimizer.state_bytes), strict=True))
    in_all = torch.accelerator.memory_allocated(device) if on_accelerator(device) else 0
    return resident | {"others": max(0, in_all - sum(resident.values()))}


def _by_category(stage: StagePrediction) -> dict[str, int]:
    states = {name: stage.memory_terms_bytes.get(name, 0) for name in _STATES}
    return states | {"others": stage.memory_bytes - sum(states.values())}


def _sizes_text(sizes_bytes: Mapping[str, int]) -> str:
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes_bytes.items())
    return f"{sum(sizes_bytes.values()) / GIB:.2f} GiB ({parts})"


def prediction_of(file: Path, plan: Plan) -> Prediction | None:
    """Return the prediction next to a plan's file, if it exists and is of this plan."""
    prediction_file = file.with_suffix(".prediction.json")
    prediction = read_document(prediction_file, Prediction) if prediction_file.is_file() else None
    return prediction if prediction is not None and prediction.plan_sha256 == plan.sha256 else None


def _fitting_plan(prediction: Prediction, stage: StagePrediction, needed: int, plan: Plan, file: Path) -> str:
    """Return, in words, the best runner-up that fits even if it exceeds its prediction as much as this plan did."""
    factor = max(1.0, needed / stage.memory_bytes)
    room = min(node.memory_bytes for node in plan.cluster.node_types.values())
    for number, runner_up in enumerate(prediction.runners_up, start=1):
        memory, step_s = runner_up.estimate.memory_bytes, runner_up.estimate.simulated_step_time_s
        is_smaller = memory < prediction.estimate.memory_bytes and memory * factor <= room
        if is_smaller and runner_up.plan.sha256 != plan.sha256:
            where = f"runner-up {number} ({runner_up.plan.name}) of {file.with_suffix('.prediction.json')}"
            return f"{where} fits: predicted {memory / GIB:.2f} GiB, {step_s:.4g} s a step"
    if not prediction.runners_up:
        return "search with --runners-up, which names plans that may fit, or with a lower memory_gib"
    return "none of its runners-up would fit: search with a lower memory_gib"


def say_mask_memory(file: Path, context: RankContext) -> None:
    """Warn of the memory that document masks take in addition to the prediction; `file` is the plan's."""
    print(f"warning: {mask_memory(context, prediction_of(file, context.plan))}", file=sys.stderr, flush=True)


def mask_memory(context: RankContext, prediction: Prediction | None) -> str:
    """A warning of how much memory masks take beyond the prediction, for the rank with the least left."""
    sizes = []
    for rank in range(context.plan.world_size):
        there = replace(context, rank=rank)
        masks, device = mask_bytes(there), there.plan.cluster.of_rank(rank).memory_bytes
        predicted = 0 if prediction is None else prediction.estimate.stages[there.stage_index].memory_bytes
        sizes.append((device - predicted - masks, rank, masks, predicted, device))
    left, rank, masks, predicted, device = min(sizes)
    masks_text = f"masks take {masks / MIB:.1f} MiB of rank {rank}, which its plan does not count"
    if prediction is not None:
        total = f"{(predicted + masks) / MIB:.1f} MiB with the {predicted / MIB:.1f} predicted"
        fits = "of" if left >= 0 else f"{-left / MIB:.1f} more than the"
        masks_text += f": {total}, {fits} {device / MIB:.1f} of its device"
    return f"--reset-attention-mask: {masks_text}"


def try_stages(engine: Engine, step: Step, world: World, group: dist.ProcessGroup, file: Path) -> None:
    """Run each pipeline stage by itself on a step's samples, all at the same time.

    Leaves no gradients, and prints the result.
    `group` is one of all ranks, `file` the plan's. Raises OutOfMemory if a device lacks memory.
    """
    plan = engine.stage.context.plan
    world.heartbeat.begin("while each pipeline stage is tried alone")
    began = time.monotonic()
    with lack_of_memory_explained(file, plan, engine):
        tried = engine.try_alone(step)
    dist.barrier(group=group)
    if world.rank == 0:
        compiled = ", blocks compiled in it" if plan.compile else ""
        microbatches = f"{tried} of {plan.num_microbatches} microbatches in the first{compiled}"
        took = f"{time.monotonic() - began:.1f} s, {microbatches}"
        print(f"tried each pipeline stage alone: {took} (--no-trial leaves it out)", file=sys.stderr, flush=True)
