"""The numbers of each step, sent to TensorBoard, Weights & Biases or MLflow by rank 0."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import UNSET

from shardwright_formats.io import BadInput
from shardwright_formats.types import GIB, Plan, Prediction, StepMetrics
from shardwright_train.options import LogTo

_PROJECT = "shardwright"
_CHARTS = {
    "step time": ["time/step_s", "time/predicted_step_s"],
    "memory": ["memory/peak_gib", "memory/predicted_gib"],
    "loss": ["loss/train", "loss/validation"],
}
"""Values that TensorBoard's Custom Scalars draw in one chart."""


class Logger(NamedTuple):
    """A logger of the numbers of steps."""

    write: Callable[[int, Mapping[str, float]], None]
    """Function that writes the numbers of a step."""
    close: Callable[[], object]
    """Function that flushes and closes the logger."""
    faults: tuple[type[Exception], ...]
    """Exceptions that its library raises where it cannot write."""


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
    """A library that logs, and the package that `pip` installs it by."""

    package: str
    installed_as: str
    open: Callable[[RunNames], Logger]


@dataclass
class Loggers:
    """The loggers of a run; a failing one is dropped after one warning, and the run goes on."""

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
    """Open the requested loggers; raise BadInput where one cannot be opened."""
    return Loggers(prediction, {name: _LIBRARIES[name].open(run) for name in dict.fromkeys(names) if name != "none"})


def check_loggers(names: tuple[LogTo, ...]) -> None:
    """Raise BadInput where the package of a requested logger is not installed."""
    for name in names:
        if name != "none" and find_spec((library := _LIBRARIES[name]).package) is None:
            remedy = f"pip install {library.installed_as}, or log elsewhere"
            raise BadInput(f"--log-to {name}", f"{library.package} is not installed", remedy)


def scalars(metrics: StepMetrics, prediction: Prediction | None) -> dict[str, float]:
    """Return the numbers of a step by name, without unknown ones."""
    evaluation = metrics.evaluation
    values = {
        "loss/train": metrics.loss,
        "loss/validation": None if evaluation is None else evaluation.loss,
        "loss/validation_perplexity": None if evaluation is None else evaluation.perplexity,
        "experts/imbalance": None if metrics.expert_imbalance is UNSET else metrics.expert_imbalance,
        "optimizer/grad_norm": metrics.grad_norm,
        "optimizer/learning_rate": metrics.learning_rate,
        "time/step_s": metrics.step_time_s,
        "time/predicted_step_s": None if prediction is None else prediction.estimate.simulated_step_time_s,
        "time/tokens_per_s": metrics.tokens_per_s,
        "time/mfu": metrics.mfu,
        "memory/peak_gib": max(metrics.peak_memory_bytes) / GIB,
        "memory/predicted_gib": None if prediction is None else prediction.estimate.memory_bytes / GIB,
    }
    return {name: value for name, value in values.items() if value is not None}


def _open_tensorboard(run: RunNames) -> Logger:
    """Write event files in `OUT/tensorboard`, without tensorboardX's thread, which hides errors."""
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.summary import custom_scalars

    folder = run.out / "tensorboard"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The process number keeps the names of two starts within a second apart: the second would overwrite the first.
        file = EventsWriter(str(folder / "events"), f".{os.getpid()}")
    except OSError as error:
        raise BadInput(folder, error.strerror or str(error), "name another --out, or --log-to none") from None

    def add(step: int, **content: Any) -> None:
        file.write_event(Event(wall_time=time.time(), step=step, **content))

    def write(step: int, values: Mapping[str, float]) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        add(step, summary=Summary(value=scalars))
        file.flush()

    # TensorBoard forgets the events of these steps that an earlier process wrote.
    add(run.first, session_log=SessionLog(status=SessionLog.START))
    add(
        run.first, summary=custom_scalars({"together": {title: ["Multiline", tags] for title, tags in _CHARTS.items()}})
    )
    file.flush()
    return Logger(write, file.close, (OSError,))


def _open_wandb(run: RunNames) -> Logger:
    """Begin a run of the project `shardwright`, or of WANDB_PROJECT; with WANDB_MODE=offline in `OUT/wandb`."""
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


def _open_mlflow(run: RunNames) -> Logger:
    """Begin or continue a run of the experiment `shardwright`, or of MLFLOW_EXPERIMENT_NAME.

    It is kept at MLFLOW_TRACKING_URI, or in `OUT/mlruns`.
    """
    if "MLFLOW_TRACKING_URI" not in os.environ:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # files need neither server nor database
    import mlflow
    from mlflow.entities import Metric
    from mlflow.exceptions import MlflowException

    faults = (OSError, MlflowException)
    where = os.environ.get("MLFLOW_TRACKING_URI") or (run.out / "mlruns").resolve().as_uri()
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
    try:
        client: Any = mlflow.MlflowClient(where)
        experiment = client.get_experiment_by_name(name)
        number = client.create_experiment(name) if experiment is None else experiment.experiment_id
        earlier = client.search_runs([number], f"tags.shardwright_run = '{run.key}'", max_results=1)
        tags = {"shardwright_run": run.key, "plan_sha256": run.plan.sha256}
        remote = earlier[0] if earlier else client.create_run(number, tags=tags, run_name=run.out.name)
    except faults as error:
        problem = " ".join(str(error).split())
        raise BadInput("--log-to mlflow", problem, f"see MLFLOW_TRACKING_URI, which is {where}") from None
    run_id = remote.info.run_id

    def write(step: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        client.log_batch(run_id, [Metric(name, value, now_ms, step) for name, value in values.items()])

    return Logger(write, lambda: client.set_terminated(run_id), faults)


_LIBRARIES = {
    "tensorboard": _Library("tensorboardX", "tensorboardX", _open_tensorboard),
    "wandb": _Library("wandb", "'shardwright-train[wandb]'", _open_wandb),
    "mlflow": _Library("mlflow", "'shardwright-train[mlflow]'", _open_mlflow),
}
