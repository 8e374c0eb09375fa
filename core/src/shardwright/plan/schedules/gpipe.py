"""GPipe (Huang et al. 2019): all forward passes, then all backward passes."""

from shardwright.plan.schedules.schedule import PipelineSchedule
from shardwright.types import Schedule


class GPipe(PipelineSchedule):
    """All forward passes, then all backward passes: every micro-batch of the step is in flight."""

    name = Schedule.GPIPE

    def num_ahead(self, num_stages: int, num_microbatches: int, stage: int, num_chunks: int) -> int:
        """Return the number of forward passes before the first backward pass: all micro-batches."""
        return num_microbatches
