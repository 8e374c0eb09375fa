"""The numbers of each step, sent to TensorBoard or Weights & Biases by rank 0."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET

from shardwright.io import BadInput
from shardwright.types import GIB, Plan, Prediction, StepMetrics
from shardwright_train.options import LogTo

_PROJECT = "shardwright"


class Logger(NamedTuple):
    """A logger of the numbers of steps."""

    write: Callable[[int, Mapping[str, float]], None]
    """Function that writes the numbers of a step."""
    close: Callable[[], object]
    """Function that flushes and closes the logger."""
    faults: tuple[type[Exception], ...]
    """Exceptions that its library raises if it cannot write."""


@dataclass(frozen=True)
class RunNames:
    """The names and folder that the loggers of a run use."""

    out: Path
    plan: Plan
    key: str
    """Key of the run, unchanged when it is resumed."""
    first: int
    """Number of the first step that this process takes."""


class _Library(NamedTuple):
    """A logging library, and the name of its package for `pip`."""

    package: str
    installed_as: str
    open: Callable[[RunNames], Logger]


@dataclass
class Loggers:
    """The loggers of a run; one that fails is dropped after a warning, and the run continues."""

    prediction: Prediction | None
    to: dict[str, Logger] = field(default_factory=dict)

    def write(self, metrics: StepMetrics) -> None:
        """Send the numbers of a step to each logger."""
        values = scalars(metrics, self.prediction)
        self._each(lambda logger: logger.write(metrics.step, values))

    def close(self) -> None:
        """Flush and close each logger."""
        self._each(lambda logger: logger.close())

    def _each(self, do: Callable[[Logger], object]) -> None:
        for name, logger in list(self.to.items()):
            try:
                do(logger)
            except logger.faults as error:
                del self.to[name]
                warning = f"warning: --log-to {name}: {error}: nothing more is sent there; metrics.jsonl has all steps"
                print(" ".join(warning.split()), file=sys.stderr, flush=True)


def open_loggers(names: tuple[LogTo, ...], run: RunNames, prediction: Prediction | None) -> Loggers:
    """Open the requested loggers; raise BadInput if one cannot be opened."""
    return Loggers(prediction, {name: _LIBRARIES[name].open(run) for name in dict.fromkeys(names) if name != "none"})


def check_loggers(names: tuple[LogTo, ...]) -> None:
    """Raise BadInput if the package of a requested logger is not installed."""
    for name in names:
        if name != "none" and find_spec((library := _LIBRARIES[name]).package) is None:
            remedy = f"pip install {library.installed_as}, or log elsewhere"
            raise BadInput(f"--log-to {name}", f"{library.package} is not installed", remedy)


def scalars(metrics: StepMetrics, prediction: Prediction | None) -> dict[str, float]:
    """Return the numbers of a step by name, without those that are unknown."""
    evaluation = metrics.evaluation
    further = () if metrics.mtp_losses is UNSET else metrics.mtp_losses
    values = {
        "loss/train": metrics.loss,
        "loss/validation": None if evaluation is None else evaluation.loss,
        "loss/validation_perplexity": None if evaluation is None else evaluation.perplexity,
        **{f"loss/mtp_{depth}": loss for depth, loss in enumerate(further, start=1)},
        "experts/imbalance": None if metrics.expert_imbalance is UNSET else metrics.expert_imbalance,
        "optimizer/grad_norm": metrics.grad_norm,
        "optimizer/learning_rate": metrics.learning_rate,
        "time/step_s": metrics.step_time_s,
        "time/predicted_step_s": None if prediction is None else prediction.estimate.simulated_step_time_s,
        "time/tokens_per_s": metrics.tokens_per_s,
        "time/mfu": metrics.mfu,
        "time/mfu_full_square": metrics.mfu_full_square,
        "memory/peak_gib": max(metrics.peak_memory_bytes) / GIB,
        "memory/predicted_gib": None if prediction is None else prediction.estimate.memory_bytes / GIB,
    }
    return {name: value for name, value in values.items() if value is not None}


def _open_tensorboard(run: RunNames) -> Logger:
    """Open a logger of event files in `OUT/tensorboard`; they replace an earlier process's steps that run again."""
    from torch.utils.tensorboard import SummaryWriter

    folder = run.out / "tensorboard"
    try:
        writer = SummaryWriter(str(folder), purge_step=run.first)
    except OSError as error:
        raise BadInput(folder, error.strerror or str(error), "choose another --out, or leave out --log-to") from None

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Logger(write, writer.close, (OSError,))


def _open_wandb(run: RunNames) -> Logger:
    """Open a logger to a run in the project `shardwright`, or WANDB_PROJECT; with WANDB_MODE=offline in `OUT/wandb`."""
    import wandb

    faults = (OSError, wandb.Error)
    try:
        run.out.mkdir(parents=True, exist_ok=True)
        remote = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=f"{run.out.name}: {run.plan.name}",
            id=run.key,
            resume="allow",
            dir=str(run.out),
            config={"plan_sha256": run.plan.sha256, "model": run.plan.model.name},
            settings=wandb.Settings(silent=True),
        )
    except faults as error:
        remedy = "log in with `wandb login`, or set WANDB_MODE=offline"
        raise BadInput("--log-to wandb", " ".join(str(error).split()), remedy) from None
    return Logger(lambda step, values: remote.log(dict(values), step=step), remote.finish, faults)


_LIBRARIES = {
    "tensorboard": _Library("tensorboard", "'shardwright[tensorboard]'", _open_tensorboard),
    "wandb": _Library("wandb", "'shardwright[wandb]'", _open_wandb),
}
