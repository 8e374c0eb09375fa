"""Validation: the loss on held-out data, under the training plan."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwright.io import RunFailed, sha256_of_value
from shardwright.types import Evaluation, Plan
from shardwright_train.checkpoints.folders import Best
from shardwright_train.data.objectives import Batches, TextBatches
from shardwright_train.data.share import Batch, BatchShare, on_host, read_ahead
from shardwright_train.data.split import Split, SplitPart
from shardwright_train.engine.engine import Engine
from shardwright_train.models.base import family_of
from shardwright_train.options import RunOptions
from shardwright_train.parallel.vocab import IGNORED
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.runner import evaluating, run_forward

_SEED = 0
"""Seed of random draws in an evaluation, such as masked tokens, equal for every run."""
_MAX_PERPLEXITY = 1e15


@dataclass(frozen=True)
class ValidationData:
    """The validation data of a run."""

    batches: Batches
    samples: int
    """Number of samples to evaluate on, the first of the split; padding of the last global batch does not count."""

    @property
    def sha256(self) -> str:
        """The identity of the evaluation data: losses on other data are not comparable."""
        return sha256_of_value([self.batches.sha256, self.samples])

    def read(self, number: int, share: BatchShare) -> Batch:
        """A rank's share of a global batch, numbered from 0; labels past the last sample are IGNORED."""
        first = number * share.global_samples
        batch = self.batches.read(first, share)
        if "labels" not in batch:
            return batch
        beyond = torch.from_numpy(first + share.rows >= self.samples)
        labels = batch["labels"]
        return batch | {"labels": labels.masked_fill(beyond.view(-1, *[1] * (labels.dim() - 1)), IGNORED)}


def open_validation(job: RunOptions, plan: Plan) -> ValidationData | None:
    """The validation data of a run, or None; raises BadInput if evaluation is impossible."""
    objective = family_of(plan.model, job.plan).trained_on(plan.model, job.objective, job.loss_on)
    if job.valid_data is not None:
        batches: Batches = objective.open(job.valid_data, _SEED, boundaries=job.boundaries)
    elif job.valid_fraction:
        batches = objective.open(job.data, _SEED, SplitPart(Split.VALID, job.fractions), job.boundaries)
    else:
        return None
    return ValidationData(batches, min(job.eval_samples or batches.per_epoch, batches.per_epoch))


@dataclass(frozen=True)
class Evaluator:
    """An evaluator of an engine's weights; collective over the world."""

    engine: Engine
    data: ValidationData
    world: World

    def evaluate(self, step: int, stops: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Return the mean loss over all labels, without ignored positions, after a step; None if a rank wants to stop.

        Parameters, gradients, moments and random states are left as they are. Raises RunFailed on all ranks if the
        loss is not a number or no label counts.
        """
        began, totals, stage = time.monotonic(), [0.0, 0.0], self.engine.stage
        self.engine.late.flush()
        share, device = stage.context.share, self.world.device
        numbers = range(-(-self.data.samples // share.global_samples))

        def read(number: int) -> Batch:
            return on_host(self.data.read(number, share), device)

        with evaluating(stage), read_ahead(read, numbers) as ready:
            for number, batch in zip(numbers, ready, strict=True):
                self.world.heartbeat.begin(f"in the evaluation after step {step}, batch {number + 1}")
                sums = run_forward(stage, self.engine.pipeline, batch)
                shared = torch.cat([sums, sums.new_full((1,), float(stops()))])
                dist.all_reduce(shared)
                *parts, stopped = shared.tolist()
                if stopped:
                    return None
                totals = [total + part for total, part in zip(totals, parts, strict=True)]
        loss, labels = totals[0] / totals[1] if totals[1] else math.nan, round(totals[1])
        if not math.isfinite(loss):
            raise RunFailed(f"evaluation after step {step}: loss {loss} over {labels} labels")
        is_text = isinstance(self.data.batches, TextBatches)
        return Evaluation(
            loss=loss,
            perplexity=math.exp(loss) if is_text and loss < math.log(_MAX_PERPLEXITY) else None,
            labels=labels,
            samples=self.data.samples,
            time_s=time.monotonic() - began,
        )


def better(best: Best | None, evaluation: Evaluation | None, step: int, data: ValidationData) -> Best | None:
    """The lowest loss so far, an evaluation after a step included."""
    if evaluation is None or (best is not None and best.loss <= evaluation.loss):
        return best
    return Best(step=step, loss=evaluation.loss, data_sha256=data.sha256)


def best_so_far(job: RunOptions, saved: Best | None, data: ValidationData | None) -> Best | None:
    """The lowest loss from which a run continues; None if not requested, or for other data."""
    if saved is None or data is None or not job.keep_best:
        return None
    return saved if saved.data_sha256 == data.sha256 else None
