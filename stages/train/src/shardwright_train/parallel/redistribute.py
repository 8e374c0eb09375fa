"""Moving activations from one layout to another with one uneven all_to_all, and their gradients back."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright_formats.semantics.layout import ActivationShard, Layout, closed_groups, redistribution_plan
from shardwright_formats.semantics.process_groups import Purpose
from shardwright_train.parallel.collectives import with_transpose
from shardwright_train.parallel.process_groups import Groups

Window = tuple[slice, slice]
"""Slices of samples and positions of a local tensor."""


@dataclass(frozen=True)
class RedistributionSite:
    """The place of redistribution: rank `me` among the `ranks` of a pipeline stage, and the size of the tensor."""

    ranks: tuple[int, ...]
    me: int
    samples: int
    length: int
    groups: Groups


class Redistribution:
    """The change from `source` to `target` layout for one rank of a pipeline stage.

    Called on [samples, positions, features] of the source's activation shard, it returns the target's; the gradient
    takes the reverse way. A layout with replicas expects the full gradient on each of them, and gives it.
    """

    def __init__(self, source: Layout, target: Layout, site: RedistributionSite) -> None:
        self.forward_move, self.backward_move = _Move(source, target, site), _Move(target, source, site)

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor moved to the target layout; differentiable."""
        return with_transpose(x, self.forward_move, self.backward_move)


class _Move:
    """The pieces that this rank keeps, sends and receives in one direction, in the order of the group's ranks."""

    def __init__(self, source: Layout, target: Layout, site: RedistributionSite) -> None:
        me, size = site.me, (site.samples, site.length)
        self.members = next(group for group in closed_groups(source, target, *size) if me in group)
        several = len(self.members) > 1
        self.group = site.groups.among(Purpose.EXCHANGE, (site.ranks[i] for i in self.members)) if several else None
        before, after = source.activation_shard(me, *size), target.activation_shard(me, *size)
        self.shape = after.batch_end - after.batch_start, after.sequence_end - after.sequence_start
        transfers = redistribution_plan(source, target, *size)
        mine = [t for t in transfers if t.source == t.target == me]
        self.kept = [(window(t.piece, before), window(t.piece, after)) for t in mine]
        self.sends = [
            [window(t.piece, before) for t in transfers if (t.source, t.target) == (me, peer) and peer != me]
            for peer in self.members
        ]
        self.receives = [
            [window(t.piece, after) for t in transfers if (t.source, t.target) == (peer, me) and peer != me]
            for peer in self.members
        ]

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.shape + x.shape[2:])
        for before, after in self.kept:
            out[after] = x[before]
        if self.group is None:
            return out
        pieces = [[x[place].reshape(-1) for place in places] for places in self.sends]
        targets = [[out[place] for place in places] for places in self.receives]
        incoming = x.new_empty(sum(_counts(targets)))
        outgoing = torch.cat([x.new_empty(0), *(piece for to_peer in pieces for piece in to_peer)])
        dist.all_to_all_single(incoming, outgoing, _counts(targets), _counts(pieces), group=self.group)
        flat = [target for from_peer in targets for target in from_peer]
        for target, piece in zip(flat, incoming.split([target.numel() for target in flat]), strict=True):
            target.copy_(piece.view(target.shape))
        return out


def _counts(tensors: Sequence[Sequence[Tensor]]) -> list[int]:
    """Return the counts of elements to exchange with each rank of the group."""
    return [sum(x.numel() for x in with_peer) for with_peer in tensors]


def window(piece: ActivationShard, full: ActivationShard) -> Window:
    """Return the place of a piece in a tensor that is a larger part of the microbatch."""
    return (
        slice(piece.batch_start - full.batch_start, piece.batch_end - full.batch_start),
        slice(piece.sequence_start - full.sequence_start, piece.sequence_end - full.sequence_start),
    )
