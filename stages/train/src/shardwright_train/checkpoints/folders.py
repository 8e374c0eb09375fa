"""Checkpoint folders: a folder for each run, with a folder for each step, complete once it has its record.

The record, checkpoint.json, holds the run's identity and progress, and the SHA-256 of each file. Only files written by
a save are ever deleted: folders with a save's names that contain only files with its names.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from hashlib import sha256
from itertools import chain, count
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shardwright.io import BadInput, Document, Value, sha256_of_value
from shardwright.types.limits import Bytes, Count, NonNegativeCount, Samples, Seconds, Sha256, Tokens, whole
from shardwright.types.model import EMBEDDING, HEAD, Model
from shardwright.types.plan import Plan
from shardwright_train.engine.learning_rate import LearningRateSchedule
from shardwright_train.options import RunOptions

RECORD = "checkpoint.json"
METRICS = "metrics.jsonl"
LOCK = "LOCK"
SECRET = "SECRET"
OUT_LOCK = "LOCK.out"
"""Name of the lock file of a run's output folder, which may be the same folder as the folder of its checkpoints."""
_DIGITS = 16
"""Digits of a plan's SHA-256 in the name of a run's folder."""
_STEP = re.compile(r"step-([0-9]{8})")
_SIGN = re.compile(r"\.seen-[0-9]+-[0-9]+")
_UNFINISHED, _REMOVED, _DAMAGED = ".unfinished", ".removed", ".damaged"
_SAVED = re.compile(rf"shard-[0-9]{{5}}-.+\.safetensors|{re.escape(RECORD)}|\.{re.escape(RECORD)}\..+\.tmp")
"""Names of the files that a save writes."""
_FileName = Annotated[str, whole("[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")]
_Loss = Annotated[float, Meta(ge=-1e30, le=1e30)]


def folder_of_run(checkpoints: Path, plan: Plan, parent: Path | None = None) -> Path:
    """Return the checkpoint folder of a plan, or of its branch from a checkpoint, named after a hash of what runs.

    Plans that differ in names, prices or memory share a folder.
    """
    return checkpoints / _name_of_run(plan.executed_sha256, parent)


def adopt_older(checkpoints: Path, plan: Plan, parent: Path | None = None) -> None:
    """Link a run's folder to the one that earlier versions named after the whole plan, if only that exists.

    Raises BadInput if such a link leads nowhere.
    """
    run, older = folder_of_run(checkpoints, plan, parent), checkpoints / _name_of_run(plan.sha256, parent)
    if older.is_dir() and not os.path.lexists(run):
        with suppress(FileExistsError):  # another node may do the same
            run.symlink_to(older.name)
    if run.is_symlink() and not run.exists():
        problem = f"is a link to {run.readlink()}, which does not exist"
        raise BadInput(run, problem, "restore it, or remove the link to start again")


def names_plan(run: Path, plan_sha256: str) -> bool:
    """Return whether a run's folder, or the target of its link, is named after a plan."""
    return run.resolve().name.startswith(plan_sha256[:_DIGITS])


def _name_of_run(plan_sha256: str, parent: Path | None) -> str:
    branch = "" if parent is None else f"-from-{sha256(os.fsencode(parent.resolve())).hexdigest()[:12]}"
    return plan_sha256[:_DIGITS] + branch


def folder_of_step(run: Path, step: int) -> Path:
    """Return the folder of a run's checkpoint at a step."""
    return run / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder, or None if it has none."""
    named = _STEP.fullmatch(checkpoint.name)
    return None if named is None else int(named[1])


def named_checkpoints(run: Path) -> tuple[Path, ...]:
    """Return every path named like a checkpoint of a run, newest first, whatever it contains."""
    return tuple(sorted((path for path in run.glob("step-*") if step_of(path) is not None), reverse=True))


def complete_checkpoints(run: Path) -> tuple[Path, ...]:
    """Return the complete checkpoints of a run, newest first, without checking their files for damage."""
    return tuple(path for path in named_checkpoints(run) if (path / RECORD).is_file())


def latest_checkpoint(run: Path) -> Path | None:
    """Return the complete checkpoint with the highest step, or None."""
    return next(iter(complete_checkpoints(run)), None)


def damaged_checkpoints(run: Path) -> tuple[Path, ...]:
    """Return the checkpoints of a run that were set aside."""
    return tuple(sorted(run.glob(f"step-*{_DAMAGED}*")))


def write_sign(run: Path) -> Path:
    """Write an empty file with a new name into the folder of a run, to test that all ranks see the same folder."""
    run.mkdir(parents=True, exist_ok=True)
    sign = run / f".seen-{os.getpid()}-{time.time_ns()}"
    sign.touch(exist_ok=False)
    return sign


def unfinished_folder(checkpoint: Path) -> Path:
    """Return the folder in which a checkpoint is written until it is complete."""
    return checkpoint.with_suffix(_UNFINISHED)


def make_empty(folder: Path) -> None:
    """Make the folder of an unfinished checkpoint; anything with that name that no save wrote is renamed first."""
    _clear(folder)
    folder.mkdir(parents=True)


def remove_leftovers(run: Path) -> None:
    """Remove leftovers of interrupted saves, removals and starts; none may be in progress."""
    for sign in run.glob(".seen-*"):
        if _SIGN.fullmatch(sign.name) and sign.is_file() and not sign.stat().st_size:
            sign.unlink()
    for path in [*run.glob(f"step-*{_UNFINISHED}"), *run.glob(f"step-*{_REMOVED}")]:
        if step_of(path.with_suffix("")) is not None:
            _clear(path)


def prune(run: Path, keep_last: int, keep_every: int, kept: Collection[int] = ()) -> None:
    """Remove complete checkpoints except the `keep_last` latest, every `keep_every`-th step's, and steps in `kept`.

    `keep_every` 0 keeps none by step. A checkpoint that contains anything else, or is a link, stays. Each is renamed
    first, so that a partly deleted one is never taken for a complete one, nor for one that has lost its record.
    """
    for path in complete_checkpoints(run)[keep_last:]:
        step = step_of(path)
        assert step is not None
        if step not in kept and (not keep_every or step % keep_every) and _is_saved(path):
            removed = path.with_suffix(_REMOVED)
            _clear(removed)
            path.rename(removed)
            shutil.rmtree(removed)


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that it is not read again and does not block the next one of its step."""
    names = (checkpoint.with_suffix(f"{_DAMAGED}{number or ''}") for number in chain((None,), count(2)))
    aside = next(name for name in names if not os.path.lexists(name))
    checkpoint.rename(aside)
    return aside


def _clear(path: Path) -> None:
    """Free a path: remove a folder that a save wrote; rename anything else and report it."""
    if not os.path.lexists(path):
        return
    if _is_saved(path):
        shutil.rmtree(path)
        return
    print(f"{path}: contains more than a save writes: set aside as {set_aside(path).name}", file=sys.stderr, flush=True)


def _is_saved(path: Path) -> bool:
    """Return whether a path is a folder with only files that a save may have written, by their names."""
    if path.is_symlink() or not path.is_dir():
        return False
    with os.scandir(path) as entries:
        return all(entry.is_file(follow_symlinks=False) and _SAVED.fullmatch(entry.name) for entry in entries)


class Settings(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimizer settings of the run's steps so far."""

    learning_rate: float
    learning_rate_schedule: LearningRateSchedule
    warmup_steps: NonNegativeCount
    final_fraction: float
    decay_fraction: float
    weight_decay: float
    clip_norm: float
    decay_norms_and_biases: bool
    learning_rate_factor: tuple[str, ...]


class Identity(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The identity of a run: its plan, model, data, seed, batch size and initial weights."""

    plan_sha256: Sha256
    """Identity of what the plan executes; in records of earlier versions, of the whole plan."""
    model_sha256: Sha256
    """SHA-256 of the model's description, which other plans may share."""
    data_sha256: Sha256
    """SHA-256 of the samples, including the tokenizer."""
    seed: NonNegativeCount
    """Seed of initial weights, sample order and dropout; all randomness follows from it and a sample's number."""
    global_batch_size: Samples
    """Samples of a step."""
    settings: Settings
    weights_sha256: Sha256 | None = None
    """SHA-256 of the files of the initial weights; None if all were drawn."""
    sequence_length: Tokens | None = None
    """Tokens of a sample; None in records of earlier versions."""
    tensors_sha256: Sha256 | None = None
    """SHA-256 of the model's description without its sequence length and rotary settings; None in records of earlier
    versions."""
    schedule_steps: Count | None = None
    """Length in steps of the learning rate schedule; None in records of earlier versions."""

    @classmethod
    def of_run(cls, job: RunOptions, plan: Plan, data_sha256: str, weights_sha256: str | None = None) -> "Identity":
        """Return the identity of the requested run."""
        asked = msgspec.structs.asdict(job) | {"learning_rate_schedule": job.schedule}
        return cls(
            plan_sha256=plan.executed_sha256,
            model_sha256=identity_of(plan.model),
            weights_sha256=weights_sha256,
            sequence_length=plan.model.sequence_length,
            tensors_sha256=identity_of_tensors(plan.model),
            data_sha256=data_sha256,
            seed=job.seed,
            schedule_steps=job.steps,
            global_batch_size=plan.global_batch_size,
            settings=Settings(**{name: asked[name] for name in Settings.__struct_fields__}),
        )


class Best(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lowest loss of a run's evaluations."""

    step: Count
    loss: _Loss
    data_sha256: Sha256
    """SHA-256 of the evaluation data."""


class Progress(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The progress of a run."""

    step: NonNegativeCount
    """Optimizer steps taken."""
    samples: Annotated[int, Meta(ge=0, le=2**62)]
    """Number of samples trained on, which is also the number of the next step's first sample."""
    first_loss: _Loss
    """Loss of step 1."""
    last_loss: _Loss
    """Loss of the last step."""
    wall_s: Seconds
    """Seconds that the run's processes have run so far."""
    updates: NonNegativeCount
    """Steps in which the optimizer changed the weights: all except those in which float16 overflowed."""
    loss_scale: Annotated[float, Meta(gt=0, le=2.0**64)]
    """Factor of the loss before float16's backward pass."""
    steps_without_overflow: NonNegativeCount
    best: Best | None = None
    """Best evaluation so far, whose checkpoint is kept if requested."""

    @classmethod
    def begin(cls, loss_scale: float) -> "Progress":
        """Return the progress of a run before its first step."""
        return cls(
            step=0,
            samples=0,
            first_loss=0.0,
            last_loss=0.0,
            wall_s=0.0,
            updates=0,
            loss_scale=loss_scale,
            steps_without_overflow=0,
        )


class SavedFile(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of tensors, with its size and hash."""

    name: _FileName
    """Name of the file in the checkpoint's folder."""
    bytes: Bytes
    sha256: Sha256


class Beginning(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The start of a run's own global batches: the start of training, or the checkpoint of a branch."""

    step: NonNegativeCount = 0
    samples: Annotated[int, Meta(ge=0, le=2**62)] = 0


class Checkpoint(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record of a complete checkpoint, the last of its files to be written."""

    FORMAT = "shardwright.checkpoint"
    VERSION = 4
    SEALED = True

    identity: Identity
    began: Beginning
    progress: Progress
    world_size: Count
    """Number of ranks that saved the checkpoint; any number may load it."""
    parent: str | None
    """Checkpoint from which a branch began; None for a run that is not a branch."""
    files: tuple[SavedFile, ...]

    def __post_init__(self) -> None:
        steps = self.progress.step - self.began.step
        samples = self.began.samples + steps * self.identity.global_batch_size
        if steps < 0 or self.progress.samples != samples:
            raise ValueError(f"{self.progress.samples} samples after step {self.progress.step} should be {samples}")
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("a file is listed twice")


def identity_of(model: Model) -> str:
    """Return the SHA-256 of the parts of a model's description that are the same under all plans."""
    return sha256_of_value([model.architecture_sha256, model.sequence_length])


_OF_POSITIONS = frozenset(
    ("max_position_embeddings", "original_max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta")
)
"""Keys of a configuration that another sequence length may change, if no parameter takes its shape from them."""


def identity_of_tensors(model: Model) -> str:
    """Return the hash of a model without its sequence length: family, configuration, parameters."""
    config = {key: value for key, value in model.config.items() if key not in _OF_POSITIONS}
    kinds = (model.types[name] for name in (EMBEDDING, *model.layers, HEAD))
    return sha256_of_value([model.family, config, [[[p.name, p.shape] for p in kind.parameters] for kind in kinds]])
