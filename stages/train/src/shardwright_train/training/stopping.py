"""Reasons for a run to end before its last step: signals, time limits, non-finite numbers, and too little memory."""

import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain, count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.io import OutOfMemory, read_document
from shardwright.launch.backend import on_accelerator
from shardwright.types import EMBEDDING, GIB, HEAD, MIB, Plan, Prediction, StagePrediction, StopNote
from shardwright_train.engine.engine import Engine
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.world import World, out_of_memory_said
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.runner import Step, mask_bytes
from shardwright_train.torch_private import tree_leaves

# Orderly stops: signals, time limits, when saves and stops are due, and the note that a stop leaves.


NOTE, DONE = "STOPPED.json", "DONE.json"
"""File names of the final notes of a stopped and of a finished run."""


def stop_note(step: int, steps: int, in_time: bool, checkpoint: object) -> StopNote:
    """Return the note of a run that stops now; `in_time` unless its own time limit was reached."""
    return StopNote(
        step=step,
        steps=steps,
        reason="signal" if in_time else "max_time_s",
        checkpoint=str(checkpoint),
        time_utc=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@dataclass(frozen=True)
class Grace:
    """The time between a stop signal and the kill that follows it, and the known duration of a stop."""

    given_s: float | None
    """Seconds from the stop signal to the kill; None: unknown."""
    saves: int
    """Number of checkpoints written at a stop: its own and, if asynchronous, possibly one in progress."""
    step_s: float = 0.0
    """Seconds of the longest step so far."""
    warned: bool = False

    def after(self, step_s: float, saves_s: Sequence[float]) -> "Grace":
        """Return the grace after one more step; warn once if it is too short for a step and the longest save."""
        step_s, save_s = max(step_s, self.step_s), max(saves_s, default=0.0)
        takes_s = step_s + self.saves * save_s
        if self.given_s is None or self.warned or takes_s <= self.given_s:
            return replace(self, step_s=step_s)
        duration = f"{takes_s:.1f} s (a step {step_s:.1f} s, a save {save_s:.1f} s)"
        remedy = "steps since the last save will be lost: ask for more time, or save more often"
        print(f"warning: --grace-s {self.given_s:g}: a stop takes {duration}: {remedy}", file=sys.stderr, flush=True)
        return replace(self, step_s=step_s, warned=True)


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """Collect the stop signals of this process instead of ending it."""
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)


@dataclass(frozen=True)
class Due:
    """The schedule of saves and of the stop, by this process's clock; all ranks agree on it in each step."""

    every_steps: int
    every_minutes: float
    """Minutes between checkpoints; 0: only by steps."""
    max_time_s: float | None
    """Seconds after which the run saves and stops; None: never."""
    began_s: float = field(default_factory=time.monotonic)
    saved_s: float = field(default_factory=time.monotonic)

    def by_step(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step."""
        return step % self.every_steps == 0

    def by_time(self) -> bool:
        """Return whether the last checkpoint is older than `every_minutes`."""
        return 0 < self.every_minutes * 60 < time.monotonic() - self.saved_s

    def to_stop(self) -> bool:
        """Return whether this process's time limit was reached."""
        return self.max_time_s is not None and time.monotonic() - self.began_s > self.max_time_s

    def saved(self) -> "Due":
        """Return the schedule after a checkpoint saved now."""
        return replace(self, saved_s=time.monotonic())


# Non-finite numbers: the dynamic loss scale that avoids them in float16, and the search for their origin.
#
# The loss is multiplied by a scale S before the backward pass and gradients are divided by S after it, so that small
# gradients do not underflow (Micikevicius et al. 2018). S is halved after an overflow, and doubled after 2000 steps
# without one.


_START = 2.0**16
_GROWTH_STEPS = 2000
_FACTOR = 2.0
_MIN_SCALE = 1.0
# Sorted: finds in the forward pass before finds in the backward pass, then by microbatch, layer and rank.
_Find = tuple[int, int, int, int, str]


@dataclass(frozen=True)
class LossScale:
    """The factor by which the loss is multiplied before the backward pass."""

    value: float = 1.0
    fixed: bool = True
    steps_without_overflow: int = 0

    @classmethod
    def for_compute(cls, dtype: str) -> "LossScale":
        """Return the initial scale for a dtype: float16 starts at 2^16 and adapts; other formats need no scale."""
        return cls(_START, fixed=False) if dtype == "float16" else cls()

    @property
    def can_fall(self) -> bool:
        """Return whether an overflow may come from the loss scale; at 1 it comes from the model."""
        return not self.fixed and self.value > _MIN_SCALE

    def after(self, overflowed: bool) -> "LossScale":
        """Return the scale of the next step: halved after an overflow, doubled after 2000 steps without one."""
        if self.fixed:
            return self
        if overflowed:
            return LossScale(self.value / _FACTOR, fixed=False)
        steps = self.steps_without_overflow + 1
        if steps == _GROWTH_STEPS:
            return LossScale(self.value * _FACTOR, fixed=False)
        return LossScale(self.value, fixed=False, steps_without_overflow=steps)


def first_nonfinite(engine: Engine, step: Step, world: World) -> str:
    """Run a step again, checking every layer's output and gradients, and return where the first non-finite value is.

    Collective over the world; the parameters are unchanged since the step, because a non-finite step updates nothing.
    """
    finds: list[_Find] = []
    rank = world.rank

    def find_in_output(name: str, calls: Iterator[int], _module: nn.Module, _args: object, output: object) -> None:
        microbatch = next(calls)
        if not _finite(output):
            place = f"in the output of {name} on rank {rank}, microbatch {microbatch}"
            finds.append((0, microbatch, _position(name), rank, place))

    layers = engine.stage.layers
    hooks = [layer.module.register_forward_hook(partial(find_in_output, layer.name, count())) for layer in layers]
    engine.forward_backward(step)
    for hook in hooks:
        hook.remove()
    for layer in layers:
        for name, parameter in layer.parallel.parameters.items():
            if parameter.grad is not None and not _finite(local_tensor(parameter.grad)):
                # The backward pass comes from the head and meets the lowest layer last.
                place = f"in the gradient of {layer.name}'s {name} on rank {rank}"
                finds.append((1, 0, -_position(layer.name), rank, place))
            parameter.grad = None
    known = list(chain.from_iterable(world.all_say(sorted(finds)[:1], list[_Find])))
    return f"first {min(known)[-1]}" if known else "and not again when the step was repeated"


def _finite(values: object) -> bool:
    # Detached, so that no graph is kept: otherwise a replay would go on to results that selective recomputation omits.
    return all(bool(torch.isfinite(x.detach()).all()) for x in tree_leaves(values) if isinstance(x, Tensor))


def _position(layer: str) -> int:
    if layer == EMBEDDING:
        return -1
    return 1 << 30 if layer == HEAD else int(layer[len("layers[") : -1])


# Device memory of a run: a trial before the first step, masks that plans do not count, and out-of-memory reports.


_STATES = ("parameters", "gradients", "optimizer")


@contextmanager
def lack_of_memory_explained(file: Path, plan: Plan, engine: Engine) -> Iterator[None]:
    """Convert PyTorch's out-of-memory errors to OutOfMemory, with a one-line explanation.

    `file`: the plan's file; the prediction is expected next to it.
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
    """Return the bytes on this rank's device by category; the last one is the rest of PyTorch's memory."""
    device, optimizer = engine.stage.context.device, engine.optimizer
    sizes = optimizer.parameter_bytes, optimizer.gradient_bytes, optimizer.state_bytes
    resident = dict(zip(_STATES, sizes, strict=True))
    in_all = torch.accelerator.memory_allocated(device) if on_accelerator(device) else 0
    return resident | {"others": max(0, in_all - sum(resident.values()))}


def _by_category(stage: StagePrediction) -> dict[str, int]:
    states = {name: stage.memory_terms_bytes.get(name, 0) for name in _STATES}
    return states | {"others": stage.memory_bytes - sum(states.values())}


def _sizes_text(sizes_bytes: Mapping[str, int]) -> str:
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes_bytes.items())
    return f"{sum(sizes_bytes.values()) / GIB:.2f} GiB ({parts})"


def prediction_of(file: Path, plan: Plan) -> Prediction | None:
    """Return the prediction next to a plan's file; None if there is none, or if it belongs to another plan."""
    prediction_file = file.with_suffix(".prediction.json")
    prediction = read_document(prediction_file, Prediction) if prediction_file.is_file() else None
    return prediction if prediction is not None and prediction.plan_sha256 == plan.sha256 else None


def _fitting_plan(prediction: Prediction, stage: StagePrediction, needed: int, plan: Plan, file: Path) -> str:
    """Return, in words, the best runner-up that fits even if it exceeds its prediction by the same ratio as `plan`."""
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


def mask_memory(context: RankContext, prediction: Prediction | None) -> str:
    """Return a warning about the memory of masks, which predictions do not count, on the rank with the least left."""
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
    """Run each pipeline stage by itself on a step's samples, all at the same time, and print the result.

    Leaves no gradients. `group`: a group of all ranks; `file`: the plan's file. Raises OutOfMemory if a device has too
    little memory.
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
