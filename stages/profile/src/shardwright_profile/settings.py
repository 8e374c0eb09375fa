"""What of a model is profiled."""

from typing import Annotated

from msgspec import Meta

from shardwright_formats.files import Document
from shardwright_formats.plan import Attention, Precision
from shardwright_formats.strategy import Recompute, SequenceParallel

__all__ = ["ProfileSettings"]

_Counts = Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1)]


class ProfileSettings(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The strategies and micro-batch sizes to probe: every combination of the four lists is measured."""

    FORMAT = "shardwright.profile_settings"

    tp_sizes: _Counts
    sequence_parallel: Annotated[tuple[SequenceParallel, ...], Meta(min_length=1)]
    recompute: Annotated[tuple[Recompute, ...], Meta(min_length=1)]
    micro_batch_sizes: _Counts
    """Samples of one tensor-parallel group in a microbatch."""
    layers: tuple[Annotated[int, Meta(ge=1)], Annotated[int, Meta(ge=1)]] = (1, 3)
    """Number of layers of a block type in its shorter and in its longer probe."""
    precision: Precision = Precision()
    attention: Attention = Attention.AUTO

    def __post_init__(self) -> None:
        for name in ("tp_sizes", "sequence_parallel", "recompute", "micro_batch_sizes"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name} holds a value twice")
        if self.layers[0] >= self.layers[1]:
            raise ValueError(
                f"layers {list(self.layers)} must be two growing numbers: their difference is one layer's cost"
            )
        if Recompute.NONE not in self.recompute:
            raise ValueError("recompute must hold 'none': embedding and head are measured in those probes")
