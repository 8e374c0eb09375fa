"""The greedy order of split backward passes, for any placement of chunks on stages and any memory limit.

A stage runs a backward pass whose gradient has arrived; otherwise a forward pass whose input has arrived and that fits
into the limit; otherwise a weight pass; otherwise it waits. Each micro-batch counts in a chunk from its forward pass to
its weight pass.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import ClassVar, NamedTuple

from shardwright.plan.schedules.passes import Action, Pass
from shardwright.plan.schedules.schedule import PipelineSchedule

Way = tuple[tuple[int, int], ...]
"""Stage and chunk of each layer range, in the order in which a micro-batch goes through them."""


class Order(NamedTuple):
    """What determines the greedy order."""

    way: Way
    limits: tuple[int, ...]
    """The most activations that each stage holds at once, each of one micro-batch in one chunk."""
    groups: tuple[range, ...]
    """Groups of micro-batches: each group goes through one chunk completely before the next chunk."""
    pace: tuple[int, int, int]
    """Relative times of a forward, a backward and a weight pass, for which the order is made."""
    free: bool = False
    """Whether a stage runs the passes of its chunks in any order, because no two chunks share an edge."""
    ahead: int | None = None
    """The most micro-batches in flight in the first chunk of a stage; None if only the memory limits them."""


class SplitSchedule(PipelineSchedule):
    """A schedule whose backward passes are split: B for the gradients of inputs, W for the gradients of weights."""

    kinds = (Pass.FORWARD, Pass.BACKWARD, Pass.WEIGHT)
    pace: ClassVar[tuple[int, int, int]] = (2, 3, 1)
    """Relative times of a forward, a backward and a weight pass. The order is best if a backward pass takes somewhat
    longer than a forward pass, and a weight pass less, as attention causes."""

    @abstractmethod
    def limit(self, num_stages: int, num_microbatches: int, num_chunks: int) -> int:
        """Return the most activations that a stage holds at once, each of one micro-batch in one chunk."""

    def num_ahead(self, num_stages: int, num_microbatches: int, stage: int, num_chunks: int) -> int:
        """Return the most forward passes that a stage runs before its first backward pass."""
        return self.limit(num_stages, num_microbatches, num_chunks) - 1

    def actions(self, num_stages: int, num_microbatches: int, stage: int, num_chunks: int = 1) -> tuple[Action, ...]:
        """Return a pipeline stage's actions in one step, in order.

        Raises ValueError if the schedule does not support this number of chunks.
        """
        self.check_chunks(num_chunks)
        return greedy_order(self.order(num_stages, num_microbatches, num_chunks), num_microbatches)[stage]

    def order(self, num_stages: int, num_microbatches: int, num_chunks: int) -> Order:
        """Return what determines the greedy order, for these numbers of stages, micro-batches and chunks."""
        limits = (self.limit(num_stages, num_microbatches, num_chunks),) * num_stages
        return Order(
            self.name.way(num_stages, num_chunks), limits, tuple(self.groups(num_stages, num_microbatches)), self.pace
        )


@lru_cache(maxsize=64)
def greedy_order(order: Order, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of every stage in one step."""
    return _Greedy(order, num_microbatches).lists()


class _Greedy:
    """A simulated pipeline whose stages choose their next pass whenever they are free."""

    def __init__(self, order: Order, num_microbatches: int) -> None:
        self.order, stages = order, range(len(order.limits))
        self.pace: Mapping[Pass, int] = dict(zip((Pass.FORWARD, Pass.BACKWARD, Pass.WEIGHT), order.pace, strict=True))
        self.done: list[list[Action]] = [[] for _ in stages]
        chunks = [range(sum(each == stage for each, _ in order.way)) for stage in stages]
        self.after = [_after(order.way, Pass.FORWARD), _after(order.way, Pass.BACKWARD)]
        self.waiting = [{kind: _queues(order, kind, each) for kind in (Pass.FORWARD, Pass.BACKWARD)} for each in chunks]
        """The remaining forward and backward passes of each stage, in the order of each queue."""
        self.weights = [deque[Action]() for _ in stages]
        self.held, self.in_first = [0 for _ in stages], [0 for _ in stages]
        self.num_chunks = [len(each) for each in chunks]
        first, _ = order.way[0]
        self.come = [set[Action]() for _ in stages]
        self.come[first] |= {Action(Pass.FORWARD, i) for i in range(num_microbatches)}
        self.free = [0 for _ in stages]

    def lists(self) -> tuple[tuple[Action, ...], ...]:
        """Simulate the step and return each stage's actions; messages that arrive at a time precede choices."""
        events: list[tuple[int, int, int, Action | None]] = [(0, 1, stage, None) for stage in range(len(self.free))]
        heapify(events)
        while events:
            now, _, stage, message = heappop(events)
            if message is not None:
                self.come[stage].add(message)
                heappush(events, (now, 1, stage, None))
            elif now >= self.free[stage] and (action := self._next(stage)) is not None:
                over = self.free[stage] = now + self.pace[action.kind]
                heappush(events, (over, 1, stage, None))
                if (then := self._do(stage, action)) is not None:
                    heappush(events, (over, 0, *then))
        return tuple(map(tuple, self.done))

    def _next(self, stage: int) -> Action | None:
        """Return a stage's next pass, from the latest chunk that has one, or None if the stage has to wait."""
        come, waiting = self.come[stage], self.waiting[stage]
        for kind in (Pass.BACKWARD, Pass.FORWARD):
            heads = (queue[0] for queue in reversed(waiting[kind]) if queue)
            found = next((each for each in heads if each in come and self._fits(stage, each)), None)
            if found is not None:
                return found
        return self.weights[stage][0] if self.weights[stage] else None

    def _fits(self, stage: int, action: Action) -> bool:
        """Return whether memory is left for a pass, and for one in each later chunk, so that passes can complete."""
        if action.kind is not Pass.FORWARD:
            return True
        ahead = self.order.ahead
        if action.chunk == 0 and ahead is not None and self.in_first[stage] >= ahead:
            return False
        later = self.num_chunks[stage] - 1 - action.chunk if self.order.free else 0
        return self.held[stage] + later < self.order.limits[stage]

    def _do(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """Run a pass; return the stage and the pass that receive its result, or None if no other pass does."""
        kind, microbatch, chunk = action
        self.done[stage].append(action)
        if kind is Pass.WEIGHT:
            self.weights[stage].popleft()
            self.held[stage] -= 1
            return None
        next(queue for queue in self.waiting[stage][kind] if queue and queue[0] == action).popleft()
        step = 1 if kind is Pass.FORWARD else -1
        self.in_first[stage] += step * (chunk == 0)
        if kind is Pass.FORWARD:
            self.held[stage] += 1
        else:
            self.weights[stage].append(Action(Pass.WEIGHT, microbatch, chunk))
        if (place := self.after[kind is Pass.BACKWARD].get((stage, chunk))) is not None:
            return place[0], Action(kind, microbatch, place[1])
        return (stage, Action(Pass.BACKWARD, microbatch, chunk)) if kind is Pass.FORWARD else None


def _after(way: Way, kind: Pass) -> dict[tuple[int, int], tuple[int, int]]:
    """Return, for each layer range, the range that receives its result."""
    return dict(pairwise(way[:: kind.way]))


def _queues(order: Order, kind: Pass, chunks: range) -> list[deque[Action]]:
    """Return the passes of a stage in order: a queue for each chunk if their order is free, otherwise one queue.

    Chunks that share an edge have to receive its messages in the order in which they are sent.
    """
    turned = chunks if kind is Pass.FORWARD else chunks[::-1]
    parts = [(chunk,) for chunk in chunks] if order.free else [turned]
    return [deque(Action(kind, i, chunk) for group in order.groups for chunk in part for i in group) for part in parts]
