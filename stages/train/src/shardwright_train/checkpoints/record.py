"""checkpoint.json: the contents of a checkpoint, the run's identity, and the SHA-256 of each file."""

from typing import Annotated

import msgspec
from msgspec import Meta

from shardwright_formats.io import Document, Value, sha256_of_value
from shardwright_formats.types import Bytes, Count, Model, NonNegativeCount, Plan, Samples, Seconds, Sha256, whole
from shardwright_train.engine.learning_rate import LearningRateSchedule
from shardwright_train.options import RunOptions

_FileName = Annotated[str, whole("[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")]
_Loss = Annotated[float, Meta(ge=-1e30, le=1e30)]


class Settings(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimizer settings with which a run's steps so far were taken."""

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
    """Identity of the plan."""
    model_sha256: Sha256
    """SHA-256 of the model's description, which other plans may share."""
    data_sha256: Sha256
    """SHA-256 of the samples, tokenizer included."""
    seed: NonNegativeCount
    """Seed of initial weights, sample order and dropout; all randomness follows from it and a sample's number."""
    global_batch_size: Samples
    """Samples of a step."""
    settings: Settings
    weights_sha256: Sha256 | None = None
    """SHA-256 of the files of the initial weights; None where all were drawn."""


def run_identity(job: RunOptions, plan: Plan, data_sha256: str, weights_sha256: str | None = None) -> Identity:
    """Return the identity of the requested run."""
    asked = msgspec.structs.asdict(job)
    return Identity(
        plan_sha256=plan.sha256,
        model_sha256=identity_of(plan.model),
        weights_sha256=weights_sha256,
        data_sha256=data_sha256,
        seed=job.seed,
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
    """Steps in which the optimizer changed the weights: all but those in which float16 overflowed."""
    loss_scale: Annotated[float, Meta(gt=0, le=2.0**64)]
    """Factor of the loss before float16's backward pass."""
    steps_without_overflow: NonNegativeCount
    best: Best | None = None
    """Best evaluation so far, whose checkpoint is kept where requested."""


class SavedFile(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of tensors."""

    name: _FileName
    """Name of the file in the checkpoint's folder."""
    bytes: Bytes
    sha256: Sha256


class Beginning(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The origin of a run's own global batches: the start of training, or the checkpoint of a branch."""

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
    """Checkpoint from which a branch began; None for a run that is no branch."""
    files: tuple[SavedFile, ...]

    def __post_init__(self) -> None:
        steps = self.progress.step - self.began.step
        samples = self.began.samples + steps * self.identity.global_batch_size
        if steps < 0 or self.progress.samples != samples:
            raise ValueError(f"{self.progress.samples} samples after step {self.progress.step} should be {samples}")
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("a file is named twice")


def identity_of(model: Model) -> str:
    """Return the SHA-256 of the parts of a model's description that are the same under all plans."""
    return sha256_of_value([model.architecture_sha256, model.sequence_length])


def start(loss_scale: float) -> Progress:
    """Return the progress of a run before its first step."""
    return Progress(
        step=0,
        samples=0,
        first_loss=0.0,
        last_loss=0.0,
        wall_s=0.0,
        updates=0,
        loss_scale=loss_scale,
        steps_without_overflow=0,
    )
