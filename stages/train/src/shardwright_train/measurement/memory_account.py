"""Whose the memory is: from a record of allocations to what was held of each category, event by event."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from shardwright_formats.types.measurement import ResidentMemory
from shardwright_train.pipeline.runner import MicrobatchChunk

__all__ = ["Category", "Change", "Counters", "Holdings", "MemoryEvent", "MemoryInterval", "memory_intervals"]


class Category(IntEnum):
    """What memory is held for, as it can be told from the tensors at an event."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    ACTIVATIONS = 3
    BUFFERS = 4


Holdings = Mapping[Category, Mapping[int, int]]
"""Bytes of the memory that is known to be of a category, by its address."""


class Change(NamedTuple):
    """Memory taken (bytes) or given back (negative bytes)."""

    address: int
    size_bytes: int


class Counters(NamedTuple):
    """An allocator's own counts: all that is held, and the most since the event before."""

    held_bytes: int
    peak_bytes: int


class MemoryEvent(NamedTuple):
    """An event of a step, with what tensors hold there and, where the device has them, the allocator's counts."""

    name: str
    at: MicrobatchChunk | None
    holdings: Holdings
    counters: Counters | None = None


class MemoryInterval(NamedTuple):
    """Tensor memory between two events."""

    name: str
    at: MicrobatchChunk | None
    before: ResidentMemory
    after: ResidentMemory
    peak: ResidentMemory


@dataclass
class _Block:
    """Memory from its allocation until it is freed."""

    size_bytes: int
    found: Category | None = None

    @property
    def category(self) -> Category:
        """What it was found to be; the rest is buffers."""
        return Category.BUFFERS if self.found is None else self.found


def memory_intervals(
    record: Sequence[Change | MemoryEvent], standing: Holdings, rest_bytes: int
) -> list[MemoryInterval]:
    """What was held between the events of a record that begins with an event.

    `standing` and, beside it, `rest_bytes` of buffers were held when the record began. A block belongs, all its life,
    to the category whose holdings it is among at some event. Of the others, what is taken in a forward pass and held at
    its end is activations. All else is buffers.
    """
    blocks = _Blocks(standing)
    # First every block finds its category, then the blocks are added up in the order in which they came and went.
    history = [entry for item in record for entry in blocks.follow(item)]
    held = [0] * len(Category)
    held[Category.BUFFERS] += rest_bytes
    for block in blocks.standing:
        held[block.category] += block.size_bytes
    return list(_added_up(history, held))


class _Blocks:
    """The blocks that are held, by address, as a record is followed."""

    def __init__(self, standing: Holdings) -> None:
        self._live = {
            address: _Block(size, category) for category, sizes in standing.items() for address, size in sizes.items()
        }
        self.standing = tuple(self._live.values())
        self._taken_in_pass: dict[int, _Block] | None = None

    def follow(self, item: "Change | MemoryEvent") -> "Iterator[tuple[_Block, int] | MemoryEvent]":
        """The blocks that come (1) and go (-1) with an item of the record, and the event itself."""
        if isinstance(item, Change):
            gone = self._live.pop(item.address, None)
            # Where one stood already, its end was not recorded: it is over now.
            if gone is not None:
                yield gone, -1
            if item.size_bytes > 0:
                yield self._take(item.address, item.size_bytes), 1
            return
        for category, sizes in item.holdings.items():
            for address, size in sizes.items():
                if address not in self._live:
                    # Taken where no record is made: it counts from here on.
                    yield self._take(address, size), 1
                self._live[address].found = category
        if item.name == "forward.begin":
            self._taken_in_pass = {}
        elif item.name == "forward.end" and self._taken_in_pass is not None:
            for address, block in self._taken_in_pass.items():
                if self._live.get(address) is block and block.found is None:
                    block.found = Category.ACTIVATIONS
            self._taken_in_pass = None
        yield item

    def _take(self, address: int, size_bytes: int) -> _Block:
        block = self._live[address] = _Block(size_bytes)
        if self._taken_in_pass is not None:
            self._taken_in_pass[address] = block
        return block


def _added_up(history: "Sequence[tuple[_Block, int] | MemoryEvent]", held: list[int]) -> Iterator[MemoryInterval]:
    before: ResidentMemory | None = None
    peak, total, most = list(held), sum(held), sum(held)
    for item in history:
        if isinstance(item, MemoryEvent):
            after = _told_apart(held, item.counters.held_bytes if item.counters else None)
            if before is not None:
                most_held = _told_apart(peak, item.counters.peak_bytes if item.counters else None)
                yield MemoryInterval(item.name, item.at, before, after, most_held)
            before = after
            peak, most = list(held), total
            continue
        block, sign = item
        held[block.category] += sign * block.size_bytes
        total += sign * block.size_bytes
        if total > most:
            peak, most = list(held), total


def _told_apart(held: Sequence[int], counted_bytes: int | None) -> ResidentMemory:
    """The categories of what is held; where an allocator has counted, all it counts beyond them is buffers."""
    parameters, gradients, optimizer, activations, buffers = held
    if counted_bytes is not None:
        left = counted_bytes - parameters - gradients - optimizer
        # What another thread frees is not in the record: activations are no more than the allocator leaves for them.
        activations = min(activations, left)
        buffers = left - activations
    return ResidentMemory(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        buffers_bytes=buffers,
    )
