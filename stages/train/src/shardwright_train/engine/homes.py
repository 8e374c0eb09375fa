"""Homes of matrices: the rank at which each matrix is whole while it is updated, and how its parts get there and back.

All ranks of a pipeline stage derive the same homes from only the plan: matrices by descending work, each to the rank
with the least work so far among the ranks that hold parts of it (longest processing time first, Graham 1969). A home
computes with the whole matrix and nothing else, so that its update is the same under every plan. Matrices are moved in
rounds, at most one to each home, which limits the memory. If several ranks hold the same part, one of them sends it
home, and all of them get it back.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.optimizers.registry import COEFFICIENTS, STEPS, iteration_flops
from shardwright.plan.layout import Box

_EPS = 1e-7
_Index = tuple[int | slice, ...]


class Held(NamedTuple):
    """A parameter that is a matrix or a stack of matrices, and the parts of it that the ranks of a stage hold."""

    shape: tuple[int, ...]
    dims: tuple[int, int]
    """The dims of rows and columns; along the other dims matrices are stacked."""
    boxes: tuple[Box, ...]
    """The part of each rank, by index in the stage."""
    me: int = 0
    """Index of this rank in the stage."""
    group: Callable[[], dist.ProcessGroup] | None = None
    """Function that returns the group of these ranks; None: there is one rank."""

    @property
    def matrix(self) -> tuple[int, int]:
        """Number of rows and columns of each matrix."""
        rows, columns = self.dims
        return self.shape[rows], self.shape[columns]


class _Part(NamedTuple):
    """A part of a matrix, and its index in each holding rank's part of the parameter."""

    tensor: int
    """Number of the parameter."""
    rows: slice
    columns: slice
    places: dict[int, _Index]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]


class _Matrix(NamedTuple):
    shape: tuple[int, int]
    parts: list[_Part]

    @property
    def holders(self) -> set[int]:
        return {rank for part in self.parts for rank in part.places}


class _Move(NamedTuple):
    part: _Part
    source: int
    target: int


class _Leg(NamedTuple):
    """The parts that this rank sends and receives in some moves, in order of the other ranks, and elements by rank."""

    sent: list[_Part]
    sent_numel: list[int]
    came: list[_Part]
    came_numel: list[int]


class _Turn(NamedTuple):
    there: _Leg
    back: _Leg
    mine: tuple[int, int] | None
    """Shape of the matrix whose home is this rank, or None."""


class Homes:
    """The homes of all matrices of a rank's stage."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._me, self._group, self._size = held[0].me, held[0].group, len(held[0].boxes)
        matrices = [matrix for number, each in enumerate(held) for matrix in _matrices(number, each)]
        self._turns = [self._turn(number, each) for number, each in enumerate(_turns(matrices))]

    def orthogonalize(self, tensors: Sequence[Tensor]) -> None:
        """Orthogonalize matrices in place; `tensors` are this rank's parts of the parameters.

        Computed in bfloat16, or in float64 if the tensors are in float64. Collective over the stage.
        """
        dtype = torch.float64 if tensors[0].dtype is torch.float64 else torch.bfloat16
        for there, back, mine in self._turns:
            whole = tensors[0].new_empty(mine or (0, 0), dtype=dtype)
            for part, x in self._exchanged(there, [self._local(tensors, part) for part in there.sent], whole):
                whole[part.rows, part.columns] = x
            whole = orthogonalized(whole) if mine else whole
            for part, x in self._exchanged(back, [whole[part.rows, part.columns] for part in back.sent], whole):
                self._local(tensors, part).copy_(x)

    def _local(self, tensors: Sequence[Tensor], part: _Part) -> Tensor:
        return tensors[part.tensor][part.places[self._me]]

    def _exchanged(self, leg: _Leg, sent: Sequence[Tensor], like: Tensor) -> Iterator[tuple[_Part, Tensor]]:
        """Send parts in the format of `like`, and yield the parts that arrive."""
        flat = torch.cat([like.new_empty(0), *(x.to(like.dtype).reshape(-1) for x in sent)])
        if self._group is not None:
            came = like.new_empty(sum(leg.came_numel))
            dist.all_to_all_single(came, flat, leg.came_numel, leg.sent_numel, group=self._group())
            flat = came
        for part, x in zip(leg.came, flat.split([part.numel for part in leg.came]), strict=True):
            yield part, x.view(part.shape)

    def _turn(self, number: int, at_home: Sequence[tuple[int, _Matrix]]) -> _Turn:
        there, back = list[_Move](), list[_Move]()
        for home, matrix in at_home:
            for part in matrix.parts:
                ranks = sorted(part.places)
                there.append(_Move(part, home if home in ranks else ranks[number % len(ranks)], home))
                back += [_Move(part, home, rank) for rank in ranks]
        mine = next((matrix.shape for home, matrix in at_home if home == self._me), None)
        return _Turn(self._leg(there), self._leg(back), mine)

    def _leg(self, moves: Sequence[_Move]) -> _Leg:
        sent = sorted((move for move in moves if move.source == self._me), key=lambda move: move.target)
        came = sorted((move for move in moves if move.target == self._me), key=lambda move: move.source)
        return _Leg(
            [move.part for move in sent],
            [sum(move.part.numel for move in sent if move.target == rank) for rank in range(self._size)],
            [move.part for move in came],
            [sum(move.part.numel for move in came if move.source == rank) for rank in range(self._size)],
        )


def _matrices(number: int, held: Held) -> Iterator[_Matrix]:
    """Yield the matrices of a parameter, with their parts."""
    stacked = [dim for dim in range(len(held.shape)) if dim not in held.dims]
    for at in product(*(range(held.shape[dim]) for dim in stacked)):
        parts = dict[tuple[tuple[int, int], ...], _Part]()
        for rank, box in enumerate(held.boxes):
            if all(low < high for low, high in box) and all(
                box[dim][0] <= place < box[dim][1] for dim, place in zip(stacked, at, strict=True)
            ):
                index: list[int | slice] = [slice(0, high - low) for low, high in box]
                for dim, place in zip(stacked, at, strict=True):
                    index[dim] = place - box[dim][0]
                cut = tuple(box[dim] for dim in held.dims)
                rows, columns = (slice(*ends) for ends in cut)
                part = parts.setdefault(cut, _Part(number, rows, columns, {}))
                part.places[rank] = tuple(index)
        yield _Matrix(held.matrix, list(parts.values()))


def _turns(matrices: Sequence[_Matrix]) -> list[list[tuple[int, _Matrix]]]:
    """Return rounds of matrices with their homes: in a round each rank is home to at most one."""
    load, turns = defaultdict[int, int](int), defaultdict[int, list[tuple[int, _Matrix]]](list)
    taken = Counter[int]()
    for matrix in sorted(matrices, key=lambda each: -iteration_flops(*each.shape)):
        home = min(matrix.holders, key=lambda rank: (load[rank], rank))
        load[home] += iteration_flops(*matrix.shape)
        turns[taken[home]].append((home, matrix))
        taken[home] += 1
    return list(turns.values())


def orthogonalized(x: Tensor) -> Tensor:
    """Return a matrix made nearly orthogonal, as in `torch.optim.Muon`; `x` itself is scaled in place."""
    a, b, c = COEFFICIENTS
    is_tall = x.size(0) > x.size(1)
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=_EPS))
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
