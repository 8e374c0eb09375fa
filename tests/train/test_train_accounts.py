"""Events of a step turned into times and memory, by segment and by pass."""

from shardwright_train.measurement.profiles import Allocation, Event, MemoryInterval, intervals_of, segments_of_memory
from shardwright_train.measurement.timing import Interval, timing_of_step


def _intervals(*events: tuple[str, tuple[int, int] | None, float]) -> list[Interval]:
    found, start_s = [], 0.0
    for name, at, time_s in events:
        found.append(Interval(name, at, start_s, time_s))
        start_s += time_s
    return found


def test_a_step_is_cut_at_its_events() -> None:
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
    timing = timing_of_step(intervals, 8.0)
    assert timing.reference_s == 8.0
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
    timing = timing_of_step(intervals, 8.0)
    assert timing.forward_s == {"layers": 2.0 + 8.0}
    assert timing.backward_s == {"layers": 2.0 + 8.0}, "of microbatch 0, the last backward pass also reduces"
    assert timing.gradient_reduction_s == (1.0 + 4.0) - (2.0 + 8.0)
    assert [(p.microbatch, p.chunk, p.time_s) for p in timing.passes[:4]] == [
        (0, 0, 1.0), (1, 0, 2.0), (0, 1, 4.0), (1, 1, 8.0)
    ]  # fmt: skip


def test_of_three_microbatches_the_middle_one_only_computes_and_adds_to_gradients() -> None:
    """The first one's backward pass adds to nothing, and the last one's also reduces."""
    intervals = [
        *(i for m, s in enumerate((5.0, 1.0, 1.5)) for i in _pass("forward", (m, 0), s)),
        *(i for m, s in enumerate((2.0, 2.5, 4.0)) for i in _pass("backward", (m, 0), s)),
        *_intervals(("reduced", None, 0.25), ("optimizer", None, 1.0)),
    ]
    timing = timing_of_step(intervals, 8.0)
    assert (timing.forward_s, timing.backward_s) == ({"layers": 1.0}, {"layers": 2.5})
    assert timing.gradient_reduction_s == 4.0 - 2.5 + 0.25


def _pass(kind: str, at: tuple[int, int], time_s: float) -> list[Interval]:
    return _intervals(
        (f"{kind}.wait", at, 0.0),
        (f"layers.{kind}", at, time_s),
        (f"{kind}.end", at, 0.0),
    )


def test_memory_of_a_segment_is_told_apart_by_what_stays_and_what_is_workspace() -> None:
    intervals = [
        MemoryInterval("layers.forward", (0, 0), 0, 100, 100),
        MemoryInterval("layers.forward", (1, 0), 100, 150, 180),
        MemoryInterval("layers.forward", (1, 1), 150, 160, 191),
        MemoryInterval("layers.backward", (1, 1), 160, 150, 164),
        MemoryInterval("layers.backward", (1, 0), 150, 90, 155),
        MemoryInterval("layers.backward", (0, 0), 90, 20, 97),
    ]
    (layers,) = segments_of_memory(intervals)
    assert (layers.activation_bytes, layers.forward_workspace_bytes, layers.backward_workspace_bytes) == (60, 31, 5)


A_STEP: list[Allocation | Event] = [
    Event("start", None),
    Event("forward.begin", (0, 0)),
    Allocation(50, 5),  # received
    Event("forward.wait", (0, 0)),
    Allocation(60, 64),  # gathered
    Allocation(70, 1000),  # a workspace
    Allocation(80, 30),  # left for the backward pass
    Allocation(70, -1000),
    Event("head.forward", (0, 0)),
    Event("backward.begin", (0, 0)),
    Allocation(70, 2000),  # another one at the place of the first
    Allocation(90, 8),  # a gradient
    Allocation(80, -30),
    Allocation(70, -2000),
    Event("head.backward", (0, 0)),
    Allocation(50, -5),
    Allocation(60, -64),
    Event("reduced", None),
    Allocation(90, -8),
    Event("optimizer", None),
]


def test_every_byte_is_resident_from_its_allocation_until_it_is_freed() -> None:
    found = {i.name: (i.before_bytes, i.after_bytes, i.peak_bytes) for i in intervals_of(A_STEP, standing_bytes=307)}
    assert found == {
        "forward.begin": (307, 307, 307),
        "forward.wait": (307, 312, 312),
        "head.forward": (312, 312 + 94, 312 + 1064 + 30),
        "backward.begin": (406, 406, 406),
        "head.backward": (406, 406 - 30 + 8, 406 + 2008),
        "reduced": (384, 315, 384),
        "optimizer": (315, 307, 315),
    }


def test_memory_that_was_not_seen_going_is_gone_once_its_place_is_taken() -> None:
    record = [
        Event("start", None),
        Allocation(50, 5),
        Allocation(50, 6),  # so the first is gone
        Allocation(99, -1000),  # was there before, and is what stood when the record began
        Event("reduced", None),
    ]
    (interval,) = intervals_of(record, standing_bytes=0)
    assert (interval.before_bytes, interval.after_bytes, interval.peak_bytes) == (0, 6, 6)
