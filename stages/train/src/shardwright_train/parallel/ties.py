"""Parameters that several elements hold copies of, on whatever ranks and in whatever layouts: one gradient for all."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright_formats.model import EMBEDDING, HEAD, Parameter
from shardwright_formats.placement import Box, overlap, parameter_box
from shardwright_formats.plan import Plan
from shardwright_formats.strategy import Strategy

__all__ = ["Copy", "Ties", "ranks_of_ties", "ties_of"]


@dataclass(frozen=True)
class Copy:
    """One element's copy of a parameter."""

    element: str
    parameter: Parameter
    strategy: Strategy
    ranks: tuple[int, ...]

    def boxes(self) -> dict[Box, list[int]]:
        """Which ranks hold which part; those of one part hold replicas."""
        found: dict[Box, list[int]] = {}
        for index, rank in enumerate(self.ranks):
            found.setdefault(parameter_box(self.parameter, self.strategy, index), []).append(rank)
        return found


def ties_of(plan: Plan) -> tuple[tuple[Copy, ...], ...]:
    """The parameters that have several copies; the first copy of each is its owner."""
    found = []
    for first, second in plan.model.tied:
        outer = [(EMBEDDING, plan.embedding, first), (HEAD, plan.head, second)]
        found.append(tuple(_copy(plan, element, strategy, element, name) for element, strategy, name in outer))
    for kind in dict.fromkeys(plan.model.layers):
        layers = [(i, layer) for i, layer in enumerate(plan.layers) if layer.type == kind]
        for parameter in plan.model.types[kind].parameters:
            if parameter.shared and len(layers) > 1:
                copies = (_copy(plan, f"layers[{i}]", layer, kind, parameter.name) for i, layer in layers)
                found.append(tuple(copies))
    return tuple(found)


def ranks_of_ties(plan: Plan) -> tuple[int, ...]:
    """The ranks that hold any copy."""
    return tuple(sorted({rank for tie in ties_of(plan) for copy in tie for rank in copy.ranks}))


class _Piece(NamedTuple):
    """A part of a parameter on its way from one copy to another."""

    source: int
    target: int
    sender: Copy
    receiver: Copy
    box: Box


class Ties:
    """The copies on one rank and the two exchanges between them.

    Both exchanges are one all_to_all over the ranks that hold copies; `group` is None when this rank holds none.
    """

    def __init__(self, plan: Plan, rank: int, group: dist.ProcessGroup | None) -> None:
        ties = ties_of(plan)
        self.group, self.rank = group, rank
        self.members = ranks_of_ties(plan)
        self.copies = frozenset(
            (copy.element, copy.parameter.name) for tie in ties for copy in tie[1:] if rank in copy.ranks
        )
        """Element and parameter of what this rank holds but does not own: it counts once in a norm."""
        self._to_owner = [p for tie in ties for copy in tie[1:] for p in _pieces(copy, tie[0])]
        self._from_owner = [p for tie in ties for copy in tie[1:] for p in _pieces(tie[0], copy)]

    def sum_gradients(self, gradients: Mapping[tuple[str, str], Tensor]) -> None:
        """Give every copy the sum of all copies' gradients: local shards by element and parameter, in place.

        The owner adds in the order of the layers and hands out its sums, so that copies stay equal to the bit.
        """
        if self.group is not None:
            self._exchange(self._to_owner, gradients, add=True)
            self._exchange(self._from_owner, gradients, add=False)

    def copy_owners(self, values: Mapping[tuple[str, str], Tensor]) -> None:
        """Give every copy its owner's values, in place."""
        if self.group is not None:
            self._exchange(self._from_owner, values, add=False)

    def _exchange(self, pieces: list[_Piece], tensors: Mapping[tuple[str, str], Tensor], add: bool) -> None:
        sends = sorted((p for p in pieces if p.source == self.rank != p.target), key=lambda p: p.target)
        receives = sorted((p for p in pieces if p.target == self.rank != p.source), key=lambda p: p.source)
        outgoing = [self._window(p.sender, p.box, tensors).reshape(-1) for p in sends]
        like = next(iter(tensors.values()))
        empty = like.new_empty(0)
        incoming = like.new_empty(sum(_size(p.box) for p in receives))
        dist.all_to_all_single(
            incoming,
            torch.cat([empty, *outgoing]),
            [sum(_size(p.box) for p in receives if p.source == member) for member in self.members],
            [sum(_size(p.box) for p in sends if p.target == member) for member in self.members],
            group=self.group,
        )
        arrived = dict(zip(receives, incoming.split([_size(p.box) for p in receives]), strict=True))
        for piece in (p for p in pieces if p.target == self.rank):
            target = self._window(piece.receiver, piece.box, tensors)
            value = arrived[piece] if piece in arrived else self._window(piece.sender, piece.box, tensors)
            value = value.view(target.shape)
            _ = target.add_(value) if add else target.copy_(value)

    def _window(self, copy: Copy, box: Box, tensors: Mapping[tuple[str, str], Tensor]) -> Tensor:
        mine = parameter_box(copy.parameter, copy.strategy, copy.ranks.index(self.rank))
        local = tensors[copy.element, copy.parameter.name]
        return local[tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, mine, strict=True))]


def _copy(plan: Plan, element: str, strategy: Strategy, kind: str, name: str) -> Copy:
    parameter = next(p for p in plan.model.types[kind].parameters if p.name == name)
    return Copy(element, parameter, strategy, plan.stages[plan.stage_of(element)].ranks)


def _pieces(sender: Copy, receiver: Copy) -> Iterator[_Piece]:
    """Every element of the receiver is served once; replicas of the sender share the work."""
    for wanted, targets in receiver.boxes().items():
        for held, sources in sender.boxes().items():
            common = overlap(held, wanted)
            if common is not None:
                for index, target in enumerate(targets):
                    source = target if target in sources else sources[index % len(sources)]
                    yield _Piece(source, target, sender, receiver, common)


def _size(box: Box) -> int:
    size = 1
    for low, high in box:
        size *= high - low
    return size
