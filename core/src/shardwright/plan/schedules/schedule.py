"""The interface of a schedule: its order of passes and closed form, for running, simulating and searching."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from shardwright.plan.schedules.closed_form import ClosedForm
from shardwright.plan.schedules.passes import Action, Pass
from shardwright.types import Schedule


class PipelineSchedule(ABC):
    """An order of passes: some forward passes ahead, then forward and backward in turn, then the remaining ones.

    On every edge between two stages, the one from the last to the first that joins chunks included, messages are sent
    in the order they are received in, and a chunk's last backward pass is that of the last microbatch.
    """

    name: ClassVar[Schedule]
    kinds: ClassVar[tuple[Pass, ...]] = (Pass.FORWARD, Pass.BACKWARD)
    """The kinds of passes in its actions, each after the kind that it needs."""

    @abstractmethod
    def num_ahead(self, num_stages: int, num_microbatches: int, stage: int, num_chunks: int) -> int:
        """Return how many forward passes a stage does before its first backward pass, at most."""

    def groups(self, num_stages: int, num_microbatches: int) -> Sequence[range]:
        """Return the microbatches that go through a chunk together before the next chunk follows."""
        return [range(num_microbatches)]

    def actions(self, num_stages: int, num_microbatches: int, stage: int, num_chunks: int = 1) -> tuple[Action, ...]:
        """Return a pipeline stage's actions in one step, in order.

        Raises ValueError for a number of chunks that the schedule does not have.
        """
        self.check_chunks(num_chunks)
        groups, chunks = self.groups(num_stages, num_microbatches), range(num_chunks)
        forward = [Action(Pass.FORWARD, i, chunk) for group in groups for chunk in chunks for i in group]
        backward = [Action(Pass.BACKWARD, i, chunk) for group in groups for chunk in reversed(chunks) for i in group]
        ahead = min(len(forward), self.num_ahead(num_stages, num_microbatches, stage, num_chunks))
        steady = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
        return (*forward[:ahead], *steady, *backward[len(forward) - ahead :])

    def check_chunks(self, num_chunks: int) -> None:
        """Raise ValueError for several chunks where the schedule does not interleave them."""
        if num_chunks > 1 and not self.name.interleaves:
            raise ValueError(f"{num_chunks} chunks need the schedule {Schedule.INTERLEAVED_1F1B}, not {self.name}")

    def in_flight(self, num_stages: int, num_microbatches: int, stage: int, num_chunks: int = 1) -> int:
        """Return the most activations that a stage holds at once, each of one microbatch in one chunk."""
        ahead = self.num_ahead(num_stages, num_microbatches, stage, num_chunks)
        return min(num_microbatches * num_chunks, ahead + 1)

    def closed_forms(self, num_microbatches: int, num_chunks: int = 1) -> tuple[ClosedForm, ...]:
        """Return the coefficients of a step's time, which is the largest of them: T = sum A + (m - 1) max A + max U.

        All microbatches go through the slowest stage, and one through all others before and after it.
        """
        return (ClosedForm(fill=1, steady=num_microbatches - 1),)
