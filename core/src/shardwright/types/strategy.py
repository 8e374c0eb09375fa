"""Strategies: the sharding of one layer over the ranks of its pipeline stage."""

from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, UnsetType

from shardwright.io import Value
from shardwright.types.limits import Ranks, SomeRanks


class DataParallel(StrEnum):
    """Kinds of data parallelism: which states of a layer are sharded over its data-parallel ranks."""

    DDP = "ddp"
    """Nothing is sharded: every rank holds parameters, gradients and optimizer state completely."""
    ZERO2 = "zero2"
    """Gradients and optimizer state are sharded; parameters are gathered once a step."""
    ZERO3 = "zero3"
    """Parameters are sharded too; they are gathered in the forward pass and again in the backward pass."""


class SequenceParallel(StrEnum):
    """Kinds of sequence parallelism: whether and how the ranks of a tensor-parallel group split the sequence."""

    NONE = "none"
    """Every rank of the group holds the whole sequence."""
    MEGATRON = "megatron"
    """Between the matrix products each rank holds 1/tp_size of the sequence (Korthikanti et al. 2022)."""
    ULYSSES = "ulysses"
    """The sequence is split everywhere except in attention, where heads are split instead (Jacobs et al. 2023)."""


class ContextParallel(StrEnum):
    """How the positions of one rank attend to positions of other ranks of its context-parallel group."""

    GATHER = "gather"
    """Each rank gathers the keys and values of all ranks (Grattafiori et al. 2024)."""
    RING = "ring"
    """Keys and values are passed around the ranks, and each rank attends to the ones that it currently has (Liu et al.
    2023)."""


class Recompute(StrEnum):
    """Choices of which activations of a layer are recomputed in its backward pass."""

    NONE = "none"
    """No activations are recomputed: all are kept."""
    FULL = "full"
    """Every activation is recomputed: only the layer's input is kept."""
    ATTENTION = "attention"
    """Activations of the attention part are recomputed."""
    MLP = "mlp"
    """Activations of the feed-forward part are recomputed."""
    SELECTIVE = "selective"
    """Activations other than results of matrix products and of attention are recomputed (Korthikanti et al. 2022)."""
    NORMS = "norms"
    """Only results of norms are recomputed: the operations that read them do not keep them."""
    ACTIVATIONS = "activations"
    """Results of activation functions and their gates are recomputed, also in experts."""
    LATENTS = "latents"
    """Queries, keys and values are recomputed from attention's latents, in models that have them (MLA)."""
    NORMS_ACTIVATIONS = "norms+activations"
    """Norms and activation functions, as above."""
    NORMS_LATENTS = "norms+latents"
    """Norms and latents, as above."""
    ACTIVATIONS_LATENTS = "activations+latents"
    """Activation functions and latents, as above."""
    NORMS_ACTIVATIONS_LATENTS = "norms+activations+latents"
    """Norms, activation functions and latents, as above."""
    LIGHT = "light"
    """Results of norms, of experts' activation functions, and of matrix products with latents are recomputed, as by
    Megatron-LM's modules layernorm, moe_act and mla_up_proj."""
    ATTENTION_NORMS = "attention+norms"
    """Attention as a whole, and results of norms outside it."""
    ATTENTION_ACTIVATIONS = "attention+activations"
    """Attention as a whole, and results of activation functions outside it."""
    ATTENTION_NORMS_ACTIVATIONS = "attention+norms+activations"
    """Attention as a whole, and results of norms and activation functions outside it."""
    MLP_NORMS = "mlp+norms"
    """The feed-forward part as a whole, and results of norms outside it."""
    MLP_LATENTS = "mlp+latents"
    """The feed-forward part as a whole, and results of matrix products with latents."""
    MLP_NORMS_LATENTS = "mlp+norms+latents"
    """The feed-forward part as a whole, results of norms outside it, and results of matrix products with latents."""

    @property
    def half(self) -> "Recompute | None":
        """Return the half of a layer, `attention` or `mlp`, that is the only one recomputed as a whole, or None."""
        return next((kind for kind in (Recompute.ATTENTION, Recompute.MLP) if kind in self.split("+")), None)

    def replays(self, part: str) -> bool:
        """Return whether the backward pass recomputes a part of the layer as a whole; `part`: `attention` or `mlp`."""
        return self in (Recompute.FULL, Recompute.SELECTIVE) or self.half == part

    @property
    def replays_experts(self) -> bool:
        """Return whether the backward pass recomputes the experts, and the part of the layer before them."""
        return self.replays("mlp")

    @property
    def parts(self) -> frozenset["RecomputedPart"]:
        """Return the parts of the layer that are recomputed one by one, each just before its results are read.

        Parts inside what is recomputed as a whole are not included.
        """
        if self is Recompute.LIGHT:
            return frozenset((RecomputedPart.NORMS, RecomputedPart.EXPERT_ACTIVATIONS, RecomputedPart.LATENTS))
        named = frozenset(part for part in RecomputedPart if part in self.split("+"))
        more = RecomputedPart.ACTIVATIONS in named
        return named | {RecomputedPart.EXPERT_ACTIVATIONS} if more else named


class RecomputedPart(StrEnum):
    """Parts of a layer that are recomputed separately, and whose results are freed after they have been read."""

    NORMS = "norms"
    ACTIVATIONS = "activations"
    """Activation functions and gates of the feed-forward parts that compute every position."""
    EXPERT_ACTIVATIONS = "expert_activations"
    """Activation functions and gates of experts."""
    LATENTS = "latents"
    """Matrix products with latents, and everything computed from them before attention."""


RECOMPUTE_SETS = tuple(kind for kind in Recompute if kind.parts)
"""The kinds that recompute parts one by one, some in addition to a whole half of the layer."""
RECOMPUTE_WHOLE = tuple(kind for kind in Recompute if not kind.parts)
"""The kinds that recompute nothing, whole layers, halves of layers, or everything except matrix products."""
PARTS: Final = "parts"
"""The word that stands for all kinds of `RECOMPUTE_PARTS` that apply to a model."""
RECOMPUTE_PARTS = (
    Recompute.NONE,
    Recompute.SELECTIVE,
    Recompute.FULL,
    *(kind for kind in RECOMPUTE_SETS if kind is not Recompute.LIGHT and kind.half is None),
)
"""None, selective, full, and every combination of norms, activation functions and latents."""
RecomputeChoice = Literal["parts"] | Annotated[tuple[Recompute, ...], Meta(min_length=1)]
"""Kinds of recomputation to choose from: a list of kinds, or the word `parts`."""


class Offload(StrEnum):
    """Data of a layer that stays in host memory, and is on the device only while it is used."""

    NONE = "none"
    """Nothing is offloaded."""
    OPTIMIZER = "optimizer"
    """The optimizer's states, which are copied to the device for the update."""
    ACTIVATIONS = "activations"
    """Activations that a micro-batch's backward pass reads, which are copied to the device for that pass."""
    BOTH = "both"
    """The optimizer's states and activations."""
    UPDATE = "update"
    """The optimizer's states, with which the host's CPU updates the parameters."""


class Strategy(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """The sharding of the embedding or the head over the ranks of its pipeline stage.

    `tp_size * cp_size * dp_size` is the number of ranks of the pipeline stage; `tp_size` varies fastest along the
    ranks. With Ulysses, `tp_size` is the degree of the sequence-parallel group of attention, and parameters are
    data-parallel over all ranks of the pipeline stage.
    """

    tp_size: Ranks
    """Ranks that one sample, or its part under `cp_size`, is split over."""
    tp_consecutive: bool = True
    """True if the ranks of a tensor-parallel group are neighbours; otherwise they are `dp_size` apart."""
    cp_size: Ranks = 1
    """Number of parts into which the positions of a sample are split over neighbouring groups of ranks, also in
    attention."""
    dp_size: Ranks
    """Number of parts into which the samples of a microbatch are split."""
    data_parallel: DataParallel = DataParallel.DDP
    """States that are sharded over the data-parallel ranks."""
    shard_size: SomeRanks = 0
    """Number of neighbouring data-parallel ranks over which ZeRO shards the states; 0: all of them.

    If it is smaller than their number (HSDP), each group of `shard_size` ranks holds all shards, and groups sum their
    gradients.
    """
    sequence_parallel: SequenceParallel = SequenceParallel.NONE
    """Kind of sequence parallelism of the tensor-parallel group."""

    def __post_init__(self) -> None:
        if self.cp_size > 1 and not self.tp_consecutive:
            raise ValueError(
                f"tp_consecutive false is not supported with cp_size {self.cp_size}, whose ranks are neighbours"
            )
        if self.shard_size == 0:
            return
        if self.data_parallel is DataParallel.DDP:
            raise ValueError("shard_size needs zero2 or zero3: ddp does not shard states")
        whole = self.sequence_parallel is SequenceParallel.ULYSSES  # parameters are data-parallel over all ranks
        ranks = self.dp_size * self.cp_size * (self.tp_size if whole else 1)
        if self.shard_size in (1, ranks) or ranks % self.shard_size:
            raise ValueError(
                f"shard_size {self.shard_size} is not a proper divisor of the {ranks} ranks of data parallelism: "
                "leave it out to shard states over all of them"
            )


class ExpertGrid(Strategy, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """The separate sharding of a layer's experts: a grid of dp_size x ep_size x tp_size ranks.

    It is not written to files: `LayerStrategy.expert_grid` builds it. `tp_size` neighbouring ranks shard the features
    of each expert, `ep_size` groups of these shard the experts, and `dp_size` groups of those hold replicas or shard
    states.
    """

    ep_size: Ranks
    """Number of groups of ranks over which the experts are sharded."""


class ExpertStrategy(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """How a layer's experts are sharded over the ranks of its pipeline stage, independently of the rest of the layer.

    `ep_size * etp_size` neighbouring ranks form a group that holds each expert once; positions are sent within this
    group.
    """

    ep_size: Ranks
    """Number of groups over which whole experts are distributed."""
    etp_size: Ranks = 1
    """Number of neighbouring ranks over which the features of each expert are sharded."""
    data_parallel: DataParallel = DataParallel.DDP
    """States of the experts that are sharded over the ranks with the same experts."""
    shard_size: SomeRanks = 0
    """Number of neighbours among the ranks with the same experts over which ZeRO shards the states; 0: all of them."""


class LayerStrategy(Strategy, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """The sharding of one layer over the ranks of its pipeline stage, and which part of it is recomputed."""

    type: str
    """The layer's type: a key of the model description's `types`."""
    recompute: Recompute = Recompute.NONE
    """Activations that are computed again in the backward pass."""
    context: ContextParallel = ContextParallel.GATHER
    """How positions of one rank attend to positions of other ranks; it only matters if cp_size is above 1."""
    experts: ExpertStrategy | UnsetType = UNSET
    """The parallelism of the layer's experts; if omitted, each rank has its tensor-parallel part of the features of all
    experts."""
    offload: Offload | UnsetType = UNSET
    """What stays in host memory; omitted if nothing does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context is ContextParallel.RING and self.cp_size == 1:
            raise ValueError("context ring needs cp_size above 1: leave it out")
        if self.offload is Offload.NONE:
            raise ValueError("offload none: leave it out")
        if self.offload is not UNSET and self.offloads_activations and not self.moves_activations:
            raise ValueError(f"offload {self.offload} needs recompute full, or none where no rank gathers positions")
        if self.experts is UNSET:
            return
        if (ranks := self.tp_size * self.cp_size * self.dp_size) % (self.experts.ep_size * self.experts.etp_size):
            raise ValueError(f"{_sizes(self.experts)} does not divide the {ranks} ranks of the stage")
        if self.tp_size > 1 and self.sequence_parallel is SequenceParallel.NONE:
            raise ValueError("experts are sharded over ranks that hold different positions: split the sequence")
        _grid(self.experts, ranks)  # raises ValueError if the grid is invalid

    @property
    def expert_grid(self) -> ExpertGrid | None:
        """Return the separate sharding of the layer's experts; None if they are sharded like the rest of the layer."""
        return None if self.experts is UNSET else _grid(self.experts, self.tp_size * self.cp_size * self.dp_size)

    @property
    def moves_activations(self) -> bool:
        """Return whether the layer's activations can be offloaded to host memory.

        Offloading moves tensors that autograd saves: selective recomputation keeps its tensors elsewhere, and shards
        that the backward pass gathers again are not saved either.
        """
        gathers = self.sequence_parallel is SequenceParallel.MEGATRON and self.tp_size > 1
        gathers = gathers or (self.context is ContextParallel.GATHER and self.cp_size > 1)
        return self.recompute is Recompute.FULL or (self.recompute is Recompute.NONE and not gathers)

    @property
    def offloads_optimizer(self) -> bool:
        """Return whether the optimizer's states of the layer stay in host memory."""
        return self.offload in (Offload.OPTIMIZER, Offload.BOTH, Offload.UPDATE)

    @property
    def updates_on_host(self) -> bool:
        """Return whether the host updates the layer's parameters."""
        return self.offload is Offload.UPDATE

    @property
    def offloads_activations(self) -> bool:
        """Return whether the layer's activations stay in host memory until the backward pass."""
        return self.offload in (Offload.ACTIVATIONS, Offload.BOTH)


def _grid(experts: ExpertStrategy, ranks: int) -> ExpertGrid:
    return ExpertGrid(
        tp_size=experts.etp_size,
        ep_size=experts.ep_size,
        dp_size=ranks // (experts.ep_size * experts.etp_size),
        data_parallel=experts.data_parallel,
        shard_size=experts.shard_size,
    )


def _sizes(experts: ExpertStrategy) -> str:
    return f"ep_size {experts.ep_size}" + f" x etp_size {experts.etp_size}" * (experts.etp_size > 1)


# How rows are sent to the ranks of their experts.


class Dispatcher(StrEnum):
    """How rows are sent to the ranks of their experts."""

    ALL_TO_ALL = "all-to-all"
    """One message for each pair of a position and an expert of its choice."""
    PER_NODE = "per-node"
    """One message to each other node or NVLink domain, and from there one to each rank, as in DeepEP and HybridEP."""
