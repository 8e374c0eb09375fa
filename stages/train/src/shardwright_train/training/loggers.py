"""The numbers of each step, sent to TensorBoard, Weights & Biases or MLflow by rank 0."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shardwright_formats.io import BadInput
from shardwright_formats.types import Plan, Prediction, StepMetrics
from shardwright_train.options import LogTo

_GIB = 2**30
_PROJECT = "shardwright"
_BESIDE = {
    "step time": ["time/step_s", "time/predicted_step_s"],
    "memory": ["memory/peak_gib", "memory/predicted_gib"],
    "loss": ["loss/train", "loss/validation"],
}
"""Values that TensorBoard's Custom Scalars draw in one chart."""


class Logger(Protocol):
    """A logger of the numbers of steps."""

    @property
    def faults(self) -> tuple[type[Exception], ...]:
        """Return the exceptions that its library raises where it cannot write."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step."""

    def close(self) -> None:
        """Flush and close the logger."""


@dataclass(frozen=True)
class RunNames:
    """The names and folder that the loggers of a run use."""

    out: Path
    plan: Plan
    key: str
    """Key of the run, unchanged when it is resumed."""
    first: int
    """Number of the first step that this process takes."""


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

    def _each(self, do: Callable[[Logger], None]) -> None:
        for name, logger in list(self.to.items()):
            try:
                do(logger)
            except logger.faults as error:
                del self.to[name]
                problem = f"warning: --log-to {name}: {error}: nothing more is sent there; metrics.jsonl has all steps"
                print(" ".join(problem.split()), file=sys.stderr, flush=True)


def open_loggers(names: tuple[LogTo, ...], run: RunNames, prediction: Prediction | None) -> Loggers:
    """Open the requested loggers; raise BadInput where one cannot be opened."""
    found = Loggers(prediction)
    for name in dict.fromkeys(names):
        if name != "none":
            found.to[name] = _OPEN[name](run)
    return found


def scalars(metrics: StepMetrics, prediction: Prediction | None) -> dict[str, float]:
    """Return the numbers of a step by name, without unknown ones."""
    evaluation = metrics.evaluation
    values = {
        "loss/train": metrics.loss,
        "loss/validation": None if evaluation is None else evaluation.loss,
        "loss/validation_perplexity": None if evaluation is None else evaluation.perplexity,
        "optimizer/grad_norm": metrics.grad_norm,
        "optimizer/learning_rate": metrics.learning_rate,
        "time/step_s": metrics.step_time_s,
        "time/predicted_step_s": None if prediction is None else prediction.estimate.simulated_step_time_s,
        "time/tokens_per_s": metrics.tokens_per_s,
        "time/mfu": metrics.mfu,
        "memory/peak_gib": max(metrics.peak_memory_bytes) / _GIB,
        "memory/predicted_gib": None if prediction is None else prediction.estimate.memory_bytes / _GIB,
    }
    return {name: value for name, value in values.items() if value is not None}


class _TensorBoard:
    """A logger of event files in `OUT/tensorboard`, written without tensorboardX's thread, which hides errors."""

    faults = (OSError,)

    def __init__(self, run: RunNames) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.summary import custom_scalars

        folder = run.out / "tensorboard"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A name of its own: within a second of the last start it would be the same, and overwritten.
            self._file = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        except OSError as error:
            raise BadInput(folder, error.strerror or str(error), "name another --out, or --log-to none") from None
        # TensorBoard forgets what an earlier process wrote of these steps.
        self._event(run.first, session_log=SessionLog(status=SessionLog.START))
        layout = {"together": {title: ["Multiline", tags] for title, tags in _BESIDE.items()}}
        self._event(run.first, summary=custom_scalars(layout))
        self._file.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._event(step, summary=Summary(value=found))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _event(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write_event(Event(wall_time=time.time(), step=step, **content))


class _WeightsAndBiases:
    """A run of the project `shardwright`, or of WANDB_PROJECT; with WANDB_MODE=offline in `OUT/wandb`."""

    def __init__(self, run: RunNames) -> None:
        import wandb

        self.faults = (OSError, wandb.Error)
        try:
            run.out.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name=f"{run.out.name}: {run.plan.name}",
                id=run.key,
                resume="allow",
                dir=str(run.out),
                config={"plan_sha256": run.plan.sha256, "model": run.plan.model.name},
                settings=wandb.Settings(silent=True),
            )
        except (OSError, wandb.Error) as error:
            remedy = "log in with `wandb login`, or set WANDB_MODE=offline"
            raise BadInput("--log-to wandb", " ".join(str(error).split()), remedy) from None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A run of the experiment `shardwright`, or of MLFLOW_EXPERIMENT_NAME, at MLFLOW_TRACKING_URI, or `OUT/mlruns`."""

    def __init__(self, run: RunNames) -> None:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # files are what needs neither server nor database
        import mlflow
        from mlflow.exceptions import MlflowException

        self.faults = (OSError, MlflowException)
        where = os.environ.get("MLFLOW_TRACKING_URI") or (run.out / "mlruns").resolve().as_uri()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        try:
            self._client: Any = mlflow.MlflowClient(where)
            found = self._client.get_experiment_by_name(experiment)
            number = self._client.create_experiment(experiment) if found is None else found.experiment_id
            earlier = self._client.search_runs([number], f"tags.shardwright_run = '{run.key}'", max_results=1)
            tags = {"shardwright_run": run.key, "plan_sha256": run.plan.sha256}
            made = earlier[0] if earlier else self._client.create_run(number, tags=tags, run_name=run.out.name)
        except (OSError, MlflowException) as error:
            problem = " ".join(str(error).split())
            raise BadInput("--log-to mlflow", problem, f"see MLFLOW_TRACKING_URI, which is {where}") from None
        self._run = made.info.run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [Metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)


_OPEN: Mapping[str, Callable[[RunNames], Logger]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "mlflow": _MLflow,
}
