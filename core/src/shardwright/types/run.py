"""Files of a training run: a line per step, a summary, and the nodes' agreement after one is lost."""

from typing import Literal

from msgspec import UNSET, UnsetType

from shardwright.io import Document, Value
from shardwright.types.limits import Bytes, Count, NonNegativeNumber, Seconds, Sha256
from shardwright.types.plan import Plan


class Evaluation(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A loss on validation data, which is not trained on."""

    loss: float
    """Mean cross entropy over all labels that count, with nothing dropped."""
    perplexity: NonNegativeNumber | None
    """exp(loss); null for images, or beyond 10^15."""
    labels: Count
    """Number of labels that counted."""
    samples: Count
    """Number of samples that these are from."""
    time_s: Seconds
    """Time of the evaluation."""


class BestCheckpoint(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint with the least loss of all evaluations."""

    step: Count
    """Step after which it was saved."""
    loss: float
    """Loss of its evaluation."""
    checkpoint: str
    """Its folder."""


class StepMetrics(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step's line in metrics.jsonl."""

    step: Count
    """Number of the optimizer step, the first being 1."""
    loss: float
    """Mean cross entropy over the step's tokens, with the part of further tokens', and auxiliary losses."""
    step_time_s: Seconds
    """Time of the step."""
    tokens_per_s: NonNegativeNumber
    """Tokens of the global batch over the step time."""
    mfu: NonNegativeNumber | None
    """Model floating-point operations over the devices' peak, counting only pairs of positions that causal attention
    sees; null if the peak is not known."""
    mfu_full_square: NonNegativeNumber | None = None
    """The same with masked pairs, as PaLM and Megatron-LM count; null if the peak is not known."""
    grad_norm: float | None
    """Global 2-norm of the gradients before clipping; null if float16 overflowed and the step updated nothing."""
    learning_rate: float
    """Learning rate of the optimizer in the step."""
    peak_memory_bytes: tuple[Bytes, ...]
    """Per rank: the allocator's peak on CUDA, the peak resident set of the process on CPU."""
    time_utc: str
    """End of the step, in ISO 8601."""
    auxiliary_loss: float | UnsetType = UNSET
    """The part of the loss that comes from blocks' auxiliary losses; absent if the family has none."""
    mtp_losses: tuple[float, ...] | UnsetType = UNSET
    """Mean cross entropy of each depth that predicts further tokens, which the loss has a part of; absent if there are
    none."""
    expert_imbalance: NonNegativeNumber | UnsetType = UNSET
    """Load of the fullest expert over the mean expert's, averaged over layers; absent if there are none."""
    save_s: Seconds | UnsetType = UNSET
    """Longest save of a checkpoint so far, since this start of the run; absent before the first."""
    evaluation: Evaluation | None = None
    """Evaluation of the weights after the step; null if there was none."""


class RunResult(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DONE.json: the run reached its last step."""

    FORMAT = "shardwright.run"
    VERSION = 2

    plan_sha256: Sha256
    """Identity of the plan: SHA-256 of its canonical JSON."""
    steps: Count
    """Optimizer steps in all."""
    first_loss: float
    """Loss of step 1."""
    final_loss: float
    """Loss of the last step."""
    attention: str
    """The attention kernel that ran: the one taken where the plan said `auto`."""
    wall_s: Seconds
    """Time of this process and of the ones that it resumed, start-up and checkpoints included."""
    checkpoint: str
    """Folder of the last checkpoint."""
    best: BestCheckpoint | None = None
    """Null if the run was not asked to keep it."""
    predicted_step_time_s: Seconds | None = None
    """Step time of the prediction next to the plan; null if there is none."""


class StopNote(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """STOPPED.json: the run ended with exit code 75, and the same command resumes it."""

    FORMAT = "shardwright.stopped"

    step: Count
    """The last step that is saved."""
    steps: Count
    """Number of steps of the whole run."""
    reason: Literal["signal", "max_time_s"]
    """Why: it was signalled, or its own time was up."""
    checkpoint: str
    """Folder of the checkpoint."""
    time_utc: str
    """Time of the stop, in ISO 8601."""


class Replanned(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """replanned.json: the message of node 0 to the other remaining nodes, through the run's folder."""

    FORMAT = "shardwright.replanned"

    plan: Plan
    """Plan for the nodes that are left."""
    resume_from: str | None
    """The checkpoint to resume from; null if the run had none yet."""
    step_before_s: Seconds
    """Predicted time of a step under the plan for all nodes."""
    step_after_s: Seconds
    """Predicted time of a step under this one."""
