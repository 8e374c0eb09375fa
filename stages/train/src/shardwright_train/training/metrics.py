"""metrics.jsonl: a line for each step of a run, written while the next step runs."""

import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import UNSET

from shardwright_formats.display.time_left import TimeLeft
from shardwright_formats.io import write_bytes
from shardwright_formats.types import EMBEDDING, HEAD, Evaluation, Plan, StepMetrics
from shardwright_train.checkpoints.folders import METRICS
from shardwright_train.engine.optimizer import StepOutcome
from shardwright_train.parallel.world import World
from shardwright_train.training.expert_load import LoadLog, expert_imbalance
from shardwright_train.training.loggers import Loggers

# Published peaks in FLOP/s: dense matrix rates, from NVIDIA's data sheets of A100 (2021), H100 (2023) and H200 (2024).
_BFLOAT16 = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
}


@dataclass(frozen=True)
class Metrics:
    """The metrics file of a plan's run, written by rank 0."""

    file: Path
    plan: Plan
    world: World
    steps: int
    saves_s: Sequence[float] = ()
    """Seconds of the saves so far, a list that the saver extends."""
    time_left: TimeLeft = field(default_factory=TimeLeft)

    def keep_until(self, step: int, parent: Path | None) -> None:
        """Drop the lines past a checkpoint's step, as those steps run again; without lines, begin with the parent's."""
        file = self.file
        if not file.is_file() and parent is not None and (parent / METRICS).is_file():
            file = parent / METRICS
        lines = file.read_bytes().splitlines(keepends=True) if file.is_file() else []
        steps = [_step_of(line) for line in lines]
        kept = [line for line, number in zip(lines, steps, strict=True) if number is not None and number <= step]
        if None in steps[:-1]:
            print(f"{file}: {steps.count(None)} lines are no metrics of a step: dropped", file=sys.stderr)
        write_bytes(self.file, b"".join(kept))

    def write(
        self, step: int, outcome: StepOutcome, step_time_s: float, evaluation: Evaluation | None = None
    ) -> StepMetrics | None:
        """Write a step's metrics, and print one step in twenty, without synchronizing the device.

        Returns the written metrics on rank 0; None on the others.
        """
        plan, world = self.plan, self.world
        if world.rank != 0:
            return None
        tokens_per_s = plan.global_batch_size * plan.model.sequence_length / step_time_s
        metrics = StepMetrics(
            step=step,
            loss=outcome.loss,
            step_time_s=step_time_s,
            tokens_per_s=tokens_per_s,
            mfu=model_flops_utilization(plan, step_time_s),
            grad_norm=outcome.grad_norm if outcome.finite else None,
            learning_rate=outcome.learning_rate,
            peak_memory_bytes=outcome.peak_memory_bytes,
            auxiliary_loss=UNSET if outcome.auxiliary_loss is None else outcome.auxiliary_loss,
            expert_imbalance=expert_imbalance(plan.model, outcome.assignments),
            time_utc=datetime.now(UTC).isoformat(timespec="milliseconds"),
            save_s=max(self.saves_s, default=UNSET),
            evaluation=evaluation,
        )
        with self.file.open("ab") as file:
            file.write(msgspec.json.encode(metrics) + b"\n")
        rest = self.time_left.words(self.steps - step)
        if step == 1 or step % max(1, self.steps // 20) == 0 or step == self.steps:
            took = f"{step_time_s:.3f} s, {tokens_per_s:.0f} tokens/s{rest}"
            print(f"step {step}/{self.steps}: loss {outcome.loss:.4f}, {took}", flush=True)
        if evaluation is not None:
            print(f"step {step}/{self.steps}: {_described(evaluation)}", flush=True)
        return metrics


def _described(evaluation: Evaluation) -> str:
    perplexity = "" if evaluation.perplexity is None else f", perplexity {evaluation.perplexity:.6g}"
    loss = f"validation loss {evaluation.loss:.4f}{perplexity}"
    return f"{loss} ({evaluation.samples} samples, {evaluation.time_s:.1f} s)"


def _step_of(line: bytes) -> int | None:
    """Return the step of a line; None where it is damaged, such as when its writing was interrupted."""
    try:
        return msgspec.json.decode(line, type=StepMetrics).step if line.endswith(b"\n") else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def model_flops_utilization(plan: Plan, step_time_s: float) -> float | None:
    """Return the fraction of peak that the model's own operations use (Chowdhery et al. 2022); None if unknown.

    A backward pass counts twice a forward pass, less for what is frozen; what is recomputed does not count.
    """
    devices = [plan.cluster.of_rank(rank).device for rank in range(plan.world_size)]
    if plan.precision.compute != "bfloat16" or not set(devices) <= _BFLOAT16.keys():
        return None
    operations = sum(plan.model.types[name].step_flops_per_sample for name in (EMBEDDING, *plan.model.layers, HEAD))
    return operations * plan.global_batch_size / step_time_s / sum(_BFLOAT16[device] for device in devices)


@dataclass
class StepReports:
    """A writer of steps in order, each while the next one runs; a slow write delays the step after that."""

    metrics: Metrics
    loggers: Loggers
    """Loggers, open on rank 0 alone."""
    load: LoadLog
    """Load of experts."""
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
            self.load.add(step, outcome.assignments)
            self.loggers.write(written)
