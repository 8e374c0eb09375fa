"""Training with a plan: steps, metrics, checkpoints, evaluations, and an orderly stop."""

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from shardwright.io import RunFailed, Stopped, read_document, remove_temporaries, sha256_of_value, write_document
from shardwright.types import BestCheckpoint, Evaluation, Plan, RunResult
from shardwright_train.checkpoints.choice import check_shared, checkpoint_to_resume
from shardwright_train.checkpoints.folders import (
    METRICS,
    Beginning,
    Best,
    Identity,
    Progress,
    folder_of_run,
    folder_of_step,
)
from shardwright_train.checkpoints.tensors import Saver, read_tensors, total_bytes
from shardwright_train.data.document_pairs import document_warnings
from shardwright_train.data.objectives import Batches, RandomBatches, TextBatches
from shardwright_train.data.share import Batch, BatchShare, on_host, read_ahead
from shardwright_train.data.split import Split, SplitPart
from shardwright_train.engine.engine import Engine, build_engine, say_compiled
from shardwright_train.engine.learning_rate import Hyperparameters, LearningRateFactor
from shardwright_train.engine.optimizer import StepOutcome
from shardwright_train.models.attention_kernels import check_kernels, settle_attention
from shardwright_train.models.base import family_of
from shardwright_train.options import RunJob, RunOptions
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.vocab import IGNORED
from shardwright_train.parallel.world import World, check_device
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.runner import Step, evaluating, run_forward
from shardwright_train.start import deterministic
from shardwright_train.training.loggers import Loggers, RunNames, open_loggers
from shardwright_train.training.metrics import LOAD, LoadLog, Metrics, StepReports
from shardwright_train.training.stopping import (
    DONE,
    NOTE,
    Due,
    Grace,
    LossScale,
    asked_to_stop,
    first_nonfinite,
    lack_of_memory_explained,
    mask_memory,
    prediction_of,
    stop_note,
    try_stages,
)
from shardwright_train.weights.reading import Weights, open_weights

# Validation: the loss on held-out data, under the training plan.


_SEED = 0
"""Seed of random draws in an evaluation, such as masked tokens; the same in every run."""
_MAX_PERPLEXITY = 1e15


@dataclass(frozen=True)
class ValidationData:
    """The validation data of a run."""

    batches: Batches
    samples: int
    """Number of samples to evaluate on, from the split's beginning; the last global batch's padding does not count."""

    @property
    def sha256(self) -> str:
        """A hash of the evaluation data: losses on other data are not comparable."""
        return sha256_of_value([self.batches.sha256, self.samples])

    def read(self, number: int, share: BatchShare) -> Batch:
        """Return a rank's share of a global batch, numbered from 0; labels past the last sample are IGNORED."""
        first = number * share.global_samples
        batch = self.batches.read(first, share)
        if "labels" not in batch:
            return batch
        beyond = torch.from_numpy(first + share.rows >= self.samples)
        labels = batch["labels"]
        return batch | {"labels": labels.masked_fill(beyond.view(-1, *[1] * (labels.dim() - 1)), IGNORED)}


def open_validation(job: RunOptions, plan: Plan) -> ValidationData | None:
    """Return the validation data of a run, or None; raise BadInput if evaluation is impossible."""
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

        Parameters, gradients, optimizer states and random states are left as they are. Raises RunFailed on all ranks
        if the loss is not finite or no label counts.
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
    """Return the lowest loss so far, including an evaluation after a step."""
    if evaluation is None or (best is not None and best.loss <= evaluation.loss):
        return best
    return Best(step=step, loss=evaluation.loss, data_sha256=data.sha256)


def best_so_far(job: RunOptions, saved: Best | None, data: ValidationData | None) -> Best | None:
    """Return the lowest loss of earlier evaluations of a run; None if it is not requested, or belongs to other data."""
    if saved is None or data is None or not job.keep_best:
        return None
    return saved if saved.data_sha256 == data.sha256 else None


# The run.


@dataclass(frozen=True)
class _Run:
    """The state of a run that is constant from the first step to the last."""

    job: RunJob
    plan: Plan
    world: World
    attention: str
    batches: Batches
    engine: Engine
    saver: Saver
    resumed: Progress
    """Progress from which this process continues."""
    evaluator: Evaluator | None
    """Evaluator; None without data to evaluate on."""
    reports: StepReports

    @property
    def tries(self) -> bool:
        """Return whether each pipeline stage is tried by itself before the first step."""
        return self.job.trial and len(self.plan.stages) > 1

    def evaluates_after(self, step: int) -> bool:
        """Return whether an evaluation follows a step."""
        interval = self.job.eval_every
        return step == self.job.steps or (interval > 0 and step % interval == 0)

    def read(self, step: int) -> Step:
        """Return the inputs of a step; called before the step begins."""
        share = self.engine.stage.context.share
        first = self.resumed.samples + (step - self.resumed.step - 1) * share.global_samples
        batch = on_host(self.batches.read(first, share), self.world.device)
        counted, further = self.batches.counted(first, share.global_samples), tuple[int, ...]()
        if share.depths:
            assert isinstance(self.batches, TextBatches | RandomBatches)
            of_batch = partial(self.batches.counted_ahead, first, share.global_samples)
            further = tuple(of_batch(depth) for depth in range(1, share.depths + 1))
        return Step(batch, counted, further, self.job.mtp_loss_scaling_factor, self.job.seed, step)


def train(job: RunJob, world: World) -> None:
    """Train to the job's last step on all ranks, from the newest whole checkpoint of this run if there is one.

    Raises on all ranks together: BadInput if plan, data or checkpoint cannot be used; RunFailed if loss or gradient
    norm is not finite; Stopped, after saving the state, if a rank was asked to stop.
    """
    with deterministic(job.plan, job.deterministic):
        _train(job, world)


def _train(job: RunJob, world: World) -> None:
    plan = read_document(job.plan, Plan)
    batches, validation = _agreed_inputs(job, plan, world)
    folder = folder_of_run(job.checkpoints, plan, job.resume_from)
    check_shared(folder, world)
    weights = _weights(job, plan, world)
    identity = Identity.of_run(job, plan, batches.sha256, None if weights is None else weights.sha256(world))
    resumed = checkpoint_to_resume(job, identity, folder, world)
    (attention,) = settle_attention([plan], world, by_document=job.reset_attention_mask)
    loss_scale = LossScale.for_compute(plan.precision.compute)
    length = plan.model.sequence_length
    before = Progress.begin(loss_scale.value) if resumed is None else resumed.progress(length)
    engine = _engine(job, plan, world, attention, before.updates, resumed is not None, weights)
    if job.reset_attention_mask and world.rank == 0:
        masks = mask_memory(engine.stage.context, prediction_of(job.plan, plan))
        for line in (masks, *document_warnings(plan, batches)):
            print(f"warning: {line}", file=sys.stderr, flush=True)
    if resumed is not None:
        read_tensors(resumed.folder, engine.tensors(), engine.expert_orders())
    evaluator = None if validation is None else Evaluator(engine, validation, world)
    goes_on = resumed is not None and resumed.folder.parent == folder
    best = best_so_far(job, before.best if goes_on else None, validation)
    before = msgspec.structs.replace(before, best=best)
    loggers = _loggers(job, plan, world, folder, before.step + 1)
    began = Beginning() if resumed is None else resumed.beginning(goes_on, length)
    saver = _saver(job, folder, identity, began, engine)
    reports = StepReports(Metrics(folder / METRICS, plan, world, job.steps, saver.took_s), loggers, LoadLog(plan.model))
    with closing(saver), closing(reports):
        run = _Run(job, plan, world, attention, batches, engine, saver, before, evaluator, reports)
        world.first_does(lambda: _begin(run, None if resumed is None else resumed.folder.parent))
        to_do = range(before.step + 1, job.steps + 1)
        if to_do and run.tries:
            try_stages(engine, run.read(to_do[0]), world, saver.group, job.plan)
        with asked_to_stop() as stop_asked, read_ahead(run.read, to_do) as ready:
            progress = _steps(run, ready, stop_asked)
    checkpoint = folder_of_step(folder, progress.step)
    if resumed is not None and resumed.record.progress.step == progress.step:
        checkpoint = resumed.folder
    world.first_does(lambda: _finish(run, progress, checkpoint))


def _agreed_inputs(job: RunOptions, plan: Plan, world: World) -> tuple[Batches, ValidationData | None]:
    def read() -> tuple[Batches, ValidationData | None]:
        check_device(plan, world, job.plan)
        family = family_of(plan.model, job.plan)
        check_kernels(plan, family, world.device, job.plan, by_document=job.reset_attention_mask)
        objective = family.trained_on(plan.model, job.objective, job.loss_on)
        batches = objective.open(job.data, job.seed, SplitPart(Split.TRAIN, job.fractions), job.boundaries)
        validation = open_validation(job, plan)
        if world.rank == 0:
            batches.check_contents()
            if validation is not None:
                validation.batches.check_contents()
        return batches, validation

    world.heartbeat.begin("while the data is read through")
    inputs = world.together(read)
    world.heartbeat.begin("before the first step")
    return inputs


def _loggers(job: RunOptions, plan: Plan, world: World, folder: Path, first: int) -> Loggers:
    """Return the requested loggers on rank 0, none on other ranks."""

    def opened() -> Loggers:
        if world.rank:
            return Loggers(None)
        key = sha256(f"{folder.resolve()}".encode()).hexdigest()[:16]
        return open_loggers(job.log_to, RunNames(job.out, plan, key, first), prediction_of(job.plan, plan))

    return world.together(opened)


def _weights(job: RunOptions, plan: Plan, world: World) -> Weights | None:
    """Return the given initial weights; None if no folder is given."""
    if job.weights is None:
        return None
    folder, family = job.weights, family_of(plan.model, job.plan)
    return world.together(lambda: open_weights(folder, plan.model, family, job.new_weights, job.adapter))


def _engine(
    job: RunOptions, plan: Plan, world: World, attention: str, updates: int, resumes: bool, weights: Weights | None
) -> Engine:
    context = RankContext(
        plan=plan,
        family=family_of(plan.model, job.plan),
        rank=world.rank,
        groups=Groups(world.device.type),
        attention=attention,
        device=world.device,
        seed=job.seed,
        resumes=resumes,
        weights=weights,
    )
    asked = msgspec.structs.asdict(job) | {
        "learning_rate_factors": tuple(map(LearningRateFactor.parse, job.learning_rate_factor)),
        "learning_rate_schedule": job.schedule,
    }
    settings = Hyperparameters(
        **{each.name: asked[each.name] for each in fields(Hyperparameters) if each.name in asked}
    )
    return build_engine(context, settings, updates)


def _saver(job: RunJob, folder: Path, identity: Identity, began: Beginning, engine: Engine) -> Saver:
    return Saver(
        folder=folder,
        identity=identity,
        parent=None if job.resume_from is None else str(job.resume_from.resolve()),
        keep_last=job.keep_checkpoints,
        keep_every=job.keep_every,
        asynchronous=job.checkpoint_async,
        group=dist.new_group(backend="gloo"),
        bytes_in_all=total_bytes(engine.tensors()),
        expert_orders=engine.expert_orders(),
        began=began,
        locks=job.locks,
    )


def _steps(run: _Run, ready: Iterator[Step], stop_asked: list[int]) -> Progress:
    """Run the training loop, and return the final progress, which has been saved."""
    job, progress = run.job, run.resumed
    began, due = time.monotonic(), Due(job.checkpoint_every, job.checkpoint_minutes, job.max_time_s)
    fixed = LossScale.for_compute(run.plan.precision.compute).fixed
    scale = LossScale(progress.loss_scale, fixed, progress.steps_without_overflow)
    grace = Grace(job.grace_s if run.world.rank == 0 else None, saves=1 + job.checkpoint_async)
    for step in range(run.resumed.step + 1, job.steps + 1):
        run.world.heartbeat.begin(f"in step {step}")
        run.saver.check()
        started = time.perf_counter()
        work = replace(next(ready), loss_scale=scale.value)
        wants_to_stop = partial(_wants_to_stop, stop_asked, due)
        with lack_of_memory_explained(job.plan, run.plan, run.engine):
            outcome = run.engine.train_step(work, stop=wants_to_stop(), save=due.by_time())
        step_time_s = time.perf_counter() - started
        if run.plan.compile and not run.tries and run.world.rank == 0 and step == run.resumed.step + 1:
            say_compiled(run.plan, step_time_s)
        scale = _scale_after(run, work, outcome, scale)
        evaluation, stops, best = None, outcome.stop, progress.best
        if run.evaluator is not None and run.evaluates_after(step) and not stops:
            with lack_of_memory_explained(job.plan, run.plan, run.engine):
                evaluation = run.evaluator.evaluate(step, wants_to_stop)
            stops = evaluation is None
            best = better(best, evaluation, step, run.evaluator.data) if job.keep_best else None
        run.reports.write(step, outcome, step_time_s, evaluation)
        is_best = best != progress.best
        progress = _progress_after(run, progress, outcome, scale, best, time.monotonic() - began)
        ends = stops or step == job.steps
        if ends or outcome.save or is_best or due.by_step(step):
            run.reports.finish()
            run.reports.load.write(run.saver.folder)
            run.saver.save(run.engine.tensors(), progress, wait=ends)
            due = due.saved()
        if step > run.resumed.step + 1:  # the first step takes longer
            grace = grace.after(step_time_s, run.saver.took_s)
        if stops and step < job.steps:
            note = stop_note(step, job.steps, not due.to_stop(), folder_of_step(run.saver.folder, step))
            run.world.first_does(partial(write_document, job.out / NOTE, note))
            raise Stopped(f"stopped after step {step} of {job.steps}: run the same command to resume")
    return progress


def _scale_after(run: _Run, work: Step, outcome: StepOutcome, scale: LossScale) -> LossScale:
    """Return the loss scale of the next step.

    Raises RunFailed, on all ranks, if loss or gradient norm is not finite for another reason than too high a scale.
    """
    overflowed = scale.can_fall and math.isfinite(outcome.loss) and not outcome.finite
    if not outcome.finite and not overflowed:
        where = first_nonfinite(run.engine, work, run.world)
        problem = f"loss {outcome.loss}, gradient norm {outcome.grad_norm}"
        raise RunFailed(f"step {work.number}: {problem}: {where}: nothing of this step was saved")
    return scale.after(overflowed)


def _progress_after(
    run: _Run, before: Progress, outcome: StepOutcome, scale: LossScale, best: Best | None, took_s: float
) -> Progress:
    """Return the progress after one more step; this process has taken `took_s` for its steps."""
    return Progress(
        step=before.step + 1,
        samples=before.samples + run.plan.global_batch_size,
        first_loss=outcome.loss if before.step == 0 else before.first_loss,
        last_loss=outcome.loss,
        wall_s=run.resumed.wall_s + took_s,
        updates=before.updates + outcome.finite,
        loss_scale=scale.value,
        steps_without_overflow=scale.steps_without_overflow,
        best=best,
    )


def _wants_to_stop(stop_asked: list[int], due: Due) -> bool:
    return bool(stop_asked) or due.to_stop()


def _begin(run: _Run, parent: Path | None) -> None:
    """Prepare the output folder and the metrics file for the following steps, and remove temporary files."""
    run.job.out.mkdir(parents=True, exist_ok=True)
    run.reports.metrics.keep_until(run.resumed.step, parent)
    folders = (run.saver.folder, *(() if parent is None else (parent,)))
    run.reports.load.resume(folders, run.resumed.step)
    (run.job.out / NOTE).unlink(missing_ok=True)
    for file in (run.reports.metrics.file, *(run.job.out / name for name in (METRICS, DONE, NOTE, LOAD))):
        remove_temporaries(file)


def _finish(run: _Run, progress: Progress, checkpoint: Path) -> None:
    """Write the final note of a run, which must still hold its locks."""
    for lock in run.job.locks:
        lock.check()
    out = run.job.out
    out.mkdir(parents=True, exist_ok=True)
    prediction = prediction_of(run.job.plan, run.plan)
    shutil.copyfile(run.saver.folder / METRICS, out / METRICS)
    run.reports.load.write(out)
    best = None
    if progress.best is not None:
        best_folder = folder_of_step(run.saver.folder, progress.best.step)
        best = BestCheckpoint(step=progress.best.step, loss=progress.best.loss, checkpoint=str(best_folder))
    result = RunResult(
        plan_sha256=run.plan.sha256,
        steps=progress.step,
        first_loss=progress.first_loss,
        final_loss=progress.last_loss,
        attention=run.attention,
        wall_s=progress.wall_s,
        checkpoint=str(checkpoint),
        best=best,
        predicted_step_time_s=None if prediction is None else prediction.estimate.simulated_step_time_s,
    )
    write_document(out / DONE, result)
