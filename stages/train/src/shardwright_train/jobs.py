"""What the parent asks of the ranks it starts, handed over as a file."""

from shardwright_formats.io.json import Document
from shardwright_train.optimizer.learning_rate import LearningRateSchedule

__all__ = ["MeasureJob", "RunJob"]


class RunJob(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Train with a plan."""

    FORMAT = "shardwright.run_job"

    plan: str
    data: str
    out: str
    checkpoints: str
    resume_from: str | None
    steps: int
    checkpoint_every: int
    keep_checkpoints: int
    learning_rate: float
    learning_rate_schedule: LearningRateSchedule
    warmup_steps: int
    final_fraction: float
    decay_fraction: float
    weight_decay: float
    clip_norm: float
    seed: int
    hang_timeout_s: float


class MeasureJob(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time some plans of one world size."""

    FORMAT = "shardwright.measure_job"

    plans: str
    """A `shardwright.plans` file."""
    out: str
    journal: str
    """A file for what is finished, should the measurement be cut off."""
    steps: int
    warmup_steps: int
    min_time_s: float
    """How long each plan is run at least, warm-up apart."""
    hang_timeout_s: float
    trace: str | None
    """A folder for traces."""
