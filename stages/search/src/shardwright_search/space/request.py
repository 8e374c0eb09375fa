"""What to search: the batch, the memory budget, the space of plans, and what is best."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from shardwright_formats.io import Document, Value
from shardwright_formats.types.limits import Count, Gib, Name
from shardwright_formats.types.plan import Attention, GradientReduction, Precision, Schedule
from shardwright_formats.types.strategy import DataParallel, Recompute, SequenceParallel
from shardwright_search.cost_model.time_model import TimeModel

_MAX_BATCH_SIZES = 10_000
"""Each is searched."""
Counts = Annotated[tuple[Count, ...], Meta(min_length=1)]


class Space(StrEnum):
    """Named spaces of plans, which further options narrow down."""

    FULL = "full"
    """Every dimension, and a strategy for each layer."""
    DP = "dp"
    """Plain data parallelism over all devices."""
    ZERO = "zero"
    """ZeRO-2 and ZeRO-3 over all devices."""
    TP = "tp"
    """Tensor parallelism over all devices."""
    PP = "pp"
    """One device a pipeline stage."""
    DP_TP = "dp+tp"
    """Plain data and tensor parallelism, no pipeline."""
    DP_PP = "dp+pp"
    """Plain data and pipeline parallelism."""
    THREE_D = "3d"
    """Plain data, tensor and pipeline parallelism, one strategy for all layers."""
    FASOP = "fasop"
    """The same with tensor parallelism up to 4 and no sequence parallelism; the command `fasop` has its own table."""


class Dimension(StrEnum):
    """What a search can be told to leave out."""

    DATA_PARALLEL = "data_parallel"
    ZERO = "zero"
    TENSOR_PARALLEL = "tensor_parallel"
    SEQUENCE_PARALLEL = "sequence_parallel"
    PIPELINE_PARALLEL = "pipeline_parallel"
    RECOMPUTE = "recompute"


class Objective(StrEnum):
    """What is best."""

    SAMPLES_PER_S = "samples_per_s"
    """The most samples a second, over all batch sizes."""
    STEP_TIME = "step_time"
    """The shortest step, for a fixed batch size."""
    USD_PER_SAMPLE = "usd_per_sample"
    """The least price of a sample; on a given cluster the plan of the most samples a second."""


class BatchRange(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batch sizes from `min` to `max`, both included where `step` meets them."""

    min: Count
    """The smallest."""
    max: Count
    """The largest, if a step meets it."""
    step: Count
    """From one to the next."""


class StageWidths(StrEnum):
    """How many ranks pipeline stages may have."""

    EQUAL = "equal"
    """All have as many."""
    ANY = "any"
    """Any number each, as long as they have all devices together; each in one node, or of whole nodes."""


class OuterSpace(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the embedding or the head may be; null: as the layers may."""

    tp_sizes: Counts | None = None
    """Tensor-parallel degrees."""
    data_parallel: Annotated[tuple[DataParallel, ...], Meta(min_length=1)] | None = None
    """Kinds of data parallelism."""
    sequence_parallel: Annotated[tuple[SequenceParallel, ...], Meta(min_length=1)] | None = None
    """Kinds of sequence parallelism."""


class Robust(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scenarios that the plan shall be good in beside the profile as it is."""

    spreads: Annotated[float, Meta(ge=0, le=1e3)] = 2.0
    """Standard errors by which the layers' times, and intervals by which messages, may be longer."""
    slow_link: Annotated[float, Meta(ge=1, le=1e6)] = 2.0
    """Factor by which sends between pipeline stages, or collectives across nodes, may be slower."""


class SearchRequest(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A search file: everything that bounds the space of plans besides the model and the cluster."""

    FORMAT = "shardwright.search"

    name: Name
    """What the user calls it; the plan is named after it."""
    objective: Objective = Objective.SAMPLES_PER_S
    """What is best."""
    global_batch_size: Count | BatchRange
    """Samples of one optimizer step, or a range of sizes to choose from."""
    memory_gib: Gib | Annotated[dict[str, Gib], Meta(min_length=1)] | None = None
    """Budget of one device in GiB, or one for each node type; null: all of the device's memory."""
    reserve_gib: Annotated[float, Meta(ge=0, le=2**20)] = 0.0
    """What of the budget is left free, in GiB. The process's own memory, as profiled, is counted anyway."""
    num_microbatches: Counts | None = None
    """Null: every divisor of the batch."""
    space: Space = Space.FULL
    """A named space; the options below narrow it further."""
    disable: tuple[Dimension, ...] = ()
    """Dimensions to leave out."""
    fine_grained: bool = True
    """Whether each layer has a strategy of its own; else all share one."""
    pp_sizes: Counts | None = None
    """Null: every divisor of the number of devices that leaves each pipeline stage a layer; with any `stage_widths`
    every number that does, and with listed ones theirs."""
    max_pp_size: Count | None = None
    """The largest pipeline degree."""
    stage_widths: StageWidths | Annotated[tuple[Counts, ...], Meta(min_length=1)] = StageWidths.EQUAL
    """Ranks of the pipeline stages, first to last: all alike, any numbers, or a list such as [[6, 2], [4, 4]].

    Interleaved schedules, and plans with one strategy for all layers, have stages of equal width.
    """
    span_node_types: bool = False
    """Whether a pipeline stage may be on nodes of several types, whose slowest rank binds: on whole nodes, or, where
    stages are equally wide or listed, on all that is left of some types and a part of the next one."""
    tp_sizes: Counts | None = None
    """Null: every divisor of a pipeline stage's number of ranks that was profiled, on all devices of a mixed cluster;
    where `stage_widths` may be unequal those alone that divide the number of devices, all or a node type's."""
    max_tp_size: Count | None = None
    """The largest tensor-parallel degree."""
    max_dp_size: Count | None = None
    """The largest data-parallel degree."""
    tp_consecutive: Annotated[tuple[bool, ...], Meta(min_length=1)] = (True,)
    """Whether tensor-parallel groups are neighbouring ranks (true), strided ones (false), or either."""
    data_parallel: Annotated[tuple[DataParallel, ...], Meta(min_length=1)] = tuple(DataParallel)
    """Kinds of data parallelism."""
    shard_sizes: Counts | None = None
    """Data-parallel ranks that ZeRO may share the states out among, beside all of them; null: all of them only."""
    sequence_parallel: Annotated[tuple[SequenceParallel, ...], Meta(min_length=1)] = (
        SequenceParallel.NONE,
        SequenceParallel.MEGATRON,
    )
    """Kinds of sequence parallelism."""
    recompute: Annotated[tuple[Recompute, ...], Meta(min_length=1)] = (Recompute.NONE, Recompute.FULL)
    """Kinds of activation recomputation."""
    embedding: OuterSpace = OuterSpace()
    """What the embedding may be."""
    head: OuterSpace = OuterSpace()
    """What the head may be."""
    schedules: Annotated[tuple[Schedule, ...], Meta(min_length=1)] = (Schedule.ONE_F_ONE_B,)
    """Orders of the microbatches."""
    chunks_per_stage: Counts = (2,)
    """Layer ranges of a pipeline stage when the schedule is interleaved_1f1b."""
    precision: Precision = Precision()
    """The number formats."""
    attention: Attention = Attention.AUTO
    """The attention kernel."""
    compile: bool = False
    """Whether torch.compile compiles each layer; the profile must be of compiled layers, too."""
    gradient_reduction: GradientReduction = GradientReduction.DEFERRED
    """When gradients are reduced."""
    time_model: TimeModel = TimeModel.INTERPOLATE
    """How times are read off the profile."""
    megatron_gather_buffer: bool = False
    """Whether a gathered input of Megatron's sequence parallelism is counted all step long, for exported plans."""
    robust: Robust | None = None
    """Null: the plan that is best under the profile as it is."""

    def __post_init__(self) -> None:
        batch = self.global_batch_size
        if isinstance(batch, BatchRange) and batch.min > batch.max:
            raise ValueError(f"global_batch_size: min {batch.min} is above max {batch.max}")
        if isinstance(batch, BatchRange) and len(batch_sizes(self)) > _MAX_BATCH_SIZES:
            raise ValueError(f"global_batch_size: more than {_MAX_BATCH_SIZES} sizes: take a larger step")
        if isinstance(batch, BatchRange) and self.objective is Objective.STEP_TIME:
            raise ValueError("objective step_time needs one global_batch_size, not a range")


def batch_sizes(request: SearchRequest) -> Sequence[int]:
    """The batch sizes to choose from, ascending."""
    batch = request.global_batch_size
    return range(batch.min, batch.max + 1, batch.step) if isinstance(batch, BatchRange) else (batch,)
