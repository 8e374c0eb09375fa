"""Rows of a model profile for a layer's experts, and for the host's time on layers."""

from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from msgspec import Meta

from shardwright.io.table import Row, Source, Sourced, sourced
from shardwright.key import ExpertKey, HostKey
from shardwright.types.dispatcher import Dispatcher
from shardwright.types.limits import Bytes, Count, NonNegativeCount, Ranks, Seconds
from shardwright.types.strategy import Recompute

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
        """Return a row with these figures, in whole bytes."""
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


class ExchangeRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rows of experts are exchanged; a profile without such a row has plain exchanges that are not overlapped."""

    dispatcher: Dispatcher
    """How rows are sent."""
    overlapped: bool
    """Whether exchanges overlap with computation of another micro-batch, if a plan has one at hand."""


class HostRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time that the host needs to start a layer's kernels: no pass is shorter, messages included."""

    type: Annotated[str, Meta(max_length=32)]
    """The layer's type: a key of the model description's `types`."""
    tp_size: Annotated[NonNegativeCount, Meta(extra={"unit": "ranks"})]
    """Tensor-parallel ranks; 0 if they make no difference."""
    recompute: Recompute
    """Activations that are computed again in the backward pass."""
    experts: Annotated[NonNegativeCount, Meta(extra={"unit": "experts"})]
    """Experts of the rank, which the row is about; 0 if it is about what else the layer does."""
    pipelined: bool
    """Whether the row is about pipelines between nodes only."""
    forward_s: Annotated[Seconds, sourced("source")]
    """Time in the forward pass."""
    backward_s: Annotated[Seconds, sourced("source")]
    """Time in the backward pass, recomputation included."""
    source: Source
    """Source of both times."""

    @property
    def key(self) -> HostKey:
        """Return the key of the row."""
        return HostKey.from_fields(self)
