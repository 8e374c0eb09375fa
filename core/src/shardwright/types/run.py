"""Files of a training run: one line per step, a summary, and the plan on which the nodes agree after one is lost."""

from collections.abc import Sequence
from math import isclose
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from shardwright.io import Document, Value
from shardwright.types.limits import (
    Bytes,
    Count,
    Name,
    NonNegativeCount,
    NonNegativeNumber,
    PositiveNumber,
    Ranks,
    Seconds,
    Sha256,
    Share,
)
from shardwright.types.plan import Plan


class Evaluation(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loss on validation data, which is not trained on."""

    loss: float
    """Mean cross entropy over all labels that are not ignored, with dropout disabled."""
    perplexity: NonNegativeNumber | None
    """exp(loss); null for images, and if it exceeds 10^15."""
    labels: Count
    """Number of labels that were not ignored."""
    samples: Count
    """Number of samples that were evaluated."""
    time_s: Seconds
    """Time of the evaluation."""


class BestCheckpoint(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint with the lowest loss of all evaluations."""

    step: Count
    """Step after which it was saved."""
    loss: float
    """Loss of its evaluation."""
    checkpoint: str
    """Folder of the checkpoint."""


class StepMetrics(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step's line in metrics.jsonl."""

    step: Count
    """Number of the optimizer step, counted from 1."""
    loss: float
    """Mean cross entropy over the step's tokens, plus the weighted losses of further predicted tokens and auxiliary
    losses."""
    step_time_s: Seconds
    """Time of the step."""
    tokens_per_s: NonNegativeNumber
    """Tokens of the global batch divided by the step time."""
    mfu: NonNegativeNumber | None
    """Model FLOP utilization: the model's floating-point operations divided by the devices' peak, counting only pairs
    of positions that causal attention sees; null if the peak is not known."""
    mfu_full_square: NonNegativeNumber | None = None
    """Model FLOP utilization including masked pairs, as PaLM and Megatron-LM count; null if the peak is not known."""
    grad_norm: float | None
    """Global 2-norm of the gradients before clipping; null if float16 overflowed, so that the step updated nothing."""
    learning_rate: float
    """Learning rate of the step."""
    peak_memory_bytes: tuple[Bytes, ...]
    """Per rank: the allocator's peak on CUDA, the peak resident set of the process on CPU."""
    time_utc: str
    """End of the step, in ISO 8601."""
    auxiliary_loss: float | UnsetType = UNSET
    """The part of the loss that is the blocks' auxiliary losses; omitted if the family has none."""
    mtp_losses: tuple[float, ...] | UnsetType = UNSET
    """Mean cross entropy at each depth of multi-token prediction, a part of which is added to the loss; omitted if
    there are no such depths."""
    expert_imbalance: NonNegativeNumber | UnsetType = UNSET
    """Load of the fullest expert divided by the mean load of an expert, averaged over layers; omitted if there are no
    experts."""
    save_s: Seconds | UnsetType = UNSET
    """Longest time of saving a checkpoint since this start of the run; omitted before the first save."""
    evaluation: Evaluation | None = None
    """Evaluation of the weights after the step; null if there was none."""


class RunResult(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DONE.json: written when the run has reached its last step."""

    FORMAT = "shardwright.run"
    VERSION = 2

    plan_sha256: Sha256
    """Identity of the plan: SHA-256 of its canonical JSON."""
    steps: Count
    """Number of optimizer steps of the whole run."""
    first_loss: float
    """Loss of step 1."""
    final_loss: float
    """Loss of the last step."""
    attention: str
    """The attention kernel that ran; if the plan says `auto`, the one that was chosen."""
    wall_s: Seconds
    """Wall-clock time of this process and of those that it resumed from, including start-up and checkpoints."""
    checkpoint: str
    """Folder of the last checkpoint."""
    best: BestCheckpoint | None = None
    """The checkpoint with the lowest evaluation loss; null if the run was not asked to keep it."""
    predicted_step_time_s: Seconds | None = None
    """Step time of the prediction next to the plan; null if there is none."""


class StopNote(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """STOPPED.json: written when the run ends with exit code 75; the same command resumes it."""

    FORMAT = "shardwright.stopped"

    step: Count
    """The last step that was saved."""
    steps: Count
    """Number of steps of the whole run."""
    reason: Literal["signal", "max_time_s"]
    """Reason of the stop: a signal, or the run's own time limit."""
    checkpoint: str
    """Folder of the checkpoint."""
    time_utc: str
    """Time of the stop, in ISO 8601."""


class Replanned(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """replanned.json: the message of node 0 to the other remaining nodes, through the run's folder."""

    FORMAT = "shardwright.replanned"

    plan: Plan
    """Plan for the remaining nodes."""
    resume_from: str | None
    """The checkpoint to resume from; null if the run had none yet."""
    step_before_s: Seconds
    """Predicted time of a step under the plan for all nodes."""
    step_after_s: Seconds
    """Predicted time of a step under the new plan."""


# The load of experts that a run logged: the number of positions routed to each expert. The rank with the highest load
# determines the time.


_ROUNDING = 1e-6
"""The largest accepted deviation of the sum of a layer's shares from 1."""


class GroupLoad(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The load of the fullest group if a layer's experts are split into groups of neighbours."""

    ep_size: Ranks
    """Number of groups into which the experts are split."""
    imbalance: PositiveNumber
    """Load of the fullest group divided by the mean load of a group, both averaged over the steps."""

    def __post_init__(self) -> None:
        if not 1 - _ROUNDING <= self.imbalance <= self.ep_size * (1 + _ROUNDING):
            raise ValueError(f"imbalance {self.imbalance} of {self.ep_size} groups is not from 1 to {self.ep_size}")


class LayerLoad(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The load of the experts of one layer, as shares of all rows."""

    layer: NonNegativeCount
    """Index of the block."""
    shares: Annotated[tuple[Share, ...], Meta(min_length=1)]
    """Share of each expert in the assignments of positions to experts; they add up to 1."""
    groups: tuple[GroupLoad, ...] = ()
    """The load of the fullest group, determined in each step, for each number of groups; omitted if only `shares` is
    known."""

    def __post_init__(self) -> None:
        if not isclose(total := sum(self.shares), 1.0, abs_tol=_ROUNDING):
            raise ValueError(f"the shares of layer {self.layer} add up to {total:g}, not to 1")

    def imbalance(self, ep_size: int) -> float:
        """Return the load of the fullest of `ep_size` groups divided by the mean load of a group: from 1 to `ep_size`.

        If `groups` has no entry for `ep_size`, it is computed from the shares, which hide a peak that moves from step
        to step. Raises ValueError if `ep_size` does not divide the experts.
        """
        for group in self.groups:
            if group.ep_size == ep_size:
                return group.imbalance
        if len(self.shares) % ep_size:
            raise ValueError(f"ep_size {ep_size} does not divide {len(self.shares)} experts")
        size = len(self.shares) // ep_size
        return self.placed_imbalance([range(first, first + size) for first in range(0, len(self.shares), size)])

    def placed_imbalance(self, groups: Sequence[Sequence[int]]) -> float:
        """Return the load of the fullest of given groups of experts divided by a group's mean load, by the shares."""
        return len(groups) * max(sum(self.shares[expert] for expert in group) for group in groups)


class ExpertLoad(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """load.json: the load of experts in a run, an input of search and prediction."""

    FORMAT = "shardwright.expert_load"

    model: Name
    """Name of the model description."""
    first_step: Count
    """The first step that the load includes."""
    last_step: Count
    """The last step that the load includes."""
    layers: Annotated[tuple[LayerLoad, ...], Meta(min_length=1)]
    """The layers with experts, in ascending order."""

    def __post_init__(self) -> None:
        if self.last_step < self.first_step:
            raise ValueError(f"last_step {self.last_step} is before first_step {self.first_step}")
        numbers = [one.layer for one in self.layers]
        if sorted(set(numbers)) != numbers:
            raise ValueError("its layers are not in ascending order")
