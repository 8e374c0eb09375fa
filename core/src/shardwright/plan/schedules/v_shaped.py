"""V-shaped schedules (Qi et al. 2024b): two chunks a stage, the second in reverse order, and split backward passes.

A micro-batch goes through the first chunks from the first stage to the last and through the second ones back, so that
the first stage has the model's both ends. Activations of its first chunk live longest, those of its second one
shortest, so that all stages hold as much, and a limit bounds all of them: the schedules differ in it alone.
"""

from shardwright.plan.schedules.closed_form import ClosedForm
from shardwright.plan.schedules.greedy import Order, SplitSchedule
from shardwright.types import Schedule

_CHUNKS = 2


class ZeroBubbleV(SplitSchedule):
    """ZB-V: no bubble but the way in, if all three passes take as long, at the memory of 1F1B's first stage."""

    name = Schedule.ZERO_BUBBLE_V
    pace = 5, 6, 4

    def limit(self, num_stages: int, num_microbatches: int, num_chunks: int) -> int:
        """Return the chunks of as many microbatches as there are stages."""
        return num_chunks * num_stages

    def check_chunks(self, num_chunks: int) -> None:
        """Raise ValueError for a number of chunks other than two."""
        if num_chunks != _CHUNKS:
            raise ValueError(f"the schedule {self.name} needs 2 chunks, not {num_chunks}")

    def order(self, num_stages: int, num_microbatches: int, num_chunks: int) -> Order:
        """Return an order in which first chunks run no further ahead than there are stages: later ones need room."""
        order = super().order(num_stages, num_microbatches, num_chunks)
        return order._replace(free=True, ahead=num_stages)

    def closed_forms(self, num_microbatches: int, num_chunks: int = 1) -> tuple[ClosedForm, ...]:
        """Return the coefficients of T = sum C / 2 + (m - 1/2) max A + max (A - C) / 2 + max U.

        It is exact for ZB-V of equal stages and passes without sends, and less than what lower limits take.
        """
        return (ClosedForm(1, _CHUNKS * num_microbatches - 1, _CHUNKS, hidden=1, parts=_CHUNKS),)


class VHalf(ZeroBubbleV):
    """V-Half: about half of the activations of ZB-V."""

    name = Schedule.V_HALF

    def limit(self, num_stages: int, num_microbatches: int, num_chunks: int) -> int:
        """Return the chunks of (p + 2) / 2 microbatches, rounded down."""
        return min(super().limit(num_stages, num_microbatches, num_chunks), num_chunks * (num_stages + 2) // 2)


class VMin(ZeroBubbleV):
    """V-Min: about a third of the activations of ZB-V."""

    name = Schedule.V_MIN

    def limit(self, num_stages: int, num_microbatches: int, num_chunks: int) -> int:
        """Return the chunks of (p + 4) / 3 microbatches, rounded down."""
        return min(super().limit(num_stages, num_microbatches, num_chunks), num_chunks * (num_stages + 4) // 3)
