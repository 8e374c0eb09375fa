"""How one layer is sharded over the ranks of its pipeline stage."""

from enum import StrEnum

from shardwright_formats.io import Value
from shardwright_formats.types.limits import Ranks, SomeRanks


class DataParallel(StrEnum):
    """What the data-parallel ranks of a layer share out among themselves."""

    DDP = "ddp"
    """Nothing: every rank holds parameters, gradients and optimizer state whole."""
    ZERO2 = "zero2"
    """Gradients and optimizer state; parameters are gathered once a step."""
    ZERO3 = "zero3"
    """Parameters too; they are gathered in the forward and again in the backward pass."""


class SequenceParallel(StrEnum):
    """Whether the ranks of a tensor-parallel group share the sequence, and how."""

    NONE = "none"
    """Every rank of the group holds the whole sequence."""
    MEGATRON = "megatron"
    """Between the matrix products each rank holds 1/tp_size of the sequence (Korthikanti et al. 2022)."""
    ULYSSES = "ulysses"
    """The sequence is split everywhere but in attention, where heads are (Jacobs et al. 2023)."""


class Recompute(StrEnum):
    """Which activations of a layer are computed again in its backward pass."""

    NONE = "none"
    """No activations are recomputed: all are kept."""
    FULL = "full"
    """All activations are recomputed: only the layer's input is kept."""
    ATTENTION = "attention"
    """Activations of the attention part are recomputed."""
    MLP = "mlp"
    """Activations of the feed-forward part are recomputed."""
    SELECTIVE = "selective"
    """All but the results of matrix products and of attention, which are kept (Korthikanti et al. 2022)."""


class Strategy(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """How the embedding or the head is sharded over the ranks of its pipeline stage.

    `tp_size * dp_size` is the number of ranks of the pipeline stage. For Ulysses, `tp_size` is the degree of the
    sequence-parallel group of attention, and parameters are data-parallel over all ranks of the pipeline stage.
    """

    tp_size: Ranks
    """Ranks that one sample of the layer is split over."""
    tp_consecutive: bool = True
    """Whether neighbouring ranks form a tensor-parallel group, or ranks `dp_size` apart."""
    dp_size: Ranks
    """Parts that the samples of a microbatch are shared out in."""
    data_parallel: DataParallel = DataParallel.DDP
    """What the data-parallel ranks share out."""
    shard_size: SomeRanks = 0
    """Neighbouring data-parallel ranks that ZeRO shares the states out among; 0: all of them.

    Where they are fewer (HSDP), groups of so many ranks hold replicas of each other's shards and sum their gradients.
    """
    sequence_parallel: SequenceParallel = SequenceParallel.NONE
    """How the tensor-parallel group shares the sequence."""

    def __post_init__(self) -> None:
        if self.shard_size == 0:
            return
        if self.data_parallel is DataParallel.DDP:
            raise ValueError("shard_size is of zero2 and zero3, ddp shards nothing")
        whole = self.sequence_parallel is SequenceParallel.ULYSSES  # parameters are data-parallel over all ranks
        ranks = self.dp_size * (self.tp_size if whole else 1)
        if self.shard_size in (1, ranks) or ranks % self.shard_size:
            raise ValueError(
                f"shard_size {self.shard_size} is no true divisor of the {ranks} ranks of data parallelism: "
                "leave it out where all of them share the states out"
            )


class LayerStrategy(Strategy, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """How one layer is sharded over the ranks of its pipeline stage, and what of it is recomputed."""

    type: str
    """The layer's type: a key of the model description's `types`."""
    recompute: Recompute = Recompute.NONE
    """Which activations are computed again in the backward pass."""
