"""Tied parameters: replicas of one parameter in several layers, on any ranks and in any layouts, with one gradient."""

from collections.abc import Mapping, Sequence
from copy import copy

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.plan.layout import Box, parameter_box
from shardwright.plan.process_groups import Purpose
from shardwright.plan.tied_weights import (
    Piece,
    Replica,
    pieces_from_owners,
    pieces_to_owners,
    ranks_of_replicas,
    tied_parameters,
    trained_ones,
)
from shardwright.types import Plan
from shardwright_train.parallel.process_groups import Groups


class TiedParameters:
    """The replicas of tied parameters on one rank, and the two exchanges between them.

    Both exchanges are one all_to_all over the ranks that hold replicas; `group` is None when this rank holds none.
    """

    def __init__(self, plan: Plan, rank: int, groups: Groups) -> None:
        tied = tied_parameters(plan)
        self.rank, self.members = rank, ranks_of_replicas(tied)
        self.group = groups.among(Purpose.TIED_PARAMETERS, self.members) if rank in self.members else None
        self.replicas = frozenset(
            (replica.layer, replica.parameter.name) for one in tied for replica in one[1:] if rank in replica.ranks
        )
        """Layer and parameter of each replica that this rank does not own: it counts once in a norm."""
        trained = trained_ones(tied)
        self._from_owners = pieces_from_owners(tied)
        self._gradients = pieces_to_owners(trained), pieces_from_owners(trained)

    def alone(self) -> "TiedParameters":
        """Return these replicas without any exchange."""
        alone = copy(self)
        alone.group = None
        return alone

    def sum_gradients(self, gradients: Mapping[tuple[str, str], Tensor], like: Tensor) -> None:
        """Give every replica the sum of all replicas' gradients: local shards by layer and parameter, in place.

        Frozen ones have none: a rank with no other takes part with nothing, of the dtype and on the device of `like`.
        The owner adds in the order of the layers and sends out its sums, so that replicas stay equal to the bit.
        """
        to_owners, from_owners = self._gradients
        if self.group is not None and to_owners:
            self._exchange(to_owners, gradients, like, add=True)
            self._exchange(from_owners, gradients, like, add=False)

    def broadcast_owners(self, values: Mapping[tuple[str, str], Tensor]) -> None:
        """Give every replica its owner's values, in place."""
        if self.group is not None:
            self._exchange(self._from_owners, values, next(iter(values.values())), add=False)

    def _exchange(
        self, pieces: Sequence[Piece], tensors: Mapping[tuple[str, str], Tensor], like: Tensor, add: bool
    ) -> None:
        sends = sorted((p for p in pieces if p.source == self.rank != p.target), key=lambda p: p.target)
        receives = sorted((p for p in pieces if p.target == self.rank != p.source), key=lambda p: p.source)
        outgoing = [self._window(p.sender, p.box, tensors).reshape(-1) for p in sends]
        empty = like.new_empty(0)
        incoming = like.new_empty(sum(p.numel for p in receives))
        dist.all_to_all_single(
            incoming,
            torch.cat([empty, *outgoing]),
            [sum(p.numel for p in receives if p.source == member) for member in self.members],
            [sum(p.numel for p in sends if p.target == member) for member in self.members],
            group=self.group,
        )
        arrived = dict(zip(receives, incoming.split([p.numel for p in receives]), strict=True))
        for piece in (p for p in pieces if p.target == self.rank):
            target = self._window(piece.receiver, piece.box, tensors)
            value = arrived[piece] if piece in arrived else self._window(piece.sender, piece.box, tensors)
            value = value.view(target.shape)
            _ = target.add_(value) if add else target.copy_(value)

    def _window(self, replica: Replica, box: Box, tensors: Mapping[tuple[str, str], Tensor]) -> Tensor:
        mine = parameter_box(replica.parameter, replica.strategy, replica.ranks.index(self.rank))
        local = tensors[replica.layer, replica.parameter.name]
        return local[tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, mine, strict=True))]
