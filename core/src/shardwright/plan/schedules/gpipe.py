"""GPipe (Huang et al. 2019): all forward passes, then all backward passes."""

from shardwright.plan.schedules.schedule import PipelineSchedule
from shardwright.types import Schedule


class GPipe(PipelineSchedule):
    """The schedule of all forward passes, then all backward passes: every microbatch is in flight."""

    name = Schedule.GPIPE

    def num_ahead(self, num_stages: int, num_microbatches: int, stage: int, num_chunks: int) -> int:
        """Return the number of forward passes ahead: all micro-batches."""
        return num_microbatches
