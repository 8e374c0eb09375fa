"""Rows of a model profile about a layer's experts, and the figures that they have like those of whole layers."""

from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from msgspec import Meta

from shardwright_formats.io.table import Row, Source, Sourced, sourced
from shardwright_formats.key import ExpertKey
from shardwright_formats.types.limits import Bytes, Count, NonNegativeCount, Ranks, Seconds
from shardwright_formats.types.strategy import Recompute

Number = TypeVar("Number")


class LayerFigures(NamedTuple, Generic[Number]):
    """Time and memory of one microbatch in one layer on one rank; the fields are named as the columns of `layers`."""

    forward_s: Number
    backward_s: Number
    activation_bytes: Number
    workspace_bytes: Number


def figure_columns(figures: LayerFigures[Sourced]) -> dict[str, Any]:
    """Return the columns of figures and of their sources, with whole bytes."""
    forward, backward, activation, workspace = figures
    return {
        "forward_s": forward.value,
        "forward_source": forward.source,
        "backward_s": backward.value,
        "backward_source": backward.source,
        "activation_bytes": round(activation.value),
        "activation_source": activation.source,
        "workspace_bytes": round(workspace.value),
        "workspace_source": workspace.source,
    }


class ExpertRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time and memory of a layer's experts on one rank, for rows that are there, without messages."""

    type: Annotated[str, Meta(max_length=32)]
    """The layer's type: a key of the model description's `types`."""
    experts: Annotated[Count, Meta(extra={"unit": "experts"})]
    """Experts of the rank."""
    etp_size: Ranks
    """Ranks that share each expert's features out."""
    recompute: Recompute
    """Activations of the layer that are computed again in the backward pass."""
    rows: Annotated[NonNegativeCount, Meta(extra={"unit": "rows"})]
    """Rows of the rank over all its experts: a position has one for each expert that it chooses."""
    forward_s: Annotated[Seconds, sourced("forward_source")]
    """Time of the forward pass."""
    forward_source: Source
    """Source of `forward_s`."""
    backward_s: Annotated[Seconds, sourced("backward_source")]
    """Time of the backward pass with recomputation, without gradient reduction."""
    backward_source: Source
    """Source of `backward_s`."""
    activation_bytes: Annotated[Bytes, sourced("activation_source")]
    """Resident from the forward to the backward pass."""
    activation_source: Source
    """Source of `activation_bytes`."""
    workspace_bytes: Annotated[Bytes, sourced("workspace_source")]
    """The most that is resident beyond that during a pass."""
    workspace_source: Source
    """Source of `workspace_bytes`."""

    @classmethod
    def from_figures(cls, key: ExpertKey, figures: LayerFigures[Sourced]) -> "ExpertRow":
        """Return the row of these figures, with whole bytes."""
        return cls(**key.columns, **figure_columns(figures))

    @property
    def key(self) -> ExpertKey:
        """Return the key of the row."""
        return ExpertKey.from_fields(self)

    @property
    def figures(self) -> LayerFigures[Sourced]:
        """Return the figures of the row."""
        return LayerFigures(
            Sourced(self.forward_s, self.forward_source),
            Sourced(self.backward_s, self.backward_source),
            Sourced(self.activation_bytes, self.activation_source),
            Sourced(self.workspace_bytes, self.workspace_source),
        )
