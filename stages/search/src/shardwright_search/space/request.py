"""The request files of searches: the space and the objective, grids of searches, and nodes to rent."""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from shardwright.io import BadInput, Document, Removed, Value
from shardwright.models.context import Obstacle, context_obstacle, gpu_format, ring_obstacle
from shardwright.optimizers.registry import OPTIMIZERS
from shardwright.plan.offload import can_offload
from shardwright.types import Cluster, Model
from shardwright.types.limits import Count, Gib, Name, NonNegativeCount, NonNegativeNumber, Sha256, Share
from shardwright.types.plan import Attention, GradientReduction, OptimizerName, Precision, Schedule
from shardwright.types.strategy import (
    PARTS,
    RECOMPUTE_PARTS,
    ContextParallel,
    DataParallel,
    Offload,
    Recompute,
    RecomputeChoice,
    SequenceParallel,
)
from shardwright_search.cost_model.time_model import TimeModel

_MAX_BATCH_SIZES = 10_000
"""The most batch sizes of a range; each is searched."""
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
    """The space 3d with tensor parallelism up to 4, and no sequence parallelism."""


class Dimension(StrEnum):
    """A dimension that a search can leave out."""

    DATA_PARALLEL = "data_parallel"
    ZERO = "zero"
    TENSOR_PARALLEL = "tensor_parallel"
    SEQUENCE_PARALLEL = "sequence_parallel"
    CONTEXT_PARALLEL = "context_parallel"
    EXPERT_PARALLEL = "expert_parallel"
    PIPELINE_PARALLEL = "pipeline_parallel"
    RECOMPUTE = "recompute"


class Objective(StrEnum):
    """The number by which plans are compared."""

    SAMPLES_PER_S = "samples_per_s"
    """The most samples a second, over all batch sizes."""
    STEP_TIME = "step_time"
    """The shortest step, for a fixed batch size."""
    USD_PER_SAMPLE = "usd_per_sample"
    """The least price of a sample; on a given cluster this is the plan with the most samples a second."""


class BatchRange(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batch sizes from `min` to `max`, inclusive, in steps of `step`."""

    min: Count
    """The smallest."""
    max: Count
    """The largest, if whole steps lead to it."""
    step: Count
    """The difference between neighbouring sizes."""


class StageWidths(StrEnum):
    """How many ranks pipeline stages may have."""

    EQUAL = "equal"
    """An equal number each."""
    ANY = "any"
    """Any number each, all devices in total; each stage is in one node, or takes up whole nodes."""


class OuterSpace(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Strategies of the embedding or the head; null: as for the layers."""

    tp_sizes: Counts | None = None
    """Tensor-parallel degrees."""
    cp_sizes: Counts | None = None
    """Context-parallel degrees."""
    data_parallel: Annotated[tuple[DataParallel, ...], Meta(min_length=1)] | None = None
    """Kinds of data parallelism."""
    sequence_parallel: Annotated[tuple[SequenceParallel, ...], Meta(min_length=1)] | None = None
    """Kinds of sequence parallelism."""


class SearchRequest(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A search file: everything that bounds the space of plans besides the model and the cluster."""

    FORMAT = "shardwright.search"
    REMOVED: ClassVar[Mapping[str, Removed]] = {
        "robust": Removed("leave it out, and price plans with other profiles by `shardwright evaluate`")
    }

    name: Name
    """Name of the search; the plan is named after it."""
    objective: Objective = Objective.SAMPLES_PER_S
    """The number by which plans are compared."""
    global_batch_size: Count | BatchRange
    """Samples of one optimizer step, or a range of sizes to choose from."""
    memory_gib: Gib | Annotated[dict[str, Gib], Meta(min_length=1)] | None = None
    """Budget of one device in GiB, or one for each node type; null: all of the device's memory, or
    92 % of it if its profile is estimated and there is no `reserve_gib`.
    """
    reserve_gib: Annotated[float, Meta(ge=0, le=2**20)] = 0.0
    """The part of the budget that is left free, in GiB. The process's own memory, as profiled, is counted anyway."""
    num_microbatches: Counts | None = None
    """Numbers of microbatches; null: every divisor of the batch."""
    space: Space = Space.FULL
    """A named space; the options below narrow it further."""
    disable: tuple[Dimension, ...] = ()
    """Dimensions to leave out."""
    fine_grained: bool = True
    """Whether each layer has a strategy of its own; else all share one."""
    tolerance: Share = 0.0
    """The simplest plan within this share of the bound that no plan's time is below is taken; 0: the fastest plan."""
    pp_sizes: Counts | None = None
    """Pipeline degrees; null: every divisor of the number of devices that leaves each pipeline stage a layer; if
    `stage_widths` is any, every number that does; if it is a list, the numbers of stages in it."""
    max_pp_size: Count | None = None
    """The largest pipeline degree."""
    stage_widths: StageWidths | Annotated[tuple[Counts, ...], Meta(min_length=1)] = StageWidths.EQUAL
    """Ranks of the pipeline stages, first to last: all alike, any numbers, or a list such as [[6, 2], [4, 4]].

    Interleaved schedules, and plans with one strategy for all layers, have stages of equal width.
    """
    span_node_types: bool = False
    """Whether a pipeline stage may be on nodes of several types, as fast as its slowest rank: on whole nodes, or, if
    stages are equally wide or listed, on all that is left of some types and a part of the next one."""
    tp_sizes: Counts | None = None
    """Tensor-parallel degrees; null: every divisor of a pipeline stage's number of ranks that was profiled, on all
    devices of a mixed cluster; if `stage_widths` may be unequal, only those that divide the number of all devices or
    of a node type's devices."""
    max_tp_size: Count | None = None
    """The largest tensor-parallel degree."""
    cp_sizes: Counts = (1,)
    """Context-parallel degrees: numbers of ranks over which positions are split, also in attention. Each must divide
    the next larger one. Degrees above 1 need a profile of two lengths and micro-batch sizes."""
    context: Annotated[tuple[ContextParallel, ...], Meta(min_length=1)] = tuple(ContextParallel)
    """Ways in which positions attend to positions of other ranks, if a cp_size is above 1."""
    ep_sizes: tuple[Count, ...] = ()
    """Numbers of parts into which a layer's experts may be sharded, independently of the rest of the layer; none:
    experts are sharded as the rest. The profile must say what experts cost by themselves."""
    etp_sizes: Counts = (1,)
    """Numbers of neighbouring ranks over which the features of each expert may be split under expert parallelism."""
    expert_data_parallel: Annotated[tuple[DataParallel, ...], Meta(min_length=1)] | None = None
    """Kinds of data parallelism of experts under expert parallelism; null: the kinds in `data_parallel`."""
    max_dp_size: Count | None = None
    """The largest data-parallel degree."""
    tp_consecutive: Annotated[tuple[bool, ...], Meta(min_length=1)] = (True,)
    """Whether tensor-parallel groups are neighbouring ranks (true), strided ones (false), or either."""
    data_parallel: Annotated[tuple[DataParallel, ...], Meta(min_length=1)] = tuple(DataParallel)
    """Kinds of data parallelism."""
    shard_sizes: Counts | None = None
    """Numbers of data-parallel ranks over which ZeRO may shard states, in addition to all; null: only all of them."""
    sequence_parallel: Annotated[tuple[SequenceParallel, ...], Meta(min_length=1)] = (
        SequenceParallel.NONE,
        SequenceParallel.MEGATRON,
    )
    """Kinds of sequence parallelism."""
    recompute: RecomputeChoice = (Recompute.NONE, Recompute.FULL)
    """Kinds of activation recomputation; parts: none, selective, full, and every set of norms, activation functions
    and matrix products with latents."""
    offload: Annotated[tuple[Offload, ...], Meta(min_length=1)] = (Offload.NONE,)
    """States that a layer may keep in host memory; the cluster's node types need `host_memory_gib`, and
    `host_bytes_per_s` unless it was measured."""
    embedding: OuterSpace = OuterSpace()
    """Strategies of the embedding."""
    head: OuterSpace = OuterSpace()
    """Strategies of the head."""
    schedules: Annotated[tuple[Schedule, ...], Meta(min_length=1)] = (Schedule.ONE_F_ONE_B,)
    """Orders of the microbatches."""
    chunks_per_stage: Counts = (2,)
    """Layer ranges of a pipeline stage if the schedule is interleaved_1f1b."""
    precision: Precision = Precision()
    """The number formats."""
    optimizer: OptimizerName | Literal["any"] | Annotated[tuple[OptimizerName, ...], Meta(min_length=1)] = "adamw"
    """The optimizer; if several, or any, the one with the best plan is chosen."""
    attention: Attention = Attention.AUTO
    """The attention kernel."""
    compile: bool = False
    """Whether torch.compile compiles each layer; the profile must be measured with compiled layers, too."""
    loss_chunks: Count = 1
    """Number of chunks of a rank's positions for which logits and loss are computed one after another, and again in
    the backward pass."""
    gradient_reduction: GradientReduction = GradientReduction.DEFERRED
    """When gradients are reduced."""
    time_model: TimeModel = TimeModel.INTERPOLATE
    """How times are read off the profile."""
    megatron_gather_buffer: bool = False
    """Whether a gathered input of Megatron's sequence parallelism is counted all step long, for exported plans."""

    @property
    def optimizers(self) -> tuple[OptimizerName, ...]:
        """Return the optimizers to choose from, each once."""
        asked = get_args(OptimizerName) if self.optimizer == "any" else self.optimizer
        return (asked,) if isinstance(asked, str) else tuple(dict.fromkeys(asked))

    @property
    def offloads(self) -> bool:
        """Return whether anything may be in host memory."""
        return self.offload != (Offload.NONE,)

    @property
    def offloads_optimizer(self) -> bool:
        """Return whether optimizer states may be in host memory."""
        return any(kind not in (Offload.NONE, Offload.ACTIVATIONS) for kind in self.offload)

    def __post_init__(self) -> None:
        _check_degrees(self)
        if Offload.NONE not in self.offload:
            raise ValueError("offload: 'none' is missing: list it, too, because each layer chooses one of those listed")
        kinds = RECOMPUTE_PARTS if self.recompute == PARTS else self.recompute
        if self.compile and (sets := [kind for kind in kinds if kind.parts and kind is not Recompute.LIGHT]):
            raise ValueError(f"compile: recompute {sets[0]} frees results that compiled blocks do not show")
        batch = self.global_batch_size
        if not isinstance(batch, BatchRange):
            return
        if batch.min > batch.max:
            raise ValueError(f"global_batch_size: min {batch.min} is above max {batch.max}")
        if len(batch_sizes(self)) > _MAX_BATCH_SIZES:
            raise ValueError(f"global_batch_size: more than {_MAX_BATCH_SIZES} sizes: take a larger step")
        if self.objective is Objective.STEP_TIME:
            raise ValueError("objective step_time needs one global_batch_size, not a range")


def _check_degrees(request: SearchRequest) -> None:
    """Raise ValueError if context-parallel sizes of one plan's layers would not divide one another."""
    asked = (request.cp_sizes, request.embedding.cp_sizes or (), request.head.cp_sizes or ())
    sizes = sorted({size for listed in asked for size in listed})
    for less, more in pairwise(sizes):
        if more % less:
            raise ValueError(f"cp_sizes: {less} does not divide {more}, and layers of one plan may have both")


def of_each_optimizer(request: SearchRequest) -> tuple[SearchRequest, ...]:
    """Return one request for each optimizer that the request lists.

    If it lists several, offload is left out for optimizers that do not support it.
    """
    several = len(request.optimizers) > 1
    none = (Offload.NONE,)
    return tuple(
        msgspec.structs.replace(
            request, optimizer=name, offload=none if several and not can_offload(OPTIMIZERS[name]) else request.offload
        )
        for name in request.optimizers
    )


def batch_sizes(request: SearchRequest) -> Sequence[int]:
    """Return the batch sizes to choose from, ascending."""
    batch = request.global_batch_size
    return range(batch.min, batch.max + 1, batch.step) if isinstance(batch, BatchRange) else (batch,)


class Grid(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A grid file: searches that share a model, a cluster and profiles."""

    FORMAT = "shardwright.grid"
    REMOVED = SearchRequest.REMOVED

    searches: Annotated[tuple[SearchRequest, ...], Meta(min_length=1, max_length=100_000)]
    """The cells, each with a name of its own."""

    def __post_init__(self) -> None:
        names = [search.name for search in self.searches]
        if len(set(names)) < len(names):
            twice = next(name for place, name in enumerate(names) if name in names[:place])
            raise ValueError(f"searches: two are named {twice!r}")


class CellAnswer(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to one cell of a grid."""

    name: str
    """Name of the cell's search."""
    key: Sha256
    """SHA-256 of all that the answer depends on; KEY.json and KEY.prediction.json are the plan, if there is one."""
    reason: str | None
    """Why there is no plan; null if there is one."""


class GridAnswers(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answers to all cells of a grid, in its order."""

    FORMAT = "shardwright.grid_answers"

    cells: tuple[CellAnswer, ...]
    """The answers, one for each search."""


class Offer(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of one type that can be rented."""

    usd_per_hour: NonNegativeNumber | None = None
    """Price of one node; null: the price in the cluster file."""
    counts: Annotated[tuple[NonNegativeCount, ...], Meta(min_length=1)] | None = None
    """Numbers of nodes that can be rented; null: any number from 0 to the number in the cluster file."""


class Offers(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An offers file: numbers and prices of nodes that can be rented, in addition to the cluster file."""

    FORMAT = "shardwright.offers"
    REMOVED: ClassVar[Mapping[str, Removed]] = {
        "interruptions_per_hour": Removed("leave it out, and add what interruptions cost to usd_per_hour"),
        "checkpoint_s": Removed("", ignored=None),
        "restart_s": Removed("", ignored=None),
    }

    node_types: dict[str, Offer] = msgspec.field(default_factory=dict)
    """Offers by name of the cluster's node types; one that is left out is as the cluster file has it."""


# The context parallelism of a request that the runtime supports for a model.


_OUTER = "embedding", "head"


def runnable(request: SearchRequest, model: Model, cluster: Cluster, file: Path) -> SearchRequest:
    """Return a request without context parallelism that the runtime does not support for a model.

    Raises BadInput, naming the search file, if that leaves nothing.
    """
    obstacle = _obstacle(request, model, cluster)
    ring = ring_obstacle(model, request.attention)
    if ring is not None and ContextParallel.GATHER in request.context:
        request = replace(request, context=(ContextParallel.GATHER,))
    elif ring is not None:
        obstacle = obstacle or ring
    return request if obstacle is None else _whole(request, file, obstacle)


def left_out(request: SearchRequest, model: Model, cluster: Cluster) -> Iterator[str]:
    """Yield the requested options that the runtime does not support for a model, one line each."""
    if max(_sizes(request)) == 1:
        return
    obstacle = _obstacle(request, model, cluster)
    if obstacle is not None:
        yield f"no cp_size above 1: {obstacle.problem}"
    elif ContextParallel.RING in request.context and (ring := ring_obstacle(model, request.attention)) is not None:
        yield f"no context ring: {ring.problem}"


def _obstacle(request: SearchRequest, model: Model, cluster: Cluster) -> Obstacle | None:
    return context_obstacle(model, request.attention, request.compile, gpu_format(request.precision, cluster))


def _whole(request: SearchRequest, file: Path, obstacle: Obstacle) -> SearchRequest:
    """Return a request in which no layer uses context parallelism."""
    if 1 not in request.cp_sizes or any(1 not in (_outer_sizes(request, name) or (1,)) for name in _OUTER):
        raise BadInput(file, f"cp_sizes: {obstacle.problem}", f"list 1, or {obstacle.remedy}")
    outer = {name: replace(getattr(request, name), cp_sizes=None) for name in _OUTER}
    return replace(request, cp_sizes=(1,), **outer)


def _outer_sizes(request: SearchRequest, name: str) -> tuple[int, ...] | None:
    sizes: tuple[int, ...] | None = getattr(request, name).cp_sizes
    return sizes


def _sizes(request: SearchRequest) -> Iterator[int]:
    for sizes in (request.cp_sizes, *(_outer_sizes(request, name) for name in _OUTER)):
        yield from sizes or ()
