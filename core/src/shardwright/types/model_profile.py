"""A model profile: time and memory of a model's layers on a device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar

from msgspec import Meta

from shardwright.io import Value
from shardwright.io.hdf5 import OPTIONAL, Profile, Provenance, read_profile, write_profile
from shardwright.io.table import Row, Source, Sourced, Table, sourced
from shardwright.key import ExpertKey, HostKey, LayerKey, rows_by_key
from shardwright.types.limits import (
    Bytes,
    Count,
    NonNegativeCount,
    PositiveNumber,
    PositiveSeconds,
    Ranks,
    Samples,
    Seconds,
    SeveralRanks,
    Tokens,
)
from shardwright.types.strategy import Dispatcher, Recompute, SequenceParallel

_Ratio = Annotated[PositiveNumber, Meta(extra={"unit": "1"})]


class ContextRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured time of a layer on one rank under context parallelism, whose positions attend to whole samples."""

    type: Annotated[str, Meta(max_length=32)]
    """The layer's type: a key of the model description's `types`."""
    cp_size: SeveralRanks
    """Number of ranks over which the positions of a sample are split."""
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
    """`forward_s` over the time derived from the points of `layers` and their joint curve."""
    backward_ratio: _Ratio
    """`backward_s` over the time derived from the points of `layers` and their joint curve."""

    @property
    def corrections(self) -> tuple[float, float]:
        """Return factors for derived times, forward and backward; 1 if the ratio is within two standard errors of 1."""
        forward, backward = (
            1.0 if abs(ratio - 1) <= 2 * ratio * error_s / time_s else ratio
            for ratio, time_s, error_s in (
                (self.forward_ratio, self.forward_s, self.forward_error_s),
                (self.backward_ratio, self.backward_s, self.backward_error_s),
            )
        )
        return forward, backward


Number = TypeVar("Number")


class LayerFigures(NamedTuple, Generic[Number]):
    """Time and memory of one micro-batch in one layer on one rank; the fields are named as the columns of `layers`."""

    forward_s: Number
    backward_s: Number
    activation_bytes: Number
    workspace_bytes: Number


def figure_columns(figures: LayerFigures[Sourced]) -> dict[str, Any]:
    """Return the columns of the figures and of their sources, in whole bytes."""
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
    """Time and memory of a layer's experts on one rank without messages, once the rows have arrived."""

    type: Annotated[str, Meta(max_length=32)]
    """The layer's type: a key of the model description's `types`."""
    experts: Annotated[Count, Meta(extra={"unit": "experts"})]
    """Number of the rank's experts."""
    etp_size: Ranks
    """Number of ranks over which each expert's features are sharded."""
    recompute: Recompute
    """Activations of the layer that are computed again in the backward pass."""
    rows: Annotated[NonNegativeCount, Meta(extra={"unit": "rows"})]
    """Number of rows over all of the rank's experts: a position has one row for each expert that it chooses."""
    forward_s: Annotated[Seconds, sourced("forward_source")]
    """Time of the forward pass."""
    forward_source: Source
    """Source of `forward_s`."""
    backward_s: Annotated[Seconds, sourced("backward_source")]
    """Time of the backward pass with recomputation, without gradient reduction."""
    backward_source: Source
    """Source of `backward_s`."""
    activation_bytes: Annotated[Bytes, sourced("activation_source")]
    """Memory that is resident from the forward to the backward pass."""
    activation_source: Source
    """Source of `activation_bytes`."""
    workspace_bytes: Annotated[Bytes, sourced("workspace_source")]
    """The most memory that is resident during a pass beyond `activation_bytes`."""
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
    """How rows of experts are exchanged; without such a row in a profile, by all-to-all without overlap."""

    dispatcher: Dispatcher
    """How the rows are sent."""
    overlapped: bool
    """Whether exchanges overlap with the computation of another micro-batch, if the plan has one to compute."""


class HostRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time that the host needs to start a layer's kernels: no pass is shorter, even including messages."""

    type: Annotated[str, Meta(max_length=32)]
    """The layer's type: a key of the model description's `types`."""
    tp_size: Annotated[NonNegativeCount, Meta(extra={"unit": "ranks"})]
    """Number of tensor-parallel ranks; 0 if the time does not depend on it."""
    recompute: Recompute
    """Activations that are computed again in the backward pass."""
    experts: Annotated[NonNegativeCount, Meta(extra={"unit": "experts"})]
    """Number of the rank's experts, if the row describes experts; 0 if it describes the rest of the layer."""
    pipelined: bool
    """Whether the row applies only to pipelines between nodes."""
    forward_s: Annotated[Seconds, sourced("source")]
    """Time for the forward pass."""
    backward_s: Annotated[Seconds, sourced("source")]
    """Time for the backward pass, including recomputation."""
    source: Source
    """Source of both times."""

    @property
    def key(self) -> HostKey:
        """Return the key of the row."""
        return HostKey.from_fields(self)


_TypeName = Annotated[str, Meta(max_length=32)]
_Coefficient = Annotated[float, Meta(extra={"unit": "s or bytes per unit of the term"})]
_Residual = Annotated[float, Meta(ge=0, extra={"unit": "1"})]
_Points = Annotated[Count, Meta(extra={"unit": "points"})]


class FitMode(StrEnum):
    """Forms of a quantity as a function of micro-batch size b and sequence length s: Galvatron's three, and `joint`."""

    STATIC = "static"
    """linear * b, at one length."""
    BATCH = "batch"
    """constant + linear * b, at one length."""
    SEQUENCE = "sequence"
    """constant + linear * s + quadratic * s^2, at one micro-batch size."""
    JOINT = "joint"
    """constant + linear * b s + quadratic * b s^2, over all points."""


class Quantity(StrEnum):
    """The columns of `layers` that curves are fitted to."""

    FORWARD_S = "forward_s"
    BACKWARD_S = "backward_s"
    ACTIVATION_BYTES = "activation_bytes"


class _TypeColumns(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The key columns that all figures of layers have."""

    type: _TypeName
    """The layer's type: a key of the model description's `types`."""
    tp_size: Ranks
    """Number of tensor-parallel ranks."""

    @property
    def key(self) -> LayerKey:
        """Return the key of the row; key columns that the row does not have are left open."""
        return LayerKey.from_fields(self)


class _StrategyColumns(_TypeColumns, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The key columns that figures of a pass have."""

    sequence_parallel: SequenceParallel
    """Kind of sequence parallelism of the tensor-parallel ranks."""
    recompute: Recompute
    """Activations that are computed again in the backward pass."""


class LayerRow(_StrategyColumns, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time and memory of one micro-batch in one layer, including the traffic of tensor and sequence parallelism."""

    micro_batch_size: Samples
    """Samples of the micro-batch on one tensor-parallel group."""
    sequence_length: Tokens
    """Tokens of a sample."""
    forward_s: Annotated[Seconds, sourced("forward_source")]
    """Time of the forward pass."""
    forward_error_s: Annotated[Seconds, sourced("forward_source")] = 0.0
    """Standard error of `forward_s`; 0 if it is not known."""
    forward_source: Source
    """Source of `forward_s` and its error."""
    backward_s: Annotated[Seconds, sourced("backward_source")]
    """Time of the backward pass with recomputation, without gradient reduction."""
    backward_error_s: Annotated[Seconds, sourced("backward_source")] = 0.0
    """Standard error of `backward_s`; 0 if it is not known."""
    backward_source: Source
    """Source of `backward_s` and its error."""
    activation_bytes: Annotated[Bytes, sourced("activation_source")]
    """Memory that is resident from the forward to the backward pass."""
    activation_source: Source
    """Source of `activation_bytes`."""
    workspace_bytes: Annotated[Bytes, sourced("workspace_source")]
    """The most memory that is resident during a pass beyond `activation_bytes`."""
    workspace_source: Source
    """Source of `workspace_bytes`."""

    @classmethod
    def from_figures(cls, key: LayerKey, figures: LayerFigures[Sourced]) -> "LayerRow":
        """Return a row with these figures, in whole bytes."""
        return cls(
            **key.columns,
            **figure_columns(figures),
            forward_error_s=figures.forward_s.error,
            backward_error_s=figures.backward_s.error,
        )

    @property
    def figures(self) -> LayerFigures[Sourced]:
        """Return the figures of the row."""
        return LayerFigures(
            Sourced(self.forward_s, self.forward_source, self.forward_error_s),
            Sourced(self.backward_s, self.backward_source, self.backward_error_s),
            Sourced(self.activation_bytes, self.activation_source),
            Sourced(self.workspace_bytes, self.workspace_source),
        )


class StateRow(_TypeColumns, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time and memory of one layer's parameters on one rank under plain DDP."""

    parameter_bytes: Annotated[Bytes, sourced("bytes_source")]
    """Bytes of the stored parameters."""
    gradient_bytes: Annotated[Bytes, sourced("bytes_source")]
    """Bytes of the gradients."""
    optimizer_bytes: Annotated[Bytes, sourced("bytes_source")]
    """Bytes of the optimizer's state."""
    bytes_source: Source
    """Source of these three numbers of bytes."""
    optimizer_s: Annotated[Seconds, sourced("optimizer_source")]
    """Time of the optimizer for a step, including clipping, if nothing is sharded."""
    optimizer_source: Source
    """Source of `optimizer_s`."""
    reduction_s: Annotated[Seconds, sourced("reduction_source")]
    """Time that reducing the gradients adds to a step."""
    reduction_ranks: Ranks
    """Number of data-parallel ranks of the measured reduction."""
    reduction_source: Source
    """Source of `reduction_s`."""
    scatter_s: Annotated[Seconds, sourced("zero_source")]
    """Time that reducing the gradients adds to a step under ZeRO."""
    gather_s: Annotated[Seconds, sourced("zero_source")]
    """Time that gathering the parameters adds to one pass of a micro-batch under ZeRO-3."""
    zero_ranks: Ranks
    """Number of data-parallel ranks of the measurements under ZeRO."""
    zero_source: Source
    """Source of `scatter_s` and `gather_s`."""


class ProcessRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures that occur once in a process or a step."""

    process_bytes: Annotated[Bytes, sourced("process_source")]
    """Device memory outside of the tensors and the communicators."""
    process_source: Source
    """Source of `process_bytes`."""
    communicator_bytes: Annotated[Bytes, sourced("communicator_source")]
    """Buffers of an NCCL communicator that is not a pipeline edge; 0 without NCCL."""
    communicator_source: Source
    """Source of `communicator_bytes`."""
    resident_bytes: Annotated[Bytes, sourced("resident_source")]
    """Host memory of the process before the model is built."""
    resident_source: Source
    """Source of `resident_bytes`."""
    step_overhead_s: Annotated[Seconds, sourced("step_overhead_source")]
    """Time of a step that belongs neither to layers nor to gradient reduction nor to the optimizer."""
    step_overhead_source: Source
    """Source of `step_overhead_s`."""
    reference_s: Annotated[Seconds, sourced("reference_source")]
    """Time of the reference workload on a machine as fast as during these measurements; 0 if none was run."""
    reference_source: Source
    """Source of `reference_s`."""


class FitRow(_StrategyColumns, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A curve fitted to the points of `layers`, with its errors relative to the points."""

    quantity: Quantity
    """Quantity that the curve describes."""
    mode: FitMode
    """Form of the curve."""
    micro_batch_size: Annotated[NonNegativeCount, Meta(extra={"unit": "samples"})]
    """Samples of one tensor-parallel group; 0 if the points differ in it."""
    sequence_length: Annotated[NonNegativeCount, Meta(extra={"unit": "tokens"})]
    """Tokens of a sample; 0 if the points differ in it."""
    constant: _Coefficient
    """The constant term."""
    linear: _Coefficient
    """Coefficient of the linear term."""
    quadratic: _Coefficient
    """Coefficient of the quadratic term."""
    points: _Points
    """Number of points that were fitted."""
    typical_residual: _Residual
    """Median of |fit - point| / point."""
    worst_residual: _Residual
    """Largest |fit - point| / point."""
    left_out_points: Annotated[NonNegativeCount, Meta(extra={"unit": "points"})]
    """Number of points that were left out one at a time and predicted from the others."""
    left_out_error: _Residual
    """Median of |prediction - point| / point over the left-out points; 0 if there are none."""


class ProfileOrigin(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Origin of a profile: the model, the device and the settings."""

    model: str
    """Name of the model."""
    architecture_sha256: str
    """`Model.architecture_sha256`: the profile applies to models with these layer types and any number of layers."""
    device: str
    """The device's name as its driver gives it, or `cpu`."""
    backend: str
    """Backend of the collectives."""
    precision: str
    """`parameters/compute/reduce`, such as `float32/bfloat16/float32`; then ` tf32` if factors are rounded, and `
    compiled` if the layers were compiled by torch.compile."""
    attention: str
    """The attention kernel."""
    runtime: str = "shardwright"
    """The runtime whose kernels and memory the profile describes; other runtimes than this project's are only
    estimated."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelProfile(Profile):
    """The tables of a model profile; there is one profile for each model and device type.

    `layers`: time and memory of one layer of each type (including embedding and head) by strategy and micro-batch.
    `states`: bytes and optimizer time of one layer's parameters. `process`: one row of what occurs once in a process or
    a step. `fits`: curves through the points of `layers`. If layers have experts that ranks may shard as a whole,
    `experts` is the part of such a layer that its experts compute, and `rests` is everything else; the two add up.
    `context`: how times derived for context parallelism compare with measured ones. `exchange`: one row on how experts'
    rows are sent. `host`: what the host spends on layers, if the layers' times do not include it.
    """

    FORMAT: ClassVar[str] = "shardwright.model_profile"
    VERSION: ClassVar[int] = 6

    origin: ProfileOrigin
    provenance: Provenance
    layers: Table[LayerRow]
    states: Table[StateRow]
    process: Table[ProcessRow]
    fits: Table[FitRow]
    rests: Table[LayerRow] = field(default_factory=lambda: Table.from_rows(LayerRow, ()), metadata=OPTIONAL)
    experts: Table[ExpertRow] = field(default_factory=lambda: Table.from_rows(ExpertRow, ()), metadata=OPTIONAL)
    context: Table[ContextRow] = field(default_factory=lambda: Table.from_rows(ContextRow, ()), metadata=OPTIONAL)
    exchange: Table[ExchangeRow] = field(default_factory=lambda: Table.from_rows(ExchangeRow, ()), metadata=OPTIONAL)
    host: Table[HostRow] = field(default_factory=lambda: Table.from_rows(HostRow, ()), metadata=OPTIONAL)

    @cached_property
    def curves(self) -> dict[LayerKey, list[LayerRow]]:
        """Return the points of `layers` by key without micro-batch size; each list is sorted by micro-batch size."""
        return _curves(self.layers)

    @cached_property
    def rest_curves(self) -> dict[LayerKey, list[LayerRow]]:
        """Return the points of `rests` by key without micro-batch size; each list is sorted by micro-batch size."""
        return _curves(self.rests)

    @cached_property
    def expert_curves(self) -> dict[ExpertKey, list[ExpertRow]]:
        """Return the points of `experts` by key without the number of rows; each list is sorted by that number."""
        curves: dict[ExpertKey, list[ExpertRow]] = {}
        for row in sorted(self.experts.rows, key=lambda row: row.key):
            curves.setdefault(row.key.without("rows"), []).append(row)
        return curves

    @property
    def problem(self) -> str | None:
        """Return a defect, such as a duplicate point or activations that shrink as the batch grows, or None."""
        if (rows := len(self.process)) != 1:
            return f"table process has {rows} rows, not 1"
        if (rows := len(self.exchange)) > 1:
            return f"table exchange has {rows} rows, not 1"
        for name, curves in (("layers", self.curves), ("rests", self.rest_curves), ("experts", self.expert_curves)):
            for points in curves.values():
                if (problem := _curve_problem(points)) is not None:
                    return f"table {name}: {problem}"
        return None


def _curves(table: Table[LayerRow]) -> dict[LayerKey, list[LayerRow]]:
    return rows_by_key(sorted(table.rows, key=lambda row: row.key), "micro_batch_size")


def _curve_problem(points: Sequence[LayerRow | ExpertRow]) -> str | None:
    """Return a defect of points sorted by size, a duplicate or activations that shrink; None if there is none."""
    for less, more in pairwise(points):
        if less.key == more.key:
            return f"{more.key} is there twice"
    for less, more in pairwise(row for row in points if row.activation_source is not Source.ABSENT):
        if more.activation_bytes < less.activation_bytes:
            fall = f"from {less.activation_bytes} to {more.activation_bytes}"
            return f"{more.key}: activation_bytes fall {fall} as the micro-batch grows"
    return None


def write_model_profile(path: Path, profile: ModelProfile) -> None:
    """Write the profile; the same measurements give the same bytes."""
    write_profile(path, profile)


def read_model_profile(path: Path) -> ModelProfile:
    """Read a model profile; raise BadInput if it is invalid."""
    return read_profile(path, ModelProfile)
