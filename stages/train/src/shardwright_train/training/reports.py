"""What steps came to, written down while the next ones run."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from shardwright_formats.types.run import Evaluation
from shardwright_train.engine.optimizer import StepOutcome
from shardwright_train.training.loggers import Loggers
from shardwright_train.training.metrics import Metrics


@dataclass
class StepReports:
    """Writes steps down in order, each while the next one runs: what is slow to write holds up the one after that."""

    metrics: Metrics
    loggers: Loggers
    """Open on rank 0 alone."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "reports"))
    _writing: list[Future[None]] = field(default_factory=list)

    def write(self, step: int, outcome: StepOutcome, step_time_s: float, evaluation: Evaluation | None = None) -> None:
        """Begin to write a step down, once the one before is; raises what that one could not be written for."""
        self.finish()
        self._writing.append(self._thread.submit(self._write, step, outcome, step_time_s, evaluation))

    def finish(self) -> None:
        """Wait until all steps are written down, as they must be before a checkpoint says that they are taken."""
        while self._writing:
            self._writing.pop().result()

    def close(self) -> None:
        """Write down what is not yet, and end."""
        try:
            self.finish()
        finally:
            self._thread.shutdown()
            self.loggers.close()

    def _write(self, step: int, outcome: StepOutcome, step_time_s: float, evaluation: Evaluation | None) -> None:
        written = self.metrics.write(step, outcome, step_time_s, evaluation)
        if written is not None:
            self.loggers.write(written)
