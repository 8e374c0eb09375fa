"""The interface of a schedule: its order of passes and closed form, for running, simulating and searching."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import floordiv, mod
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.plan.schedules.passes import Action, Pass
from shardwright.types import Schedule

# The closed form of a step's time, which the search minimises: its coefficients are used by all bounds and labels.
#
# A_i is the forward and backward pass of one microbatch in pipeline stage i, with all its chunks and the sends at their
# ends; C_i is the part of A_i that fills and drains the pipeline: the sends, and each pass times its `fill`. It equals
# A_i unless some passes hide others, as weight gradients do in zero-bubble schedules (Qi et al. 2024). U_i is what
# follows the stage's last backward pass: the exposed gradient sync and the optimizer.

Times = TypeVar("Times", int, float, NDArray[np.float64])


class ClosedForm(NamedTuple):
    """Integer coefficients of a step's time T = (fill sum C + steady max A + once max U + hidden max(A-C)) / parts."""

    fill: int
    """Coefficient of the sum of C over all stages: the time that one micro-batch takes through the pipeline."""
    steady: int
    """Coefficient of the slowest stage's A, for the remaining micro-batches."""
    once: int = 1
    """Coefficient of the largest U, the end of a step."""
    hidden: int = 0
    """Coefficient of the largest A - C: work that is postponed while the pipeline fills, and done at the step's end."""
    parts: int = 1

    def time(self, total: Times, slowest: Times, exposed: Times, hidden: Times | int = 0) -> Times:
        """Return T in the unit of the arguments, rounded up; `total`: the sum of C, the others: largest A, U, A - C."""
        if self.parts == 1:
            return self.fill * total + self.steady * slowest + self.once * exposed + self.hidden * hidden
        # The whole multiples of `parts` are computed separately, so that a float64 does not lose digits.
        whole, rest = (ClosedForm(*(divided(n, self.parts) for n in self[:4])) for divided in (floordiv, mod))
        given = total, slowest, exposed, hidden
        return whole.time(*given) - (-rest.time(*given) // self.parts)


def step_time(
    forms: Sequence[ClosedForm], total: Times, slowest: Times, exposed: Times, hidden: Times | int = 0
) -> Times:
    """Return the largest T of several closed forms, given the sum of C and the largest A, U and A - C."""
    first, *others = (form.time(total, slowest, exposed, hidden) for form in forms)
    for other in others:
        first = np.maximum(first, other) if isinstance(first, np.ndarray) else max(first, other)
    return first


# The interface.


class PipelineSchedule(ABC):
    """An order of passes: some forward passes ahead, then forward and backward passes alternately, then the rest.

    On every edge between two stages, including the edge from the last to the first stage that joins chunks, messages
    are sent in the order in which they are received, and a chunk's last backward pass belongs to the last micro-batch.
    """

    name: ClassVar[Schedule]
    kinds: ClassVar[tuple[Pass, ...]] = (Pass.FORWARD, Pass.BACKWARD)
    """The kinds of passes in the schedule's actions, each after the kind that it needs."""

    @abstractmethod
    def num_ahead(self, num_stages: int, num_microbatches: int, stage: int, num_chunks: int) -> int:
        """Return the number of forward passes that a stage runs before it alternates with backward passes, at most."""

    def groups(self, num_stages: int, num_microbatches: int) -> Sequence[range]:
        """Return the groups of micro-batches that go through a chunk together before the next chunk follows."""
        return [range(num_microbatches)]

    def actions(self, num_stages: int, num_microbatches: int, stage: int, num_chunks: int = 1) -> tuple[Action, ...]:
        """Return a pipeline stage's actions in one step, in order.

        Raises ValueError if the schedule does not support this number of chunks.
        """
        self.check_chunks(num_chunks)
        groups, chunks = self.groups(num_stages, num_microbatches), range(num_chunks)
        forward = [Action(Pass.FORWARD, i, chunk) for group in groups for chunk in chunks for i in group]
        backward = [Action(Pass.BACKWARD, i, chunk) for group in groups for chunk in reversed(chunks) for i in group]
        ahead = min(len(forward), self.num_ahead(num_stages, num_microbatches, stage, num_chunks))
        steady = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
        return (*forward[:ahead], *steady, *backward[len(forward) - ahead :])

    def check_chunks(self, num_chunks: int) -> None:
        """Raise ValueError if there are several chunks but the schedule does not interleave."""
        if num_chunks > 1 and not self.name.interleaves:
            raise ValueError(f"{num_chunks} chunks need an interleaved schedule, not {self.name}")

    def in_flight(self, num_stages: int, num_microbatches: int, stage: int, num_chunks: int = 1) -> int:
        """Return the most activations that a stage holds at once, each of one microbatch in one chunk."""
        ahead = self.num_ahead(num_stages, num_microbatches, stage, num_chunks)
        return min(num_microbatches * num_chunks, ahead + 1)

    def closed_forms(self, num_microbatches: int, num_chunks: int = 1) -> tuple[ClosedForm, ...]:
        """Return closed forms of the step time, the largest of which applies: T = sum A + (m - 1) max A + max U.

        All micro-batches go through the slowest stage, and one of them through all other stages before and after it.
        """
        return (ClosedForm(fill=1, steady=num_microbatches - 1),)
