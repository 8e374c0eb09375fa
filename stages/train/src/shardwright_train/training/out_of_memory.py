"""The report of a rank that lacks memory in a step: its memory, the predicted one, and a plan that would fit."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from shardwright_formats.io import OutOfMemory, read_document
from shardwright_formats.types import Plan, Prediction, RunnerUp, StagePrediction
from shardwright_train.engine.engine import Engine
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.world import out_of_memory_said

_STATES = ("parameters", "gradients", "optimizer")
_GIB = 2**30


@contextmanager
def lack_of_memory_explained(file: Path, plan: Plan, engine: Engine) -> Iterator[None]:
    """Raise PyTorch's out-of-memory error as OutOfMemory, with a one-line explanation.

    `file` is the plan's; the prediction is searched next to it.
    """
    try:
        with out_of_memory_said():
            yield
    except OutOfMemory as error:
        held = _held(engine)
        needed = sum(held.values()) + (error.asked_bytes or 0)
        told = f"{error.asked_bytes / _GIB:.2f} GiB asked for" if error.asked_bytes else str(error).split(". ")[0]
        told += f"; held {_sizes(held)}"
        prediction = prediction_of(file, plan)
        if prediction is None:
            told += "; no prediction stands beside the plan"
        else:
            stage = prediction.estimate.stages[engine.stage.context.stage_index]
            told += f", predicted {_sizes(_by_category(stage))}; {_what_fits(prediction, stage, needed, plan, file)}"
        raise OutOfMemory(told, asked_bytes=error.asked_bytes) from None


def _held(engine: Engine) -> dict[str, int]:
    """Return bytes on this rank's device by category, the rest of PyTorch's memory last."""
    parameters = list(engine.optimizer.parameters.values())
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    device = engine.stage.context.device
    sizes = (sum(local_tensor(p).nbytes for p in parameters), sum(g.nbytes for g in gradients))
    held = dict(zip(_STATES, (*sizes, engine.optimizer.state_bytes), strict=True))
    in_all = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return held | {"others": max(0, in_all - sum(held.values()))}


def _by_category(stage: StagePrediction) -> dict[str, int]:
    states = {name: stage.memory_terms_bytes.get(name, 0) for name in _STATES}
    return states | {"others": stage.memory_bytes - sum(states.values())}


def _sizes(of: Mapping[str, int]) -> str:
    parts = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in of.items())
    return f"{sum(of.values()) / _GIB:.2f} GiB ({parts})"


def prediction_of(file: Path, plan: Plan) -> Prediction | None:
    """Return the prediction next to a plan's file, if it exists and is of this plan."""
    beside = file.with_suffix(".prediction.json")
    prediction = read_document(beside, Prediction) if beside.is_file() else None
    return prediction if prediction is not None and prediction.plan_sha256 == plan.sha256 else None


def _what_fits(prediction: Prediction, stage: StagePrediction, needed: int, plan: Plan, file: Path) -> str:
    """Return the best runner-up that fits even if it exceeds its prediction as much as this plan did."""
    factor = max(1.0, needed / stage.memory_bytes)
    memory = min(node.memory_bytes for node in plan.cluster.node_types.values())

    def fits(runner_up: RunnerUp) -> bool:
        return runner_up.plan.sha256 != plan.sha256 and runner_up.estimate.memory_bytes * factor <= memory

    for number, runner_up in enumerate(prediction.runners_up, start=1):
        smaller = runner_up.estimate.memory_bytes < prediction.estimate.memory_bytes
        if smaller and fits(runner_up):
            gib, step_s = runner_up.estimate.memory_bytes / _GIB, runner_up.estimate.simulated_step_time_s
            where = f"runner-up {number} ({runner_up.plan.name}) of {file.with_suffix('.prediction.json')}"
            return f"{where} fits: predicted {gib:.2f} GiB, {step_s:.4g} s a step"
    return "none of its runners-up would fit: search with a lower memory_gib"
