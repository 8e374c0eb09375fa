"""ZB-H1 and ZB-H2 (Qi et al. 2024): 1F1B with split backward passes, whose weight gradients fill its bubbles."""

from shardwright.plan.schedules.greedy import SplitSchedule
from shardwright.plan.schedules.schedule import ClosedForm
from shardwright.types import Schedule


class ZeroBubble(SplitSchedule):
    """1F1B whose backward passes are split.

    A stage holds at most as many microbatches as there are stages: those that the first stage of 1F1B holds.
    """

    name = Schedule.ZERO_BUBBLE

    def limit(self, num_stages: int, num_microbatches: int, num_chunks: int) -> int:
        """Return the number of stages."""
        return num_stages

    def closed_forms(self, num_microbatches: int, num_chunks: int = 1) -> tuple[ClosedForm, ...]:
        """Return the coefficients of T = sum C + (m - 1) max A + max (A - C) + max U, where C is F + B - W.

        It is exact for equal stages without sends. Greedy orders of unequal ones take 7 % less to 11 % more.
        """
        return (ClosedForm(fill=1, steady=num_microbatches - 1, hidden=1),)


class ZeroBubbleH2(ZeroBubble):
    """ZB-H2: as many more microbatches as the first one needs to go on to the last stage and back."""

    name = Schedule.ZERO_BUBBLE_H2

    def limit(self, num_stages: int, num_microbatches: int, num_chunks: int) -> int:
        """Return the microbatches that hide all but the way in."""
        return 2 * num_stages - 1
