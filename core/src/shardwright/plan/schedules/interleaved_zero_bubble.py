"""Interleaved 1F1B with split backward passes, as torch's `ScheduleInterleavedZeroBubble` has them."""

from shardwright.plan.schedules.greedy import SplitSchedule
from shardwright.plan.schedules.interleaved_1f1b import Interleaved1F1B
from shardwright.plan.schedules.schedule import ClosedForm
from shardwright.types import Schedule


class InterleavedZeroBubble(SplitSchedule, Interleaved1F1B):
    """Interleaved 1F1B with split backward passes; forward passes keep their order, backward passes keep theirs.

    A stage holds at most as many activations as the first stage of interleaved 1F1B.
    """

    name = Schedule.INTERLEAVED_ZERO_BUBBLE
    pace = 5, 6, 4

    def limit(self, num_stages: int, num_microbatches: int, num_chunks: int) -> int:
        """Return how many activations the first stage of interleaved 1F1B holds; `num_stages` if there is one chunk."""
        return Interleaved1F1B.num_ahead(self, num_stages, num_microbatches, 0, num_chunks) + 1

    def closed_forms(self, num_microbatches: int, num_chunks: int = 1) -> tuple[ClosedForm, ...]:
        """Return the coefficients of interleaved 1F1B, reduced by what weight passes hide."""
        forms = super().closed_forms(num_microbatches, num_chunks)
        return tuple(form._replace(hidden=form.fill) for form in forms)
