"""Marks of a step turned into times and memory: by segment, by pass, by phase, by category."""

import msgspec

from shardwright_formats.types.measurement import ResidentMemory
from shardwright_train.measurement.memory_account import (
    Category,
    Change,
    Counters,
    MemoryEvent,
    MemoryInterval,
    memory_intervals,
)
from shardwright_train.measurement.record import Interval
from shardwright_train.measurement.step_memory import phases_of_memory, segments_of_memory
from shardwright_train.measurement.timing import timing_of_step


def _intervals(*events: tuple[str, tuple[int, int] | None, float]) -> list[Interval]:
    found, start_s = [], 0.0
    for name, at, time_s in events:
        found.append(Interval(name, at, start_s, time_s))
        start_s += time_s
    return found


def test_a_step_is_cut_at_its_marks() -> None:
    first, second = (0, 0), (1, 0)
    intervals = _intervals(
        ("forward.begin", first, 0.25), ("forward.wait", first, 0.5),
        ("embedding.forward", first, 1.0), ("layers.forward", first, 3.0), ("forward.end", first, 0.0),
        ("forward.begin", second, 0.25), ("forward.wait", second, 0.5),
        ("embedding.forward", second, 0.5), ("layers.forward", second, 1.0), ("forward.end", second, 0.0),
        ("backward.begin", first, 0.0), ("backward.wait", first, 0.25),
        ("layers.backward", first, 2.0), ("embedding.backward", first, 0.5), ("backward.end", first, 0.0),
        ("backward.begin", second, 0.0), ("backward.wait", second, 0.25),
        ("layers.backward", second, 2.5), ("embedding.backward", second, 0.5), ("backward.end", second, 0.0),
        ("reduced", None, 0.125), ("optimizer", None, 4.0),
    )  # fmt: skip
    timing = timing_of_step(intervals)
    assert timing.forward_s == {"embedding": 0.5, "layers": 1.0}, "the first forward pass also gathers"
    assert timing.backward_s == {"layers": 2.0, "embedding": 0.5}, "the last backward pass also reduces"
    assert timing.gradient_reduction_s == 0.5 + 0.125, "longer, and waited for afterwards"
    assert timing.optimizer_s == 4.0
    assert timing.step_s == sum(i.time_s for i in intervals)
    assert [(p.kind, p.microbatch, p.wait_s, p.start_s, p.time_s) for p in timing.passes] == [
        ("forward", 0, 0.5, 0.75, 4.0),
        ("forward", 1, 0.5, 5.5, 1.5),
        ("backward", 0, 0.25, 7.25, 2.5),
        ("backward", 1, 0.25, 10.0, 3.0),
    ]


def test_the_chunks_of_a_microbatch_are_added_up() -> None:
    # The second microbatch comes before the first one's second chunk.
    turns = [(0, 0), (1, 0), (0, 1), (1, 1)]
    intervals = [
        *(i for n, at in enumerate(turns) for i in _pass("forward", at, 2.0**n)),
        *(i for n, at in enumerate(reversed(turns)) for i in _pass("backward", at, 2.0**n)),
        *_intervals(("optimizer", None, 1.0)),
    ]
    timing = timing_of_step(intervals)
    assert timing.forward_s == {"layers": 2.0 + 8.0}
    assert timing.backward_s == {"layers": 2.0 + 8.0}, "of microbatch 0, the last backward pass also reduces"
    assert timing.gradient_reduction_s == (1.0 + 4.0) - (2.0 + 8.0)
    assert [(p.microbatch, p.chunk, p.time_s) for p in timing.passes[:4]] == [
        (0, 0, 1.0), (1, 0, 2.0), (0, 1, 4.0), (1, 1, 8.0)
    ]  # fmt: skip


def _pass(kind: str, at: tuple[int, int], time_s: float) -> list[Interval]:
    return _intervals(
        (f"{kind}.wait", at, 0.0),
        (f"layers.{kind}", at, time_s),
        (f"{kind}.end", at, 0.0),
    )


def _held(activations: int = 0, buffers: int = 0, gradients: int = 0) -> ResidentMemory:
    return ResidentMemory(
        parameters_bytes=0,
        gradients_bytes=gradients,
        optimizer_bytes=0,
        activations_bytes=activations,
        buffers_bytes=buffers,
    )


def test_memory_of_a_segment_is_told_apart_by_what_stays_and_what_was_held_for_a_moment() -> None:
    def interval(name: str, at: tuple[int, int], before: int, after: int, peak: int) -> MemoryInterval:
        return MemoryInterval(name, at, _held(before), _held(after), _held(peak))

    intervals = [
        interval("layers.forward", (0, 0), 0, 100, 100),
        interval("layers.forward", (1, 0), 100, 150, 180),
        interval("layers.forward", (1, 1), 150, 160, 191),
        interval("layers.backward", (1, 1), 160, 150, 164),
        interval("layers.backward", (1, 0), 150, 90, 155),
        interval("layers.backward", (0, 0), 90, 20, 97),
    ]
    (layers,) = segments_of_memory(intervals)
    assert (layers.activation_bytes, layers.forward_workspace_bytes, layers.backward_workspace_bytes) == (60, 31, 5)


A_STEP: list[Change | MemoryEvent] = [
    MemoryEvent("start", None, {}),
    MemoryEvent("forward.begin", (0, 0), {}),
    Change(50, 5),  # received
    MemoryEvent("forward.wait", (0, 0), {}),
    Change(60, 64),  # gathered
    Change(70, 1000),  # a workspace
    Change(80, 30),  # left for the backward pass
    Change(70, -1000),
    MemoryEvent("head.forward", (0, 0), {Category.BUFFERS: {60: 64}}),
    MemoryEvent("forward.end", (0, 0), {Category.BUFFERS: {60: 64}}),
    MemoryEvent("backward.begin", (0, 0), {Category.BUFFERS: {60: 64}}),
    Change(70, 2000),  # another one at the place of the first
    Change(90, 8),  # a gradient
    Change(80, -30),
    Change(70, -2000),
    MemoryEvent("head.backward", (0, 0), {Category.GRADIENTS: {90: 8}, Category.BUFFERS: {60: 64}}),
    MemoryEvent("backward.end", (0, 0), {}),
    Change(50, -5),
    Change(60, -64),
    MemoryEvent("reduced", None, {Category.GRADIENTS: {90: 8}}),
    Change(90, -8),
    MemoryEvent("optimizer", None, {}),
]
STANDING = {Category.PARAMETERS: {10: 100}, Category.OPTIMIZER: {20: 200}}


def test_every_byte_of_a_step_is_in_one_category() -> None:
    intervals = {i.name: i for i in memory_intervals(A_STEP, STANDING, rest_bytes=7)}
    held = {name: msgspec.structs.astuple(i.after) for name, i in intervals.items()}
    peak = {name: msgspec.structs.astuple(i.peak) for name, i in intervals.items()}
    assert held["forward.begin"] == (100, 0, 200, 0, 7)
    assert held["forward.wait"] == (100, 0, 200, 5, 7), "what was received is kept for the backward pass"
    assert peak["head.forward"] == (100, 0, 200, 35, 7 + 64 + 1000)
    assert held["head.forward"] == (100, 0, 200, 35, 7 + 64)
    assert peak["head.backward"] == (100, 8, 200, 35, 7 + 64 + 2000), "a gradient from the moment it was made"
    assert held["head.backward"] == (100, 8, 200, 5, 7 + 64)
    assert held["reduced"] == (100, 8, 200, 0, 7)
    assert held["optimizer"] == (100, 0, 200, 0, 7)
    phases = phases_of_memory([intervals["forward.begin"]], list(intervals.values()))
    assert [p.peak.total_bytes for p in phases] == [307, 307 + 35 + 1064, 307 + 43 + 2064, 307 + 8]
    assert [p.resident.total_bytes for p in phases] == [307, 307 + 35 + 64, 307 + 8, 307]


def test_of_the_forward_passes_the_end_counts_after_which_most_was_held() -> None:
    def interval(name: str, at: tuple[int, int] | None, after: int) -> MemoryInterval:
        return MemoryInterval(name, at, _held(), _held(after), _held(after))

    ends = [interval("forward.end", (i, 0), after) for i, after in enumerate((5, 9, 4))]
    phases = phases_of_memory(ends, [*ends, interval("reduced", None, 3), interval("optimizer", None, 2)])
    assert [phase.resident.total_bytes for phase in phases] == [4, 9, 3, 2]


def test_memory_that_was_not_seen_coming_or_going_is_counted_once_it_shows() -> None:
    record = [
        MemoryEvent("start", None, {}),
        Change(50, 5),
        Change(50, 6),  # so the first is gone
        Change(99, -1000),  # was there before, and is in the rest
        MemoryEvent("reduced", None, {Category.GRADIENTS: {60: 40}}),
    ]
    (interval,) = memory_intervals(record, {}, rest_bytes=0)
    assert msgspec.structs.astuple(interval.after) == (0, 40, 0, 0, 6)


def test_where_an_allocator_counts_its_counts_are_the_sum() -> None:
    counted = [
        MemoryEvent(item.name, item.at, item.holdings, Counters(2048, 4096)) if isinstance(item, MemoryEvent) else item
        for item in A_STEP
    ]
    for interval in memory_intervals(counted, STANDING, rest_bytes=0):
        assert (interval.after.total_bytes, interval.peak.total_bytes) == (2048, 4096)
    missed = [item for item in counted if item != Change(80, -30)]
    last = memory_intervals(missed, STANDING, rest_bytes=0)[-1].after
    assert last.activations_bytes == 30
    full = [item._replace(counters=Counters(310, 4096)) if isinstance(item, MemoryEvent) else item for item in missed]
    last = memory_intervals(full, STANDING, rest_bytes=0)[-1].after
    assert (last.activations_bytes, last.buffers_bytes) == (10, 0), "no more than the allocator leaves for them"
