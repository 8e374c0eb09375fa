"""The monotonicity check: times that fall where there is more to do, which only noise can explain."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import hypot

from shardwright_formats.key import rows_by_key
from shardwright_formats.types.model_profile import LayerRow

_LIKELY = 3.0
"""Number of standard errors beyond which a difference is hardly chance."""


def falling_times(layers: Iterable[LayerRow]) -> Iterator[str]:
    """Yield a sentence for each time shorter than that of a smaller micro-batch, by more than three standard errors.

    The rows ascend in micro-batch size.
    """
    for key, points in rows_by_key(layers, "micro_batch_size").items():
        for small, large in pairwise(points):
            for way in ("forward", "backward"):
                times_s = [getattr(row, f"{way}_s") for row in (small, large)]
                error_s = hypot(*(getattr(row, f"{way}_error_s") for row in (small, large)))
                if times_s[0] - times_s[1] > _LIKELY * error_s:
                    yield (
                        f"not monotone: {way} time of {key} falls from {times_s[0]:.4g} s to "
                        f"{times_s[1]:.4g} s as micro_batch_size grows from {small.micro_batch_size} to "
                        f"{large.micro_batch_size}"
                    )
