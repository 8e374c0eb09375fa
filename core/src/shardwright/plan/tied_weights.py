"""Parameters that are replicated in several layers, and the pieces that move so that all replicas get one gradient."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import prod
from typing import NamedTuple

from shardwright.plan.layout import Box, overlap, parameter_box
from shardwright.types import EMBEDDING, HEAD, Parameter, Plan, Strategy, base_type


@dataclass(frozen=True)
class Replica:
    """A layer's replica of a tied parameter."""

    layer: str
    parameter: Parameter
    strategy: Strategy
    ranks: tuple[int, ...]

    def boxes(self) -> dict[Box, list[int]]:
        """Return the ranks that hold each part of the replica; several ranks may hold the same part."""
        holders: dict[Box, list[int]] = {}
        for index, rank in enumerate(self.ranks):
            holders.setdefault(parameter_box(self.parameter, self.strategy, index), []).append(rank)
        return holders


class Piece(NamedTuple):
    """A block of a tied parameter that is sent from one replica to another."""

    source: int
    target: int
    sender: Replica
    receiver: Replica
    box: Box

    @property
    def numel(self) -> int:
        """Return the number of elements of the block."""
        return prod(high - low for low, high in self.box)


TiedParameter = tuple[Replica, ...]


def tied_parameters(plan: Plan) -> tuple[TiedParameter, ...]:
    """Return the parameters that have several replicas; the first replica of each is its owner."""
    tied = list(_shared_by_ends(plan))
    for base, kinds in plan.model.layers_by_base.items():
        layers = [(i, layer) for i, layer in enumerate(plan.layers) if base_type(layer.type) == base]
        for parameter in plan.model.types[kinds[0]].parameters:
            if parameter.shared and len(layers) > 1:
                replicas = (_replica(plan, f"layers[{i}]", layer, layer.type, parameter.name) for i, layer in layers)
                tied.append(tuple(replicas))
    return tuple(tied)


def trained_ones(tied: Sequence[TiedParameter]) -> tuple[TiedParameter, ...]:
    """Return the parameters whose replicas have gradients."""
    return tuple(one for one in tied if one[0].parameter.trained)


def ranks_of_replicas(tied: Sequence[TiedParameter]) -> tuple[int, ...]:
    """Return the ranks that hold any replica, in order."""
    return tuple(sorted({rank for one in tied for replica in one for rank in replica.ranks}))


def pieces_to_owners(tied: Sequence[TiedParameter]) -> tuple[Piece, ...]:
    """Return the pieces of gradients that other replicas send to their owners, in the order in which owners add."""
    return tuple(piece for one in tied for replica in one[1:] for piece in _pieces(replica, one[0]))


def pieces_from_owners(tied: Sequence[TiedParameter]) -> tuple[Piece, ...]:
    """Return the pieces that the owners send to every other replica."""
    return tuple(piece for one in tied for replica in one[1:] for piece in _pieces(one[0], replica))


def _shared_by_ends(plan: Plan) -> Iterator[TiedParameter]:
    """Yield the parameters of embedding and head that have copies in blocks, or in the other of the two."""
    model, second_of = plan.model, dict(plan.model.tied)
    copies: dict[str, list[Replica]] = {}
    for i, layer in enumerate(plan.layers):
        for copy in model.types[layer.type].copies:
            replica = _replica(plan, f"layers[{i}]", layer, layer.type, copy.name)
            copies.setdefault(str(copy.copy_of), []).append(replica)
    for end, strategy in ((EMBEDDING, plan.embedding), (HEAD, plan.head)):
        for parameter in model.types[end].parameters:
            others = copies.get(parameter.name, [])
            if (second := second_of.get(parameter.name)) is not None:
                others = [*others, _replica(plan, HEAD, plan.head, HEAD, second)]
            if others:
                yield _replica(plan, end, strategy, end, parameter.name), *others


def _replica(plan: Plan, layer: str, strategy: Strategy, kind: str, name: str) -> Replica:
    parameter = next(p for p in plan.model.types[kind].parameters if p.name == name)
    return Replica(layer, parameter, strategy, plan.stages[plan.stage_of(layer)].ranks)


def _pieces(sender: Replica, receiver: Replica) -> Iterator[Piece]:
    """Yield pieces that serve each element of the receiver once; the sender's replicas send alternately."""
    replicas = {box: cycle(sources) for box, sources in sender.boxes().items()}
    for wanted, targets in receiver.boxes().items():
        for box, sources in sender.boxes().items():
            common = overlap(box, wanted)
            if common is not None:
                for target in targets:
                    yield Piece(target if target in sources else next(replicas[box]), target, sender, receiver, common)
