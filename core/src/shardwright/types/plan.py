"""A plan: all decisions on how to train a model on a cluster, in one self-contained file."""

from collections import Counter
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Final, Literal, assert_never

from msgspec import UNSET, Meta, UnsetType, to_builtins

from shardwright.io import Document, Value, sha256_of_value
from shardwright.types.cluster import Cluster
from shardwright.types.limits import (
    Bytes,
    Count,
    Name,
    NonNegativeCount,
    PositiveSeconds,
    Rank,
    Ranks,
    Samples,
    Seconds,
    SeveralRanks,
)
from shardwright.types.model import EMBEDDING, HEAD, LayerType, Model
from shardwright.types.strategy import ContextParallel, LayerStrategy, Recompute, SequenceParallel, Strategy

# Probes of a layer's experts by themselves, and their measurements.


_Times = Annotated[tuple[Seconds, ...], Meta(min_length=1)]


class ExpertProbe(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's experts, computed by themselves for a number of rows, the same for each expert."""

    type: str
    """The layer's type in the model description of the plans in the same file."""
    experts: Count
    """Number of the rank's experts."""
    etp_size: Ranks
    """Number of ranks over which each expert's features are sharded."""
    recompute: Recompute
    """Activations of the layer that are computed again in the backward pass."""
    rows: Count
    """Number of rows over all of the rank's experts."""


class ExpertMeasurement(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurement of an expert probe on one rank, while all ranks ran the probe."""

    probe: ExpertProbe
    """The probe that was run."""
    forward_s: _Times
    """Time of each forward pass."""
    backward_s: _Times
    """Time of each backward pass."""
    activation_bytes: Bytes
    """Memory that is resident from the forward to the backward pass."""
    workspace_bytes: Bytes
    """The most memory that was resident during a pass beyond `activation_bytes`."""
    reference_s: PositiveSeconds
    """Time of the reference workload right before the probe."""


# Probes on one device whose samples represent one rank's part of longer samples, together with the keys of all parts.


class ContextProbe(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A probe whose samples represent one rank's part of longer samples (context parallelism)."""

    plan: NonNegativeCount
    """Index of the plan in `plans`."""
    cp_size: SeveralRanks
    """Number of ranks over which a sample would be split; the plan's only rank represents one of them, and has the keys
    of all of them."""


class Attention(StrEnum):
    """Attention kernels."""

    AUTO = "auto"
    """The fastest kernel that the device and the installation support."""
    SDPA = "sdpa"
    """PyTorch's scaled_dot_product_attention; on a GPU with the fused kernel that PyTorch prefers, on Hopper
    cuDNN's."""
    SDPA_MATH = "sdpa_math"
    """PyTorch's attention by matrix products, which keeps all scores and is slow on a GPU."""
    SDPA_FLASH = "sdpa_flash"
    """PyTorch's own FlashAttention-2 only, which is what context parallelism uses in 16 bits."""
    SDPA_EFFICIENT = "sdpa_efficient"
    """PyTorch's memory-efficient kernel only; on GPUs only."""
    SDPA_CUDNN = "sdpa_cudnn"
    """cuDNN's kernel only; on GPUs only, and not across ranks."""
    FLASH_ATTENTION_2 = "flash_attention_2"
    """The flash-attn package (Dao 2023)."""
    EAGER = "eager"
    """Plain matrix products and a softmax."""


FUSED_SDPA = (Attention.SDPA, Attention.SDPA_FLASH, Attention.SDPA_EFFICIENT, Attention.SDPA_CUDNN)
"""PyTorch's attention kernels that do not keep the scores."""


DType = Literal["float64", "float32", "bfloat16", "float16"]
FP8: Final = "fp8"
NVFP4: Final = "nvfp4"
NARROW_BITS = {FP8: 8.0, NVFP4: 4.5}
"""Bits per element in the formats of matrix products with a block's weights, which leave everything else in bfloat16.
These formats are estimated, not run. 16 elements of NVFP4 share a scale of 8 bits (NVIDIA 2025, arXiv 2509.25149)."""
ComputeType = Literal["float64", "float32", "bfloat16", "float16", "fp8", "nvfp4"]
OptimizerName = Literal["adamw", "adamw-bf16", "adamw-8bit", "sgd", "lion", "muon"]
Base = Literal["8bit", "4bit"]
BASE_BITS = {"8bit": 8.0, "4bit": 4.127}
"""Bits per weight: 8 for LLM.int8 (Dettmers et al. 2022), with one scale per row; 4.127 for NF4, whose quantized
constants add 0.127 bits (Dettmers et al. 2023, QLoRA, section 3)."""


class Schedule(StrEnum):
    """The order in which a pipeline stage works through its microbatches."""

    interleaves: bool
    """True if a pipeline stage may hold several layer ranges."""
    splits: bool
    """True if backward passes leave the gradients of matrices to separate passes."""
    turns: bool
    """True if each stage holds two layer ranges, and a micro-batch goes through the second ones from the last pipeline
    stage back to the first."""

    def __new__(cls, name: str, interleaves: bool = False, splits: bool = False, turns: bool = False) -> "Schedule":
        """Create a member whose value is the schedule's name in files."""
        member = str.__new__(cls, name)
        member._value_, member.interleaves, member.splits, member.turns = name, interleaves, splits, turns
        return member

    def way(self, num_stages: int, num_chunks: int) -> tuple[tuple[int, int], ...]:
        """Return pipeline stage and chunk of every layer range, in the order in which a micro-batch goes through them.

        A chunk is the index of a range on its stage.
        """
        return _way(num_stages, num_chunks, self.turns)

    GPIPE = "gpipe"
    """All forward passes of a step, then all backward passes."""
    ONE_F_ONE_B = "1f1b"
    """One forward and one backward pass alternately, once the pipeline is full."""
    INTERLEAVED_1F1B = "interleaved_1f1b", True
    """1F1B with several layer ranges on every pipeline stage."""
    ZERO_BUBBLE = "zero_bubble", False, True
    """1F1B with split backward passes: gradients of matrices are computed later, when a stage would otherwise wait."""
    ZERO_BUBBLE_H2 = "zero_bubble_h2", False, True
    """`zero_bubble` with nearly twice as many micro-batches in flight, which also fill the pipeline's warm-up."""
    INTERLEAVED_ZERO_BUBBLE = "interleaved_zero_bubble", True, True
    """`interleaved_1f1b` with split backward passes."""
    ZERO_BUBBLE_V = "zero_bubble_v", True, True, True
    """Split backward passes and two layer ranges per stage in the form of a V, with the memory of 1F1B's first
    stage."""
    V_HALF = "v_half", True, True, True
    """`zero_bubble_v` with about half of its activations."""
    V_MIN = "v_min", True, True, True
    """`zero_bubble_v` with about a third of its activations."""


@lru_cache(maxsize=256)
def _way(num_stages: int, num_chunks: int, turns: bool) -> tuple[tuple[int, int], ...]:
    stages = range(num_stages)
    turned = (stages[::-1] if turns and chunk % 2 else stages for chunk in range(num_chunks))
    return tuple((stage, chunk) for chunk, ordered in enumerate(turned) for stage in ordered)


class GradientReduction(StrEnum):
    """When gradients are reduced: once a step, or after every micro-batch."""

    DEFERRED = "deferred"
    """Once a step, in the last microbatch's backward pass."""
    EVERY_MICROBATCH = "every_microbatch"
    """Gradients are reduced in every backward pass."""


class Precision(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number formats of stored parameters, of forward and backward, and of gradient reduction."""

    parameters: DType = "float32"
    """Number format of the stored parameters and the optimizer state."""
    compute: ComputeType = "float32"
    """Number format of the forward and backward pass. fp8 and nvfp4 are estimated, not run; they are formats of the
    matrix products with the weights of blocks: everything else is bfloat16."""
    reduce: DType = "float32"
    """Number format of accumulated gradients and their reduction."""
    tf32: bool = False
    """Whether the factors of float32 matrix products may be rounded to TF32 (10 bits of mantissa) on a GPU."""
    base: Base | UnsetType = UNSET
    """Format of the frozen matrices of blocks, which are converted to the compute format for each matrix product;
    estimated, not run. If omitted, they have the format of stored parameters."""

    def __post_init__(self) -> None:
        if self.tf32 and self.compute != "float32":
            raise ValueError(f"tf32 applies to products in float32, but compute is {self.compute}: leave it out")

    @property
    def text(self) -> str:
        """Return the number formats as `parameters/compute/reduce`, then ` tf32` and ` base ...` if these are set.

        Profiles are labelled by this text.
        """
        base = "" if self.base is UNSET else f" base {self.base}"
        return f"{self.parameters}/{self.compute}/{self.reduce}" + (" tf32" if self.tf32 else "") + base


def profiled_as(precision: Precision, compile: bool) -> str:
    """Return the label of profiles that apply to a plan's layers: number formats and compilation."""
    return precision.text + (" compiled" if compile else "")


ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, FP8: 2, NVFP4: 2}
"""Bytes per element of a tensor in each number format; tensors around matrix products in fp8 and nvfp4 are bfloat16."""


class PipelineStage(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pipeline stage: its ranks, and the layers that they hold."""

    ranks: Annotated[tuple[Rank, ...], Meta(min_length=1)]
    """Numbers of the stage's ranks in the cluster, ascending; strategies split layers over them in this order."""
    layers: Annotated[tuple[tuple[NonNegativeCount, NonNegativeCount], ...], Meta(min_length=1)]
    """Half-open ranges of layer numbers; several if the schedule is interleaved."""


_ADDED = {"cp_size": 1, "context": ContextParallel.GATHER.value}
"""Fields that strategies in plans of earlier versions do not have, with the values that these plans imply."""


def _as_before(strategies: object) -> object:
    """Return strategies, as in JSON, without the fields of `_ADDED` that have the implied values."""
    if isinstance(strategies, list | tuple):
        return [_as_before(strategy) for strategy in strategies]
    assert isinstance(strategies, dict)
    return {name: value for name, value in strategies.items() if _ADDED.get(name) != value}


def misfit(model: Model, type_name: str, strategy: Strategy) -> str | None:
    """Return why a layer type cannot be sharded by a strategy, or None if it can."""
    kind = model.types[type_name]
    match strategy.sequence_parallel:
        case SequenceParallel.NONE:
            splits, divided = False, kind.tp_must_divide
        case SequenceParallel.MEGATRON:
            splits, divided = True, kind.tp_must_divide
        case SequenceParallel.ULYSSES:
            splits, divided = True, kind.ulysses_must_divide
        case unknown:
            assert_never(unknown)
    odd = (f"{name} {length}" for name, length in divided.items() if length % strategy.tp_size)
    wrong = next((f"tp_size {strategy.tp_size} does not divide {text}" for text in odd), None)
    return _misfit_of_sequence(model, kind, strategy, splits) or wrong or _misfit_of_experts(kind, strategy)


def _misfit_of_sequence(model: Model, kind: LayerType, strategy: Strategy, splits: bool) -> str | None:
    """Return why a layer type's positions cannot be split over ranks, or None if they can.

    `splits`: whether tensor-parallel ranks split them, too.
    """
    lengths = (model.sequence_length, *(tensor.sequence_length for tensor in kind.outputs))
    sequences = [*(kind.sequence_must_divide or {}).items(), *(("the sequence length", length) for length in lengths)]
    degrees = {"cp_size": strategy.cp_size, "tp_size": strategy.tp_size if splits else 1}
    named = " x ".join(f"{name} {size}" for name, size in degrees.items() if size > 1)
    parts = [(named, degrees["cp_size"] * degrees["tp_size"], *each) for each in sequences]
    if strategy.cp_size > 1:
        # Each rank has two chunks of the positions: one from the front and one from the back.
        parts.append((f"2 x cp_size {strategy.cp_size}", 2 * strategy.cp_size, "the sequence length", lengths[0]))
        parts += [(f"cp_size {strategy.cp_size}", strategy.cp_size, "labels", kind.labels)]
    odd = (f"{degree} does not divide {name} {length}" for degree, size, name, length in parts if length % size)
    return next(odd, None) or _misfit_of_context(kind, strategy)


def _misfit_of_context(kind: LayerType, strategy: Strategy) -> str | None:
    if not isinstance(strategy, LayerStrategy) or strategy.context is not ContextParallel.RING:
        return None
    has = {"windows": kind.window is not None, "ALiBi": kind.alibi_heads > 0, "sinks": kind.has_sinks}
    unknown = next((name for name, is_there in has.items() if is_there), None)
    return None if unknown is None else f"context ring does not support {unknown}: use gather"


def _misfit_of_experts(kind: LayerType, strategy: Strategy) -> str | None:
    if not isinstance(strategy, LayerStrategy) or strategy.experts is UNSET:
        return None
    if kind.experts is UNSET:
        return "it has no experts to shard"
    (number, features), shared = (kind.experts.number, kind.experts.features), strategy.experts
    if number % shared.ep_size:
        return f"ep_size {shared.ep_size} does not divide its {number} experts"
    if features % shared.etp_size:
        return f"etp_size {shared.etp_size} does not divide the {features} features of its experts"
    return None


def _misfit_of_placement(groups: tuple[tuple[int, ...], ...], kind: LayerType, layer: LayerStrategy) -> str | None:
    """Return why `groups` cannot be the experts of each group of ranks, or None if they can."""
    if kind.experts is UNSET or layer.experts is UNSET or layer.experts.ep_size == 1:
        return "its layer has no ep_size above 1: leave it empty"
    number, ep_size = kind.experts.number, layer.experts.ep_size
    placed = [expert for group in groups for expert in group]
    if len(groups) != ep_size or len({len(group) for group in groups}) > 1 or sorted(placed) != list(range(number)):
        return f"it is not each of the {number} experts once, in {ep_size} groups of equal size"
    return "it is the order without it: leave it empty" if placed == sorted(placed) else None


class Plan(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A way to train a model on a cluster; self-contained: it can be trained, exported, or predicted again."""

    FORMAT = "shardwright.plan"

    name: Name
    """Name that the user gives it."""
    model: Model
    """The complete model description."""
    cluster: Cluster
    """The devices, each of which is a rank of the plan."""
    global_batch_size: Samples
    """Samples of one optimizer step, over all ranks and microbatches."""
    num_microbatches: Samples
    """Number of equal parts into which a step's samples are split for the pipeline."""
    schedule: Schedule
    """The order of forward and backward passes."""
    gradient_reduction: GradientReduction = GradientReduction.DEFERRED
    """When gradients are reduced."""
    precision: Precision = Precision()
    """The number formats."""
    optimizer: OptimizerName = "adamw"
    """The optimizer; its settings belong to the run."""
    attention: Attention = Attention.AUTO
    """The attention kernel."""
    fused: tuple[Literal["rotary", "norm", "cross_entropy"], ...] = ()
    """Modules that kernels of the flash-attn package compute: rotary embeddings, norms, the loss."""
    compile: bool = False
    """Use of torch.compile for each block; embedding and head are not compiled."""
    loss_chunks: Count | UnsetType = UNSET
    """Number of parts in which a rank's positions go through the head's matrix product and the loss, so that the logits
    of all positions never exist at once; the backward pass computes both again. 1 if omitted."""
    stages: Annotated[tuple[PipelineStage, ...], Meta(min_length=1)]
    """The pipeline stages, first to last."""
    embedding: Strategy
    """Strategy of the embedding on the first pipeline stage."""
    head: Strategy
    """Strategy of the head on the pipeline stage of the last layer range."""
    layers: tuple[LayerStrategy, ...]
    """Strategy of each layer on its pipeline stage; one entry per layer of the model, in order."""
    expert_placement: tuple[tuple[tuple[NonNegativeCount, ...], ...], ...] | UnsetType = UNSET
    """For each layer of the model, the numbers of the experts that each of its `ep_size` groups of ranks holds. If a
    layer's entry is empty, or the field is omitted, each group holds neighbouring experts."""

    def __post_init__(self) -> None:
        self._check_ranks()
        self._check_layer_ranges()
        self._check_placement()
        if self.global_batch_size % self.num_microbatches:
            raise ValueError(
                f"num_microbatches {self.num_microbatches} does not divide global_batch_size {self.global_batch_size}"
            )
        if len(set(self.fused)) != len(self.fused):
            raise ValueError(f"fused lists an operation twice: {', '.join(self.fused)}")
        fitting = set[tuple[int, str, Strategy]]()
        for where, type_name, strategy in self._strategies():
            ranks = len(self.stages[self.stage_of(where)].ranks)
            if (ranks, type_name, strategy) in fitting:
                continue
            if strategy.tp_size * strategy.cp_size * strategy.dp_size != ranks:
                context = f"cp_size {strategy.cp_size} x " if strategy.cp_size > 1 else ""
                raise ValueError(
                    f"{where}: tp_size {strategy.tp_size} x {context}dp_size {strategy.dp_size} "
                    f"is not the {ranks} ranks of its pipeline stage"
                )
            if self.microbatch_samples % strategy.dp_size:
                raise ValueError(
                    f"{where}: dp_size {strategy.dp_size} does not divide "
                    f"the {self.microbatch_samples} samples of a microbatch"
                )
            if (problem := misfit(self.model, type_name, strategy)) is not None:
                raise ValueError(f"{where}: {problem}")
            fitting.add((ranks, type_name, strategy))

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return sum(len(stage.ranks) for stage in self.stages)

    @property
    def microbatch_samples(self) -> int:
        """Return the samples of one microbatch, over all data-parallel ranks."""
        return self.global_batch_size // self.num_microbatches

    @property
    def sha256(self) -> str:
        """Return the hash of the whole plan as a document, including names and prices."""
        return sha256_of_value(self)

    @property
    def executed_sha256(self) -> str:
        """Return the hash of what a run of the plan executes.

        It excludes the plan's name, the cluster (its prices, memory and nodes), and what the model description contains
        beyond family, configuration, sequence length and layers. A strategy's field that plans of earlier versions do
        not have is included only if its value differs from the one that these plans imply.
        """
        executed = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("name", "cluster")}
        model = self.model
        executed = {name: value for name, value in executed.items() if value is not UNSET}
        executed |= {name: _as_before(to_builtins(executed[name])) for name in ("embedding", "head", "layers")}
        return sha256_of_value(executed | {"model": [model.family, model.config, model.sequence_length, model.layers]})

    @property
    def way(self) -> tuple[tuple[int, int], ...]:
        """Return pipeline stage and chunk of every layer range, in the order in which a micro-batch goes through them.

        A chunk is the index of a range in its stage's `layers`.
        """
        return self.schedule.way(len(self.stages), len(self.stages[0].layers))

    def stage_of_rank(self, rank: int) -> int:
        """Return the pipeline stage that a rank is part of."""
        return next(i for i, stage in enumerate(self.stages) if rank in stage.ranks)

    def stage_of(self, where: str) -> int:
        """Return the pipeline stage that holds `embedding`, `head` or `layers[i]`."""
        if where in (EMBEDDING, HEAD):
            stage, _ = self.way[0 if where == EMBEDDING else -1]
            return stage
        layer = int(where[len("layers[") : -1])
        return next(i for i, stage in enumerate(self.stages) if any(low <= layer < high for low, high in stage.layers))

    def _strategies(self) -> list[tuple[str, str, Strategy]]:
        blocks = [(f"layers[{i}]", layer.type, layer) for i, layer in enumerate(self.layers)]
        return [(EMBEDDING, EMBEDDING, self.embedding), *blocks, (HEAD, HEAD, self.head)]

    def _check_ranks(self) -> None:
        used = Counter(rank for stage in self.stages for rank in stage.ranks)
        if (devices := self.cluster.num_devices) != used.total():
            raise ValueError(f"the stages use {used.total()} ranks, the cluster has {devices} devices")
        if sorted(used) != list(range(devices)):
            raise ValueError("the stages must use each of the cluster's ranks exactly once")
        for i, stage in enumerate(self.stages):
            if list(stage.ranks) != sorted(stage.ranks):
                raise ValueError(f"stages[{i}]: its ranks are not in ascending order")

    def _check_layer_ranges(self) -> None:
        expected = self.model.layers
        if len(self.layers) != len(expected):
            raise ValueError(f"{len(self.layers)} layer strategies for a model of {len(expected)} layers")
        for i, (layer, type_name) in enumerate(zip(self.layers, expected, strict=True)):
            if layer.type != type_name:
                raise ValueError(f"layers[{i}]: type {layer.type!r}, the model has {type_name!r} there")
        chunks = {len(stage.layers) for stage in self.stages}
        if chunks != {1} and not self.schedule.interleaves:
            raise ValueError(f"several layer ranges in a stage need an interleaved schedule, not {self.schedule}")
        if chunks != {1} and len(self.stages) == 1:
            raise ValueError("several layer ranges need several pipeline stages")
        if len(chunks) != 1:
            raise ValueError("every pipeline stage must have the same number of layer ranges")
        if self.schedule.turns and chunks != {2}:
            raise ValueError(f"the schedule {self.schedule} needs several pipeline stages of two layer ranges each")
        position = 0
        for i, (stage, chunk) in enumerate(self.way):
            low, high = self.stages[stage].layers[chunk]
            if low != position or high < low:
                raise ValueError(f"layer range [{low}, {high}] does not continue at layer {position}")
            if low == high and i not in (0, len(self.way) - 1):
                self._check_empty(i, low)
            position = high
        if position != len(expected):
            raise ValueError(f"the pipeline stages hold {position} of {len(expected)} layers")

    def _check_placement(self) -> None:
        if self.expert_placement is UNSET:
            return
        if (entries := len(self.expert_placement)) != len(self.layers):
            raise ValueError(f"{entries} entries of expert_placement for a model of {len(self.layers)} layers")
        if not any(self.expert_placement):
            raise ValueError("expert_placement places no experts: leave it out")
        for i, (groups, layer) in enumerate(zip(self.expert_placement, self.layers, strict=True)):
            if groups and (problem := _misfit_of_placement(groups, self.model.types[layer.type], layer)) is not None:
                raise ValueError(f"expert_placement[{i}]: {problem}")

    def _check_empty(self, number: int, layer: int) -> None:
        """Raise ValueError if an empty layer range is not allowed: one without blocks, embedding and head.

        `number`: index of the range in `way`, `layer`: where it begins and ends. The stage must hold other layers. As
        the range passes its input on unchanged, its stage must have as many ranks as the stage before.
        """
        (index, _), (previous, _) = self.way[number], self.way[number - 1]
        where, stage = f"stages[{index}]: layer range [{layer}, {layer}]", self.stages[index]
        outer = self.stage_of(EMBEDDING), self.stage_of(HEAD)
        if index not in outer and all(low == high for low, high in stage.layers):
            raise ValueError(f"{where} is empty: only a stage with the embedding or the head may have no other layers")
        before = len(self.stages[previous].ranks)
        if len(stage.ranks) != before:
            problem = f"{where} is empty: its stage needs as many ranks as the stage before"
            raise ValueError(f"{problem}, {before}, not {len(stage.ranks)}")


class Plans(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several plans in one file, such as the probes that a model profile is fitted to."""

    FORMAT = "shardwright.plans"
    VERSION = 2

    plans: Annotated[tuple[Plan, ...], Meta(min_length=1)]
    """The plans, in the order in which they are to be run."""
    in_turns: tuple[Annotated[tuple[NonNegativeCount, ...], Meta(min_length=2)], ...] = ()
    """Groups of indices of plans whose times are subtracted, the reference plan first; they are stepped alternately, so
    that a slow moment of the machine affects all of them."""
    experts: tuple[ExpertProbe, ...] | UnsetType = UNSET
    """Probes of the model's experts in isolation, to be measured in addition; omitted if there are none."""
    context: tuple[ContextProbe, ...] | UnsetType = UNSET
    """Plans whose samples represent parts of longer samples; omitted if there are none."""

    def __post_init__(self) -> None:
        places = [place for group in self.in_turns for place in group]
        if len(set(places)) != len(places) or max(places, default=0) >= len(self.plans):
            raise ValueError(f"in_turns must list numbers below {len(self.plans)}, each once at most: {places}")
        shares = [probe.plan for probe in self.context or ()]
        if len(set(shares)) != len(shares) or max(shares, default=0) >= len(self.plans):
            raise ValueError(f"context must list numbers below {len(self.plans)}, each once at most: {shares}")
        for group in self.in_turns:
            built = {(p.world_size, p.precision, p.attention) for p in (self.plans[place] for place in group)}
            if len(built) > 1:
                raise ValueError(f"in_turns: plans {list(group)} differ in world size, precision or attention")
