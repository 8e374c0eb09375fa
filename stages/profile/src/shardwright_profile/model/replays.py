"""Times of recomputation: all kinds have the same forward time, and their backward passes repeat parts of it."""

from collections.abc import Iterable, Iterator, Sequence
from math import hypot
from statistics import mean

import msgspec

from shardwright.io.table import Source
from shardwright.key import rows_by_key
from shardwright.plan.differences import Duration
from shardwright.types import Recompute
from shardwright.types.model_profile import LayerRow

LIKELY = 3.0
"""Number of standard errors beyond which a difference is hardly chance."""


def mean_of(durations: Sequence[Duration]) -> Duration:
    """The mean of durations with independent errors, as of probes measured separately."""
    count = len(durations)
    return Duration(mean(d.median_s for d in durations), hypot(*(d.error_s for d in durations)) / count)


def with_replays(rows: Iterable[LayerRow]) -> Iterator[LayerRow]:
    """Yield the rows of blocks with one forward time for all kinds of recomputation, and no recomputation for free.

    All kinds run the same forward pass: its time is the mean over them. Full recomputation repeats that pass, so its
    time stands in, marked derived, if noise hides the repetition. Other kinds repeat a part of it: their backward
    pass takes no less than the one without recomputation.
    """
    for alike in rows_by_key(rows, "recompute").values():
        forward = mean_of([Duration(row.forward_s, row.forward_error_s) for row in alike])
        plain = next((row for row in alike if row.recompute is Recompute.NONE), None)
        for row in alike:
            one = msgspec.structs.replace(row, forward_s=forward.median_s, forward_error_s=forward.error_s)
            yield one if plain is None or row is plain or plain.backward_s == 0 else _with_replay(one, plain)


def _with_replay(row: LayerRow, plain: LayerRow) -> LayerRow:
    """Return a row whose backward pass includes recomputation, corrected if noise hides it."""
    replay = Duration(row.backward_s - plain.backward_s, hypot(row.backward_error_s, plain.backward_error_s))
    if row.recompute is Recompute.FULL and replay.median_s <= LIKELY * replay.error_s:
        replay = Duration(row.forward_s, row.forward_error_s)
    elif row.recompute is not Recompute.FULL and replay.median_s < 0:
        replay = Duration(0.0, 0.0)
    else:
        return row
    return msgspec.structs.replace(
        row,
        backward_s=plain.backward_s + replay.median_s,
        backward_error_s=hypot(plain.backward_error_s, replay.error_s),
        backward_source=Source.DERIVED,
    )


def hidden_replays(measured: Iterable[LayerRow], fitted: Iterable[LayerRow]) -> Iterator[str]:
    """Yield a sentence for each backward time that noise made doubtful and that was replaced."""
    times_s = {row.key: row.backward_s for row in measured}
    for row in fitted:
        if times_s.get(row.key) and row.backward_source is Source.DERIVED:
            yield (
                f"replay hidden by noise: backward time of {row.key} was measured as {times_s[row.key]:.4g} s, "
                f"{row.backward_s:.4g} s is taken: that without recomputation"
                + (" and one forward pass" if row.recompute is Recompute.FULL else "")
            )
