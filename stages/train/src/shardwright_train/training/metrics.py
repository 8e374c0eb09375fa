"""Files about a run's steps: metrics.jsonl, with a line for each step, and load.json, the mean load of experts."""

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from shardwright.devices.utilization import model_flops_utilization
from shardwright.display.units import TimeLeft
from shardwright.io import BadInput, read_document, write_bytes, write_document
from shardwright.plan.expert_placement import expert_slices, load_misfit
from shardwright.types import Evaluation, ExpertLoad, GroupLoad, LayerLoad, Model, Plan, StepMetrics
from shardwright_train.checkpoints.folders import METRICS
from shardwright_train.engine.optimizer import StepOutcome
from shardwright_train.parallel.world import World
from shardwright_train.training.loggers import Loggers

# load.json, from which search and prediction take the imbalance of experts.


LOAD = "load.json"


@dataclass
class LoadLog:
    """The mean load of a model's experts over consecutive steps."""

    model: Model
    first_step: int = 0
    last_step: int = 0
    _sums: Mapping[int, "_LayerSums"] = field(init=False)

    def __post_init__(self) -> None:
        self._slices = expert_slices(self.model)
        self._sums = {layer: _LayerSums.of_experts(part.stop - part.start) for layer, part in self._slices.items()}

    def resume(self, folders: Sequence[Path], step: int) -> None:
        """Continue from the first load.json in these folders that ends at this step.

        Raises BadInput if a load.json is damaged, or if it was written for another model or by another program.
        """
        for file in (folder / LOAD for folder in folders):
            load = read_document(file, ExpertLoad) if self._sums and file.is_file() else None
            if load is not None and load.last_step == step:
                if (problem := self._misfit(load)) is not None:
                    raise BadInput(file, problem, "move it away: the load is then counted from here on")
                self.first_step, self.last_step = load.first_step, step
                for one in load.layers:
                    self._sums[one.layer].add_mean(one, step - load.first_step + 1)
                return

    def _misfit(self, load: ExpertLoad) -> str | None:
        """Return the reason why sums cannot be continued from a load, or None if they can."""
        if (problem := load_misfit(load, self.model)) is not None:
            return problem
        groups = {one.layer: {group.ep_size for group in one.groups} for one in load.layers}
        lacking = (layer for layer, sums in self._sums.items() if groups.get(layer) != set(sums.imbalance))
        return next((f"it has no groups of layer {layer}, which a run logs" for layer in lacking), None)

    def add(self, step: int, assignments: Sequence[float]) -> None:
        """Count a step, by how often each expert of each layer with experts was chosen, in order."""
        if not assignments:
            return
        self.first_step, self.last_step = self.first_step or step, step
        counts = np.asarray(assignments)
        for layer, part in self._slices.items():
            self._sums[layer].add(counts[part])

    def write(self, folder: Path) -> None:
        """Write load.json into a folder if steps have been counted."""
        if self.last_step:
            layers = tuple(sums.mean(layer, self.last_step - self.first_step + 1) for layer, sums in self._sums.items())
            load = ExpertLoad(
                model=self.model.name, first_step=self.first_step, last_step=self.last_step, layers=layers
            )
            write_document(folder / LOAD, load)


@dataclass
class _LayerSums:
    """Sums over steps of the shares of a layer's experts, and of the imbalance for each number of groups."""

    shares: NDArray[np.float64]
    imbalance: dict[int, float]

    @classmethod
    def of_experts(cls, number: int) -> "_LayerSums":
        return cls(np.zeros(number), {size: 0.0 for size in range(2, number + 1) if number % size == 0})

    def add(self, counts: NDArray[np.float64]) -> None:
        shares = counts / counts.sum()
        self.shares += shares
        for size in self.imbalance:
            self.imbalance[size] += group_imbalance(shares, size)

    def add_mean(self, load: LayerLoad, steps: int) -> None:
        self.shares += np.asarray(load.shares) * steps
        for group in load.groups:
            self.imbalance[group.ep_size] += group.imbalance * steps

    def mean(self, layer: int, steps: int) -> LayerLoad:
        groups = (GroupLoad(ep_size=size, imbalance=total / steps) for size, total in self.imbalance.items())
        return LayerLoad(layer=layer, shares=tuple((self.shares / steps).tolist()), groups=tuple(groups))


def group_imbalance(shares: NDArray[np.float64], groups: int) -> float:
    """Return the ratio of the largest load to the mean, among equal `groups` of consecutive experts."""
    return float(groups * shares.reshape(groups, -1).sum(1).max())


def expert_imbalance(model: Model, assignments: Sequence[float]) -> float | UnsetType:
    """Return the ratio of the largest to the mean expert's load, as a mean over layers; UNSET without experts."""
    counts = np.asarray(assignments)
    parts = [counts[part] for part in expert_slices(model).values()] if assignments else []
    return float(np.mean([part.max() / part.mean() for part in parts])) if parts else UNSET


# metrics.jsonl, written while the next step runs.


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
        """Drop the lines after a checkpoint's step, as later steps run again; without a file, copy the parent's."""
        file = self.file
        if not file.is_file() and parent is not None and (parent / METRICS).is_file():
            file = parent / METRICS
        lines = file.read_bytes().splitlines(keepends=True) if file.is_file() else []
        steps = [_step_of(line) for line in lines]
        kept = [line for line, number in zip(lines, steps, strict=True) if number is not None and number <= step]
        if None in steps[:-1]:
            print(f"{file}: {steps.count(None)} lines are not metrics of a step: dropped", file=sys.stderr)
        write_bytes(self.file, b"".join(kept))

    def write(
        self, step: int, outcome: StepOutcome, step_time_s: float, evaluation: Evaluation | None = None
    ) -> StepMetrics | None:
        """Write a step's metrics, and print about twenty steps of a run, without synchronizing the device.

        Returns the written metrics on rank 0; None on the other ranks.
        """
        plan, world = self.plan, self.world
        if world.rank != 0:
            return None
        tokens_per_s = plan.global_batch_size * plan.model.sequence_length / step_time_s
        share = model_flops_utilization(plan, step_time_s)
        metrics = StepMetrics(
            step=step,
            loss=outcome.loss,
            step_time_s=step_time_s,
            tokens_per_s=tokens_per_s,
            mfu=None if share is None else share.causal,
            mfu_full_square=None if share is None else share.full_square,
            grad_norm=outcome.grad_norm if outcome.finite else None,
            learning_rate=outcome.learning_rate,
            peak_memory_bytes=outcome.peak_memory_bytes,
            auxiliary_loss=UNSET if outcome.auxiliary_loss is None else outcome.auxiliary_loss,
            mtp_losses=outcome.mtp_losses or UNSET,
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
    """Return the step of a line; None if the line is damaged, such as by an interrupted write."""
    try:
        return msgspec.json.decode(line, type=StepMetrics).step if line.endswith(b"\n") else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


@dataclass
class StepReports:
    """A writer of reports on steps, each while the next step runs; a slow write delays the step after that one."""

    metrics: Metrics
    loggers: Loggers
    """Loggers, open only on rank 0."""
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
