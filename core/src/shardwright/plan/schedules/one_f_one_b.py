"""1F1B (Narayanan et al. 2019): one forward and one backward pass alternately, once the pipeline is full."""

from shardwright.plan.schedules.schedule import PipelineSchedule
from shardwright.types import Schedule


class OneFOneB(PipelineSchedule):
    """1F1B: a stage runs as many forward passes ahead as there are later stages.

    There may be fewer micro-batches than stages.
    """

    name = Schedule.ONE_F_ONE_B

    def num_ahead(self, num_stages: int, num_microbatches: int, stage: int, num_chunks: int) -> int:
        """Return the number of forward passes before the steady phase: the number of later stages."""
        return num_stages - 1 - stage
