"""Layers that are bound by kernel launches on the host: sharding them further does not make them faster."""

from collections.abc import Iterable, Iterator

from shardwright.estimate.parts import block_kernels
from shardwright.estimate.settings import block_types
from shardwright.io.table import Source
from shardwright.types import Model
from shardwright.types.model_profile import LayerRow

LAUNCH_BOUND = "launch-bound"
"""First word of a note on such a layer; predictions repeat it."""
_STARTING_S = 60e-6
"""Time for each kernel up to which a layer may wait for its host.

Galvatron's blocks of BERT take 50 to 59 us for each of 35 kernels at every length from 128 to 2,048 tokens, and
FASOP's layers 33 to 59 us at every tp_size, however much there is to compute.
"""


def launch_notes(model: Model, rows: Iterable[LayerRow]) -> Iterator[str]:
    """Yield a sentence for each type of layer that is bound by launches and scaled to sizes that were not measured."""
    known = list(rows)
    for name in block_types(model):
        kernels, alike = block_kernels(model.types[name]), [row for row in known if row.type == name]
        timed = [row for row in alike if row.forward_source is Source.MEASURED]
        bound = [row for row in timed if row.forward_s <= kernels * _STARTING_S]
        if not bound or len(timed) == len(alike):
            continue
        times_us = [row.forward_s * 1e6 / kernels for row in bound]
        divided = {row.tp_size for row in alike} - {row.tp_size for row in timed}
        yield (
            f"{LAUNCH_BOUND}: {name} takes {_span(times_us)} us for each of about {kernels} kernels ({_where(bound)}), "
            "about what a host takes to start one. In proportion to it, larger micro-batches are too slow"
            + (" and larger tp_sizes too fast." if divided else ".")
        )


def _span(values: Iterable[float]) -> str:
    """Return the smallest and the largest value in words, rounded."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:.0f}" for value in (ordered[0], ordered[-1])))


def _where(rows: Iterable[LayerRow]) -> str:
    """Return, in words, the columns in which these rows were measured."""
    known, columns = list(rows), ("micro_batch_size", "tp_size", "sequence_length")
    return ", ".join(f"{name} {_span(getattr(row, name) for row in known)}" for name in columns)
