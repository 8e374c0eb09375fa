"""Rows of a model profile that check the times derived for layers whose ranks split positions."""

from typing import Annotated

from msgspec import Meta

from shardwright.io.table import Row, Source
from shardwright.types.limits import (
    PositiveNumber,
    PositiveSeconds,
    Samples,
    Seconds,
    SeveralRanks,
    Tokens,
)

_Ratio = Annotated[PositiveNumber, Meta(extra={"unit": "1"})]


class ContextRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layer of one rank's share of positions, which attend to all of a sample: measured time over the derived."""

    type: Annotated[str, Meta(max_length=32)]
    """The layer's type: a key of the model description's `types`."""
    cp_size: SeveralRanks
    """Ranks that share the positions of a sample out."""
    micro_batch_size: Samples
    """Samples of a microbatch."""
    sequence_length: Tokens
    """Tokens of a sample, on all ranks."""
    forward_s: PositiveSeconds
    """Time of the forward pass, without messages."""
    forward_error_s: Seconds
    """Standard error of `forward_s`."""
    backward_s: PositiveSeconds
    """Time of the backward pass, without messages."""
    backward_error_s: Seconds
    """Standard error of `backward_s`."""
    source: Source
    """Source of these times."""
    forward_ratio: _Ratio
    """`forward_s` over what the points of `layers` and their joint curve derive."""
    backward_ratio: _Ratio
    """`backward_s` over what the points of `layers` and their joint curve derive."""

    @property
    def corrections(self) -> tuple[float, float]:
        """Return the factors of derived times, forward and backward; 1 if two standard errors explain the ratio."""
        forward, backward = (
            1.0 if abs(ratio - 1) <= 2 * ratio * error_s / time_s else ratio
            for ratio, time_s, error_s in (
                (self.forward_ratio, self.forward_s, self.forward_error_s),
                (self.backward_ratio, self.backward_s, self.backward_error_s),
            )
        )
        return forward, backward
