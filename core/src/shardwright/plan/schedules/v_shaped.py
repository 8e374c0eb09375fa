"""V-shaped schedules (Qi et al. 2024b): two chunks per stage, the second in reverse order, and split backward passes.

A micro-batch goes through the first chunks from the first stage to the last, and through the second ones back, so that
the first stage has both ends of the model. Activations of its first chunk live longest, and activations of its second
chunk shortest, so that all stages hold the same number. ZB-V is the greedy order. V-Half and V-Min repeat a building
block: a timetable of one micro-batch that holds activations for a shorter time.
"""

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from shardwright.plan.schedules.greedy import Order, SplitSchedule
from shardwright.plan.schedules.passes import Action, Pass
from shardwright.plan.schedules.schedule import ClosedForm
from shardwright.types import Schedule

_CHUNKS = 2
_PERIOD = 6
"""Time from one micro-batch to the next: its six passes on a stage, each of which takes time 1."""


class Block(NamedTuple):
    """Start times of a micro-batch's forward and backward passes, in units of a pass; a stage's all differ modulo 6."""

    steps: tuple[int, int, int, int]
    """Times between neighbouring stages: forward through the first and the second chunks, backward through the second
    and the first ones."""
    gaps: tuple[int, int, int]
    """Times on one stage from the last pass of each of these four to the first pass of the next."""

    def begins(self, num_stages: int, stage: int) -> Iterator[tuple[Pass, int, int]]:
        """Yield kind, chunk and start time of a stage's forward and backward passes of the first micro-batch."""
        later, total = num_stages - 1, 0
        ways = ((Pass.FORWARD, 0, stage), (Pass.FORWARD, 1, later - stage))
        back = ((Pass.BACKWARD, 1, stage), (Pass.BACKWARD, 0, later - stage))
        for (kind, chunk, number), step, gap in zip((*ways, *back), self.steps, (*self.gaps, 0), strict=True):
            yield kind, chunk, total + step * number
            total += step * later + gap


class ZeroBubbleV(SplitSchedule):
    """ZB-V: if all three passes take the same time, no bubble except warm-up, with the memory of 1F1B's first stage."""

    name = Schedule.ZERO_BUBBLE_V
    pace = 5, 6, 4

    def limit(self, num_stages: int, num_microbatches: int, num_chunks: int) -> int:
        """Return the activations of as many micro-batches as there are stages, in all chunks."""
        return num_chunks * num_stages

    def check_chunks(self, num_chunks: int) -> None:
        """Raise ValueError if the number of chunks is not two."""
        if num_chunks != _CHUNKS:
            raise ValueError(f"the schedule {self.name} needs 2 chunks, not {num_chunks}")

    def order(self, num_stages: int, num_microbatches: int, num_chunks: int) -> Order:
        """Return an order in which first chunks run at most `num_stages` ahead, to leave memory for second ones."""
        order = super().order(num_stages, num_microbatches, num_chunks)
        return order._replace(free=True, ahead=num_stages)

    def closed_forms(self, num_microbatches: int, num_chunks: int = 1) -> tuple[ClosedForm, ...]:
        """Return the coefficients of T = sum C / 2 + (m - 1/2) max A + max (A - C) / 2 + max U, and of a T for few.

        The first is exact for ZB-V if stages are equal and there are no sends; schedules with lower limits take longer.
        The second applies if there are few micro-batches.
        """
        v, m = _CHUNKS, num_microbatches
        return ClosedForm(1, v * m - 1, v, hidden=1, parts=v), ClosedForm(v, m - 1, v, hidden=v, parts=v)


class VHalf(ZeroBubbleV):
    """V-Half: about half of the activations of ZB-V."""

    name = Schedule.V_HALF

    def limit(self, num_stages: int, num_microbatches: int, num_chunks: int) -> int:
        """Return the activations of (num_stages + 2) / 2 micro-batches, rounded down, in all chunks."""
        return num_chunks * ((num_stages + 2) // 2)

    def block(self, num_stages: int) -> Block:
        """Return the building block for a number of stages."""
        return Block((2, 1, 2, 1), (2, 1, 1) if num_stages % 2 else (5, 1, 4))

    def actions(self, num_stages: int, num_microbatches: int, stage: int, num_chunks: int = 1) -> tuple[Action, ...]:
        """Return a pipeline stage's actions in one step, in order.

        With few stages, whose limit is the same as in ZB-V, they are ZB-V's actions. Raises ValueError if there are not
        two chunks.
        """
        if self.limit(num_stages, num_microbatches, 1) >= num_stages:
            return super().actions(num_stages, num_microbatches, stage, num_chunks)
        self.check_chunks(num_chunks)
        return repeated(self.block(num_stages), num_stages, num_microbatches)[stage]


class VMin(VHalf):
    """V-Min: about a third of the activations of ZB-V."""

    name = Schedule.V_MIN

    def limit(self, num_stages: int, num_microbatches: int, num_chunks: int) -> int:
        """Return the activations of (num_stages + 4) / 3 micro-batches, rounded down, in all chunks."""
        return num_chunks * ((num_stages + 4) // 3)

    def block(self, num_stages: int) -> Block:
        """Return the building block, in which each pass follows as soon as it can."""
        return Block((1, 1, 1, 1), (1, 1, 1) if num_stages % 3 else (3, 1, 3))


@lru_cache(maxsize=64)
def repeated(block: Block, num_stages: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of every stage: a block for each micro-batch, and weight passes as soon as there is time."""
    return tuple(_of_stage(block, num_stages, num_microbatches, stage) for stage in range(num_stages))


def _of_stage(block: Block, num_stages: int, num_microbatches: int, stage: int) -> tuple[Action, ...]:
    begins, numbers = list(block.begins(num_stages, stage)), range(num_microbatches)
    timetable = {at + _PERIOD * i: Action(kind, i, chunk) for kind, chunk, at in begins for i in numbers}
    done, left = list[Action](), deque[Action]()
    for time in range(max(timetable) + 1):
        action = timetable.get(time)
        if action is not None:
            done.append(action)
            if action.kind is Pass.BACKWARD:
                left.append(action._replace(kind=Pass.WEIGHT))
        elif left:
            done.append(left.popleft())
    return (*done, *left)
