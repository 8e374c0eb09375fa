"""Training with a plan: steps, metrics, checkpoints, and an orderly stop."""

import math
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright_formats.io.errors import BadInput, RunFailed, ShardwrightError, Stopped
from shardwright_formats.io.json import read_document, write_document
from shardwright_formats.types.plan import Plan
from shardwright_formats.types.run import RunResult
from shardwright_train.data.objectives import Batches
from shardwright_train.data.read_ahead import read_ahead
from shardwright_train.data.share import on_host
from shardwright_train.engine.engine import Engine, build_engine, say_compiled
from shardwright_train.engine.learning_rate import Hyperparameters
from shardwright_train.models.attention_kernels import check_kernels, settle_attention
from shardwright_train.models.registry import family_named
from shardwright_train.options import RunOptions
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World, check_device
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.runner import Step
from shardwright_train.training.checkpoint import Progress, load, read_progress, save
from shardwright_train.training.checkpoint_names import folder_of_plan, latest_checkpoint
from shardwright_train.training.loss_scale import LossScale
from shardwright_train.training.metrics import METRICS, Metrics
from shardwright_train.training.nonfinite import first_nonfinite


@dataclass(frozen=True)
class _Run:
    """All that stays the same from the first step to the last."""

    job: RunOptions
    plan: Plan
    world: World
    attention: str
    batches: Batches
    engine: Engine
    folder: Path

    @property
    def metrics(self) -> Metrics:
        """The lines that its steps write."""
        return Metrics(self.folder / METRICS, self.plan, self.world, self.job.steps)

    def read(self, step: int) -> Step:
        """What a step works on; called ahead of it."""
        share = self.engine.stage.context.share
        batch = on_host(self.batches.read(step, share), self.world.device)
        return Step(batch, self.batches.counted(step, share.global_samples), self.job.seed, step)


def train(job: RunOptions, world: World) -> None:
    """Train to the job's last step on all ranks, from the latest checkpoint of this plan if there is one.

    Raises BadInput together on all ranks when plan, data or checkpoint cannot be used, RunFailed when loss or gradient
    norm is no number, Stopped when a rank was asked to stop: then the state is saved first.
    """
    plan = read_document(job.plan, Plan)
    batches, resumed = _agreed_inputs(job, plan, world)
    (attention,) = settle_attention([plan], world)
    scale = LossScale.for_compute(plan.precision.compute)
    progress = Progress(0, plan.sha256, batches.sha256, job.seed, 0.0, 0.0, 0.0, 0, scale.value, 0)
    if resumed is not None:
        progress = read_progress(resumed)
    engine = _engine(job, plan, world, attention, progress.updates, resumed is not None)
    run = _Run(job, plan, world, attention, batches, engine, folder_of_plan(job.checkpoints, plan.sha256))
    if resumed is not None:
        load(resumed, engine.tensors())
    if world.rank == 0:
        run.metrics.keep_until(progress.step)
    to_do = range(progress.step + 1, job.steps + 1)
    with _asked_to_stop() as stop_asked, read_ahead(run.read, to_do) as ready:
        progress, saved = _steps(run, progress, resumed, ready, stop_asked)
    if world.rank == 0:
        assert saved is not None
        _finish(run, progress, saved)


def _agreed_inputs(job: RunOptions, plan: Plan, world: World) -> tuple[Batches, Path | None]:
    problem: ShardwrightError | None = None
    batches, resumed = None, None
    try:
        check_device(plan, world, job.plan)
        family = family_named(plan.model.family, job.plan)
        check_kernels(plan, family, world.device, job.plan)
        batches = family.learns(plan.model).open(job.data, job.seed)
        resumed = _checkpoint_to_resume(job, plan, batches)
    except ShardwrightError as error:
        problem = error
    world.agree(problem)
    assert batches is not None
    return batches, resumed


def _checkpoint_to_resume(job: RunOptions, plan: Plan, batches: Batches) -> Path | None:
    latest = latest_checkpoint(folder_of_plan(job.checkpoints, plan.sha256))
    chosen = job.resume_from or latest
    if chosen is None:
        return None
    progress = read_progress(chosen)
    for what, found, wanted in (
        ("another plan", progress.plan_sha256, plan.sha256),
        ("other data", progress.data_sha256, batches.sha256),
        ("another seed", progress.seed, job.seed),
    ):
        if found != wanted:
            raise BadInput(chosen, f"was saved under {what} ({found})", "start anew in another --checkpoints folder")
    if progress.step > job.steps:
        raise BadInput(chosen, f"is at step {progress.step}, past --steps {job.steps}", "ask for more steps")
    return chosen


def _engine(job: RunOptions, plan: Plan, world: World, attention: str, updates: int, resumes: bool) -> Engine:
    context = RankContext(
        plan=plan,
        family=family_named(plan.model.family, job.plan),
        rank=world.rank,
        groups=Groups(world.device.type),
        attention=attention,
        device=world.device,
        seed=job.seed,
        resumes=resumes,
    )
    settings = Hyperparameters(
        learning_rate=job.learning_rate,
        warmup_steps=job.warmup_steps,
        steps=job.steps,
        weight_decay=job.weight_decay,
        clip_norm=job.clip_norm,
        learning_rate_schedule=job.learning_rate_schedule,
        final_fraction=job.final_fraction,
        decay_fraction=job.decay_fraction,
    )
    return build_engine(context, settings, updates)


def _steps(
    run: _Run, progress: Progress, saved: Path | None, ready: Iterator[Step], stop_asked: list[int]
) -> tuple[Progress, Path | None]:
    """The training loop, from what was saved; returns the last progress and where that is saved."""
    job, began = run.job, time.monotonic() - progress.wall_s
    fixed = LossScale.for_compute(run.plan.precision.compute).fixed
    scale = LossScale(progress.loss_scale, fixed, progress.steps_without_overflow)
    begins = True
    for step in range(progress.step + 1, job.steps + 1):
        run.world.heartbeat.begin(f"in step {step}")
        started = time.perf_counter()
        work = replace(next(ready), loss_scale=scale.value)
        outcome = run.engine.train_step(work, stop=bool(stop_asked))
        step_time_s = time.perf_counter() - started
        if run.plan.compile and run.world.rank == 0 and begins:
            say_compiled(run.plan, step_time_s)
        begins = False
        overflowed = scale.can_fall and math.isfinite(outcome.loss) and not outcome.finite
        if not outcome.finite and not overflowed:
            where = first_nonfinite(run.engine, work)
            what = f"loss {outcome.loss}, gradient norm {outcome.grad_norm}"
            raise RunFailed(f"step {step}: {what}: {where}: nothing of this step was saved")
        scale = scale.after(overflowed)
        run.metrics.write(step, outcome, step_time_s)
        first = outcome.loss if step == 1 else progress.first_loss
        progress = replace(
            progress,
            step=step,
            first_loss=first,
            last_loss=outcome.loss,
            wall_s=time.monotonic() - began,
            updates=progress.updates + outcome.finite,
            loss_scale=scale.value,
            steps_without_overflow=scale.steps_without_overflow,
        )
        if outcome.stop or step == job.steps or step % job.checkpoint_every == 0:
            saved = save(run.folder, run.engine.tensors(), progress, job.keep_checkpoints)
        if outcome.stop and step < job.steps:
            raise Stopped(f"stopped after step {step} of {job.steps}: run the same command to resume")
    return progress, saved


def _finish(run: _Run, progress: Progress, checkpoint: Path) -> None:
    out = run.job.out
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(run.folder / METRICS, out / METRICS)
    result = RunResult(
        plan_sha256=run.plan.sha256,
        steps=progress.step,
        first_loss=progress.first_loss,
        final_loss=progress.last_loss,
        attention=run.attention,
        wall_s=progress.wall_s,
        checkpoint=str(checkpoint),
    )
    write_document(out / "DONE.json", result)


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """Collect the stop signals of this process instead of dying of them."""
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)
