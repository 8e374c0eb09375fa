"""The settings of a model's profile: the strategies, sizes and lengths that are measured or estimated."""

from enum import StrEnum
from itertools import product
from typing import Annotated

from msgspec import Meta

from shardwright.io import BadInput, Document, Value
from shardwright.types.limits import Count, SeveralRanks
from shardwright.types.model import EMBEDDING, HEAD, Model
from shardwright.types.plan import Attention, Precision, misfit
from shardwright.types.strategy import PARTS, DataParallel, Recompute, RecomputeChoice, SequenceParallel, Strategy

_Counts = Annotated[tuple[Count, ...], Meta(min_length=1)]


_MAX_VALUES = 10_000
_SIZES_OF_A_RANGE = 3
_LENGTHS_OF_A_RANGE = 4


class Grid(StrEnum):
    """The combinations of micro-batch size and sequence length that are measured."""

    FEWEST = "fewest"
    """Every micro-batch size at the model's own length, and the smallest one at every other length.

    From a range, only as many values as determine a curve, and one more to check it: 3 micro-batch sizes, 4 lengths.
    """
    FULL = "full"
    """Every micro-batch size at every length."""


class Range(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evenly spaced whole numbers: min, min + step, … up to max."""

    min: Count
    max: Count
    step: Count

    def __post_init__(self) -> None:
        if self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        if (self.max - self.min) // self.step >= _MAX_VALUES:
            raise ValueError(f"more than {_MAX_VALUES} values: take a larger step")

    def values(self, at_most: int | None) -> tuple[int, ...]:
        """Return all values of the range, or `at_most` of them: both ends and evenly spaced values between."""
        values = range(self.min, self.max + 1, self.step)
        if at_most is None or len(values) <= at_most:
            return tuple(values)
        return tuple(values[round(i * (len(values) - 1) / (at_most - 1))] for i in range(at_most))


class ProfileSettings(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The strategies, micro-batch sizes and sequence lengths to probe."""

    FORMAT = "shardwright.profile_settings"

    tp_sizes: _Counts
    sequence_parallel: Annotated[tuple[SequenceParallel, ...], Meta(min_length=1)]
    recompute: RecomputeChoice
    micro_batch_sizes: _Counts | Range
    """Samples of a micro-batch on one tensor-parallel group."""
    sequence_lengths: _Counts | Range | None = None
    """Tokens of a sample. The model's own length is always included; null means only that one."""
    grid: Grid = Grid.FEWEST
    layers: tuple[Count, Count] = (1, 3)
    """Number of layers of a block type in its shorter and in its longer probe."""
    precision: Precision = Precision()
    attention: Attention = Attention.AUTO
    compile: bool = False
    """Whether torch.compile compiles each layer."""
    cp_sizes: tuple[SeveralRanks, ...] = ()
    """Numbers of ranks over which the positions of a sample are split: two or more probes for each check the time
    derived for a layer.

    The length of a rank's part must be one of `sequence_lengths`.
    """

    def __post_init__(self) -> None:
        for name in ("tp_sizes", "sequence_parallel", "recompute", "micro_batch_sizes", "sequence_lengths", "cp_sizes"):
            values = getattr(self, name)
            if isinstance(values, tuple) and len(set(values)) != len(values):
                raise ValueError(f"{name} holds a value twice")
        if self.layers[0] >= self.layers[1]:
            raise ValueError(
                f"layers {list(self.layers)} must be two growing numbers: their difference is one layer's cost"
            )
        if self.recompute != PARTS and Recompute.NONE not in self.recompute:
            raise ValueError("recompute must hold 'none': embedding and head are measured in those probes")

    @property
    def strategies(self) -> tuple[tuple[int, SequenceParallel], ...]:
        """Return every combination of requested tp_size and sequence parallelism once.

        A single rank has no sequence parallelism.
        """
        asked = product(self.tp_sizes, self.sequence_parallel)
        return tuple(dict.fromkeys((t, kind if t > 1 else SequenceParallel.NONE) for t, kind in asked))

    def lengths(self, model_length: int) -> tuple[int, ...]:
        """Return the sequence lengths that are measured; the model's own, `model_length`, comes first."""
        asked = self._values(self.sequence_lengths or (), _LENGTHS_OF_A_RANGE)
        return (model_length, *(length for length in asked if length != model_length))

    def share_lengths(self, model_length: int) -> dict[int, int]:
        """Return the length of a rank's share of a sample by cp_size; raise BadInput if it is not measured."""
        lengths = {size: model_length // size for size in sorted(self.cp_sizes)}
        for size, length in lengths.items():
            if model_length % (2 * size):
                problem = f"2 x cp_size {size} does not divide the sequence length {model_length}"
                raise BadInput("--settings", problem, "choose other cp_sizes")
            if length not in self.lengths(model_length):
                problem = f"cp_sizes: {size} leaves a rank {length} of {model_length} tokens, which are not measured"
                raise BadInput("--settings", problem, f"add {length} to sequence_lengths")
        return lengths

    def sizes(self, length: int, model_length: int) -> tuple[int, ...]:
        """Return the micro-batch sizes that are measured at a length; the model's own length is `model_length`."""
        sizes = self._values(self.micro_batch_sizes, _SIZES_OF_A_RANGE)
        return sizes if length == model_length or self.grid is Grid.FULL else (min(sizes),)

    def _values(self, asked: tuple[int, ...] | Range, at_most: int) -> tuple[int, ...]:
        if isinstance(asked, Range):
            return asked.values(at_most if self.grid is Grid.FEWEST else None)
        return asked


def block_types(model: Model) -> tuple[str, ...]:
    """Return the types of a model's blocks, in the order of their first occurrence."""
    return tuple(dict.fromkeys(model.layers))


def misfit_of(model: Model, strategy: Strategy) -> str | None:
    """Return why embedding, head or a block cannot be sharded by a strategy; None if all can."""
    problems = (misfit(model, name, strategy) for name in (EMBEDDING, *block_types(model), HEAD))
    return next((problem for problem in problems if problem is not None), None)


def formatted(strategy: Strategy) -> str:
    """Return a strategy's name, as used in the names of plans."""
    named = f"tp_size={strategy.tp_size} sequence_parallel={strategy.sequence_parallel}"
    return named if strategy.data_parallel is DataParallel.DDP else f"{strategy.data_parallel} {named}"
