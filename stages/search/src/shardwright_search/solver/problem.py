"""One case as bare numbers: what the solver sees of a model, a cluster and their costs."""

from typing import NamedTuple

import msgspec
import numpy as np

from shardwright_search.solver.pareto import Ints

__all__ = ["Options", "Problem", "Solution", "StageTable"]


class Options(NamedTuple):
    """The strategies of one element type on the ranks of a pipeline stage, one column of numbers each [options]."""

    microbatch_ps: Ints
    """Forward and backward of one microbatch."""
    gradient_sync_ps: Ints
    optimizer_ps: Ints
    state_bytes: Ints
    activation_bytes: Ints
    """Of one microbatch in flight."""
    transient_bytes: Ints
    layout: Ints
    """Number of the layout of the activations."""


class StageTable(NamedTuple):
    """Costs on the ranks of one pipeline stage."""

    options: tuple[Options, ...]
    """By type number."""
    redistribution_ps: Ints
    """[types, layouts, layouts]: outputs of that type from a layout to another, forward and backward together."""


class Problem(msgspec.Struct, frozen=True, dict=True, eq=False):
    """A chain of elements (embedding, layers, head) to cut into pipeline stages and to give one option each.

    Stage i's time of a microbatch is A'_i: the options' time, redistribution before each of its elements, and the
    sends at both of its ends. Minimised is T = sum A' + (m - 1) max A' + max U + max O, with m microbatches, U the sum
    of gradient_sync and O that of optimizer in a stage. A stage's memory is the sum of its options' state and of
    in_flight times their activations, plus the largest transient; it must not exceed the budget.
    """

    elements: tuple[int, ...]
    """Type number of each; the first is in the first stage and the last in the last, each with one layer or more."""
    tables: tuple[StageTable, ...]
    """By pipeline stage; stages with the same costs may share one object, and then share work."""
    sends_ps: Ints
    """[stages - 1, types, layouts]: outputs of that type in that layout over the cut after the stage, one way."""
    in_flight: tuple[int, ...]
    """By pipeline stage."""
    num_microbatches: int
    budget_bytes: int
    """Of one rank, without the process's own memory."""

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return len(self.tables)

    @property
    def num_layouts(self) -> int:
        """Number of layouts."""
        return int(self.tables[0].redistribution_ps.shape[1])

    @property
    def weights(self) -> Ints:
        """The combinations [combinations, 3] of (A, U, O) in which one stage must not be worse to replace another.

        With one stage T is m A + U + O. With several, taking (A, U, O) for (A', U', O') lowers the sum of times by
        A' - A, raises no largest time if A <= A', and raises the largest U and O by at most (U - U')+ and (O - O')+.
        So it never hurts if A' - A >= (U - U')+ + (O - O')+, which says that A, A + U, A + O and A + U + O are each
        no larger.
        """
        if self.pp_size == 1:
            return np.array([[self.num_microbatches, 1, 1]])
        return np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 1, 1]])

    def ends(self, stage: int, start: int) -> range:
        """Where a pipeline stage that starts at element `start` can end, so that each stage gets a layer."""
        total, later = len(self.elements), self.pp_size - 1 - stage
        if later == 0:
            return range(total, total + 1) if start <= total - 2 else range(0)
        return range(2 if stage == 0 else start + 1, total - 1 - later + 1)


class Solution(NamedTuple):
    """A best plan of one case."""

    objective_ps: int
    ends: tuple[int, ...]
    """The element after the last of each pipeline stage."""
    options: tuple[int, ...]
    """The option of each element."""
    memory_bytes: int
    """Of the fullest stage, without the process's own memory."""
