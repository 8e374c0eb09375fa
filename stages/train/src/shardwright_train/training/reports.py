"""Reports of steps, written while the next ones run."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from shardwright_formats.types import Evaluation
from shardwright_train.engine.optimizer import StepOutcome
from shardwright_train.training.loggers import Loggers
from shardwright_train.training.metrics import Metrics


@dataclass
class StepReports:
    """A writer of steps in order, each while the next one runs; a slow write delays the step after that."""

    metrics: Metrics
    loggers: Loggers
    """Loggers, open on rank 0 alone."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "reports"))
    _writing: list[Future[None]] = field(default_factory=list)

    def write(self, step: int, outcome: StepOutcome, step_time_s: float, evaluation: Evaluation | None = None) -> None:
        """Start to write a step once the previous one is written; raise the error of that write."""
        self.finish()
        self._writing.append(self._thread.submit(self._write, step, outcome, step_time_s, evaluation))

    def finish(self) -> None:
        """Wait until all steps are written, as required before a checkpoint."""
        while self._writing:
            self._writing.pop().result()

    def close(self) -> None:
        """Write the remaining steps, and end."""
        try:
            self.finish()
        finally:
            self._thread.shutdown()
            self.loggers.close()

    def _write(self, step: int, outcome: StepOutcome, step_time_s: float, evaluation: Evaluation | None) -> None:
        written = self.metrics.write(step, outcome, step_time_s, evaluation)
        if written is not None:
            self.loggers.write(written)
