"""The choice of the checkpoint that a run resumes from: rank 0 decides, and all ranks verify it."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from shardwright.io import BadInput, check_regular, read_document, sha256_of_file, sha256_of_value
from shardwright_train.checkpoints import folders
from shardwright_train.checkpoints.folders import RECORD, Beginning, Checkpoint, Identity, Progress
from shardwright_train.engine.learning_rate import Hyperparameters
from shardwright_train.options import RunOptions
from shardwright_train.parallel.world import World

_VISIBLE_S = 20.0
"""Seconds that another node's file system may take to show a new file; an assumption."""
_MAX_FILE = 2**60
_OTHER = "take another checkpoint"
_NOT_SHARED = "name a --checkpoints folder that all nodes share"
_NONE_WHOLE = "restore what is missing, or start again in another --checkpoints folder"
_DIFFERENCES = {
    "plan_sha256": "another plan",
    "model_sha256": "another model",
    "tensors_sha256": "a model of other parameters or settings",
    "data_sha256": "other data",
    "seed": "another seed",
    "weights_sha256": "other initial weights",
    "global_batch_size": "another global batch size",
}
_REMEDY = {
    "global_batch_size": "plan for the same, or allow it with --allow-batch-change",
    "model_sha256": "start again in another --checkpoints folder, or allow longer samples with --allow-length-change",
}


class Resumed(NamedTuple):
    """A checkpoint that was found complete and undamaged."""

    folder: Path
    record: Checkpoint

    def progress(self, sequence_length: int) -> Progress:
        """Return the progress in samples of a length; samples of another length are converted by tokens, rounded up."""
        progress, saved = self.record.progress, self.record.identity.sequence_length or sequence_length
        return msgspec.structs.replace(progress, samples=-(-progress.samples * saved // sequence_length))

    def beginning(self, goes_on: bool, sequence_length: int) -> Beginning:
        """Return where a run's global batches begin: as recorded if it `goes_on`; in a branch, at the checkpoint."""
        progress = self.progress(sequence_length)
        return self.record.began if goes_on else Beginning(step=progress.step, samples=progress.samples)


def check_shared(folder: Path, world: World) -> None:
    """Raise BadInput on all ranks unless each rank sees the files that rank 0 writes to a folder."""
    sign = folder / world.first_says(lambda: folders.write_sign(folder).name, str, folder)

    def check() -> None:
        if not _appears(sign):
            raise BadInput(folder, f"rank {world.rank} does not see what rank 0 writes there", _NOT_SHARED)

    world.together(check)
    world.first_does(sign.unlink)


def _appears(file: Path) -> bool:
    until = time.monotonic() + _VISIBLE_S
    while not (file.parent.is_dir() and file.name in os.listdir(file.parent)):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def checkpoint_to_resume(job: RunOptions, identity: Identity, run: Path, world: World) -> Resumed | None:
    """Return the checkpoint to continue from: the run's newest one, or else the one that it branches from, or None.

    Raises BadInput on all ranks if a run of this identity cannot continue from it.
    """
    resumed = newest_whole(run, world)
    if resumed is not None:
        check_same_run(resumed, identity)
    elif job.resume_from is not None:
        resumed = read_whole(job.resume_from, world)
        check_branch(resumed, identity, job.allow_batch_change, job.allow_length_change)
    if resumed is not None and resumed.record.progress.step > job.steps:
        problem = f"is at step {resumed.record.progress.step}, past --steps {job.steps}"
        raise BadInput(resumed.folder, problem, "ask for more steps")
    if resumed is not None and (change := changed_rate(resumed.record, identity)) is not None:
        if resumed.folder.parent == run and job.learning_rate_schedule is None:
            branch = f"or begin a branch with --resume-from {resumed.folder}"
            raise BadInput(
                resumed.folder, change, f"give --learning-rate-schedule {job.schedule} to accept it, {branch}"
            )
        if world.rank == 0:
            print(f"{resumed.folder}: {change}", file=sys.stderr, flush=True)
    return resumed


def newest_whole(run: Path, world: World) -> Resumed | None:
    """Return a run's newest undamaged checkpoint, or None if it has no checkpoint.

    Newer damaged checkpoints are set aside, with a warning. Raises BadInput on all ranks if all are damaged; then
    none is changed.
    """
    damaged: dict[str, BadInput] = {}
    for name in world.first_says(lambda: _candidates(run), tuple[str, ...]):
        try:
            resumed = read_whole(run / name, world)
        except BadInput as error:
            damaged[name] = error
            continue
        world.first_does(lambda: _set_all_aside(run, damaged))
        return resumed
    if damaged:
        file, problem, _ = next(iter(damaged.values())).args
        raise BadInput(run, f"none of its {len(damaged)} checkpoints is undamaged ({file}: {problem})", _NONE_WHOLE)
    return None


def _candidates(run: Path) -> tuple[str, ...]:
    """Return the names of a run's checkpoints, newest first, after removing unfinished ones.

    Raises BadInput if only checkpoints that were set aside remain: such a run must not restart silently.
    """
    folders.remove_leftovers(run)
    names = tuple(path.name for path in folders.named_checkpoints(run))
    if not names and (damaged := folders.damaged_checkpoints(run)):
        raise BadInput(run, f"has no checkpoints but {len(damaged)} damaged ones, such as {damaged[-1]}", _NONE_WHOLE)
    return names


def _set_all_aside(run: Path, damaged: Mapping[str, BadInput]) -> None:
    for name, error in damaged.items():
        aside = folders.set_aside(run / name).name
        print(f"{error}: set aside as {aside}, resuming from the one before", file=sys.stderr, flush=True)


def read_whole(checkpoint: Path, world: World) -> Resumed:
    """Return a checkpoint's record, once all ranks agree on it and each of its files matches it.

    Raises BadInput on all ranks, naming the file.
    """
    record = world.together(lambda: read_record(checkpoint))
    digest = sha256_of_value(record)
    first = world.first_says(lambda: digest, str)

    def check() -> None:
        if digest != first:
            raise BadInput(
                checkpoint / RECORD, f"rank {world.rank} reads a different record from rank 0's", _NOT_SHARED
            )

    world.together(check)
    share = range(world.rank, len(record.files), world.size)
    world.together(lambda: check_files(checkpoint, record, share))
    return Resumed(checkpoint, record)


def read_record(checkpoint: Path) -> Checkpoint:
    """Return a checkpoint's record; raise BadInput if there is none, or if its step differs from the folder's name."""
    if not os.path.lexists(checkpoint / RECORD):
        raise BadInput(
            checkpoint, f"is not a complete checkpoint: it has no {RECORD}", "pass the folder of a step, step-…"
        )
    record = read_document(checkpoint / RECORD, Checkpoint)
    if folders.step_of(checkpoint) not in (None, record.progress.step):
        raise BadInput(checkpoint / RECORD, f"belongs to step {record.progress.step}", _OTHER)
    return record


def check_files(checkpoint: Path, record: Checkpoint, share: Sequence[int]) -> None:
    """Raise BadInput if files of a checkpoint, given by indices in the record, are damaged, or if others exist."""
    strange = sorted({path.name for path in checkpoint.glob("*.safetensors")} - {file.name for file in record.files})
    if strange:
        raise BadInput(checkpoint / strange[0], "is not one of the files that were saved", _OTHER)
    for saved in (record.files[number] for number in share):
        file = checkpoint / saved.name
        check_regular(file, _MAX_FILE)
        size = file.stat().st_size
        if size != saved.bytes:
            raise BadInput(file, f"has {size} bytes, {saved.bytes} were saved", _OTHER)
        if sha256_of_file(file) != saved.sha256:
            raise BadInput(file, "its SHA-256 differs from the one that was saved", _OTHER)


def check_same_run(resumed: Resumed, asked: Identity) -> None:
    """Raise BadInput if a run's checkpoint was saved with another identity than the requested one."""
    is_older = folders.names_plan(resumed.folder.parent, resumed.record.identity.plan_sha256)
    unlike = {"tensors_sha256", *(["plan_sha256"] if is_older else [])}  # the model's own hash is stricter
    _check(resumed, asked, tuple(name for name in _DIFFERENCES if name not in unlike))
    saved = msgspec.structs.asdict(resumed.record.identity.settings)
    for name, wanted in msgspec.structs.asdict(asked.settings).items():
        if saved[name] != wanted:
            raise BadInput(
                resumed.folder,
                f"was saved with {name} {saved[name]}, now {wanted} is requested",
                f"request the saved one, or begin a branch with --resume-from {resumed.folder}",
            )


def check_branch(resumed: Resumed, asked: Identity, batch_may_change: bool, length_may_change: bool = False) -> None:
    """Raise BadInput if a branch cannot start from a checkpoint; its plan and other settings may differ."""
    same = ("tensors_sha256" if length_may_change else "model_sha256", "data_sha256", "seed")
    _check(resumed, asked, same if batch_may_change else (*same, "global_batch_size"))


def _check(resumed: Resumed, asked: Identity, names: Sequence[str]) -> None:
    for name in names:
        saved, wanted = (getattr(identity, name) for identity in (resumed.record.identity, asked))
        if saved != wanted:
            remedy = _REMEDY.get(name, "start again in another --checkpoints folder")
            raise BadInput(resumed.folder, f"was saved under {_DIFFERENCES[name]} ({saved}, now {wanted})", remedy)


# The learning rate of a run that resumes from a checkpoint.


_OF_SCHEDULE = ("learning_rate", "learning_rate_schedule", "warmup_steps", "final_fraction", "decay_fraction")


def changed_rate(record: Checkpoint, asked: Identity) -> str | None:
    """Return a message on how the requested schedule changes the learning rate of the next step; None: it does not.

    Records of earlier versions do not contain the length of their schedule: their learning rate is not known.
    """
    saved, step = record.identity, record.progress.step + 1
    if saved.schedule_steps is None or asked.schedule_steps is None or step > asked.schedule_steps:
        return None
    before, after = _rate(saved, saved.schedule_steps, step), _rate(asked, asked.schedule_steps, step)
    if before == after:
        return None
    was = f"{saved.settings.learning_rate_schedule} over {saved.schedule_steps} steps"
    now = f"{asked.settings.learning_rate_schedule} over {asked.schedule_steps} steps"
    return f"the learning rate of step {step} is {after:.3g} with {now}; it would have been {before:.3g} with {was}"


def _rate(identity: Identity, steps: int, step: int) -> float:
    schedule = {name: getattr(identity.settings, name) for name in _OF_SCHEDULE}
    return Hyperparameters(steps=steps, weight_decay=0, clip_norm=0, **schedule).learning_rate_at(step)
