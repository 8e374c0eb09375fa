"""Parameters that several elements hold copies of, and which pieces move so that all copies get one gradient."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import prod
from typing import NamedTuple

from shardwright_formats.semantics.layout import Box, overlap, parameter_box
from shardwright_formats.types.model import EMBEDDING, HEAD, Parameter
from shardwright_formats.types.plan import Plan
from shardwright_formats.types.strategy import Strategy

__all__ = ["Copy", "Piece", "pieces_from_owners", "pieces_to_owners", "ranks_of_ties", "ties_of"]


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


class Piece(NamedTuple):
    """A part of a parameter on its way from one copy to another."""

    source: int
    target: int
    sender: Copy
    receiver: Copy
    box: Box

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(high - low for low, high in self.box)


Tie = tuple[Copy, ...]


def ties_of(plan: Plan) -> tuple[Tie, ...]:
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


def ranks_of_ties(ties: Sequence[Tie]) -> tuple[int, ...]:
    """The ranks that hold any copy, in order."""
    return tuple(sorted({rank for tie in ties for copy in tie for rank in copy.ranks}))


def pieces_to_owners(ties: Sequence[Tie]) -> tuple[Piece, ...]:
    """What every copy's gradient sends to its owner, in the order in which the owner adds."""
    return tuple(piece for tie in ties for copy in tie[1:] for piece in _pieces(copy, tie[0]))


def pieces_from_owners(ties: Sequence[Tie]) -> tuple[Piece, ...]:
    """What the owners send to every copy."""
    return tuple(piece for tie in ties for copy in tie[1:] for piece in _pieces(tie[0], copy))


def _copy(plan: Plan, element: str, strategy: Strategy, kind: str, name: str) -> Copy:
    parameter = next(p for p in plan.model.types[kind].parameters if p.name == name)
    return Copy(element, parameter, strategy, plan.stages[plan.stage_of(element)].ranks)


def _pieces(sender: Copy, receiver: Copy) -> Iterator[Piece]:
    """Every element of the receiver is served once; replicas of the sender take turns."""
    turns = {held: cycle(sources) for held, sources in sender.boxes().items()}
    for wanted, targets in receiver.boxes().items():
        for held, sources in sender.boxes().items():
            common = overlap(held, wanted)
            if common is not None:
                for target in targets:
                    yield Piece(target if target in sources else next(turns[held]), target, sender, receiver, common)
