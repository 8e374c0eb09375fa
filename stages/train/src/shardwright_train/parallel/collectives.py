"""Differentiable collectives on activations: inside tensor-parallel groups, and between layouts.

A collective is linear, so its gradient is its transpose: all-gather and reduce-scatter are transposes of each other, as
are the identity (on replicated input) and all-reduce; all-to-all is its own transpose, with split and gather dims
swapped. These are the operators f, g of Shoeybi et al. (2019) and g, g-bar of Korthikanti et al. (2022), who also
gather the inputs of matrix products again in the backward pass instead of keeping them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwright.plan.axes import ActivationShard, Layout
from shardwright.plan.layout import closed_groups, redistribution_plan
from shardwright.plan.process_groups import Purpose
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.torch_private import hooks_around

Move = Callable[[Tensor], Tensor]
GroupMove = Callable[[Tensor, dist.ProcessGroup], Tensor]
Window = tuple[slice, slice]
"""Slices of samples and positions of a local tensor."""
_SEQUENCE_DIM = 1


class _WithTranspose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def with_transpose(x: Tensor, there: Move, back: Move) -> Tensor:
    """Apply a linear collective `there`; the gradient goes through its transpose `back`."""
    moved: Tensor = _WithTranspose.apply(x, there, back)  # type: ignore[no-untyped-call]
    return moved


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [b, s/n, h] of each rank to [b, s, h] on all; the gradient is summed and scattered."""
    return _differentiable(x, group, _gather, _scatter)


def scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum [b, s, h] over the ranks and give each its part [b, s/n, h]; the gradient is gathered."""
    return _differentiable(x, group, _scatter, _gather)


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor unchanged, to be used differently on each rank; its gradient is summed over the ranks."""
    return _differentiable(x, group, _same, _sum)


def sum_over_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks, equal on all of them; the gradient passes unchanged."""
    return _differentiable(x, group, _sum, _same)


def exchange_dims(x: Tensor, split: int, gather: int, group: dist.ProcessGroup) -> Tensor:
    """Split the dim `split` and gather the dim `gather` over the ranks; the gradient does the reverse."""
    there, back = (partial(_all_to_all, split=a, gather=b, group=group) for a, b in ((split, gather), (gather, split)))
    return with_transpose(x, there, back)


def all_reduce_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum each tensor over the ranks in place, all in one collective."""
    together = torch.cat([x.reshape(-1) for x in tensors])
    dist.all_reduce(together, group=group)
    for x, summed in zip(tensors, together.split([x.numel() for x in tensors]), strict=True):
        x.copy_(summed.view_as(x))


def _differentiable(x: Tensor, group: dist.ProcessGroup, there: GroupMove, back: GroupMove) -> Tensor:
    if group.size() == 1:
        return x
    return with_transpose(x, lambda x: there(x, group), lambda gradient: back(gradient, group))


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return gather_dim(x, _SEQUENCE_DIM, group)


def _scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return scatter_dim(x, _SEQUENCE_DIM, group)


def gather_dim(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, concatenated along a dim; without a gradient."""
    stacked = x.new_empty((group.size(), *x.shape))
    dist.all_gather_into_tensor(stacked.view(-1), x.contiguous().view(-1), group=group)
    return torch.cat(stacked.unbind(0), dim)


def scatter_dim(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part, along a dim, of the sum of a tensor over the ranks; without a gradient."""
    stacked = torch.stack(x.chunk(group.size(), dim))
    mine = torch.empty_like(stacked[0])
    dist.reduce_scatter_tensor(mine.view(-1), stacked.view(-1), group=group)
    return mine


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks, computed in place: no other code reads the input."""
    # A compiled graph copies only if it must. `detach`, because autograd would make a view of x itself.
    total = x.clone() if torch.compiler.is_compiling() else x.detach().contiguous()
    dist.all_reduce(total, group=group)
    return total


def _all_to_all(x: Tensor, split: int, gather: int, group: dist.ProcessGroup) -> Tensor:
    outgoing = torch.stack(x.chunk(group.size(), split))
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), group=group)
    return torch.cat(incoming.unbind(0), gather)


@contextmanager
def gathered_again(inputs: Sequence[Tensor], group: dist.ProcessGroup) -> Iterator[list[Tensor]]:
    """Yield tensors [b, s/n, h] of each rank as [b, s, h] on all, for the matrix products called inside.

    Only this rank's share of the gathered tensors is kept for the products' backward passes, which gather it again,
    once. The gradients are summed and scattered.
    """
    with gathered_again_by(inputs, partial(gather_sequence, group=group)) as gathered:
        yield gathered


@contextmanager
def gathered_again_by(inputs: Sequence[Tensor], gather: Move) -> Iterator[list[Tensor]]:
    """Yield tensors gathered by a differentiable function, for any function called inside; see `gathered_again`.

    `gather` must return tensors whose storages nothing else shares.
    """
    pack_around, unpack_around = hooks_around()
    shards = [_GatheredShard(pack_around(x.detach()), unpack_around, gather) for x in inputs]
    gathered = [shard.gathered(x) for shard, x in zip(shards, inputs, strict=True)]
    # Tensors are recognized by their storages, because matrix products keep views.
    owners = {id(x.untyped_storage()): shard for x, shard in zip(gathered, shards, strict=True)}

    def pack(x: Tensor) -> Any:
        shard = owners.get(id(x.untyped_storage()))
        return pack_around(x) if shard is None else _View(shard, x.size(), x.stride(), x.storage_offset())

    with saved_tensors_hooks(pack, lambda kept: kept.tensor() if isinstance(kept, _View) else unpack_around(kept)):
        yield gathered


class _GatheredShard:
    """This rank's shard of a gathered tensor, gathered from its first use in the backward pass to its last."""

    def __init__(self, shard: Any, unpack: Callable[[Any], Tensor], gather: Move) -> None:
        self._shard, self._unpack, self._gather = shard, unpack, gather
        self._regathered: Tensor | None = None

    def gathered(self, x: Tensor) -> Tensor:
        """Return `x` gathered, for the forward pass; differentiable."""
        return with_transpose(self._gather(x), lambda x: x, self._used)

    def regathered(self) -> Tensor:
        if self._regathered is None:
            with torch.no_grad():
                self._regathered = self._gather(self._unpack(self._shard))
        return self._regathered

    def _used(self, gradient: Tensor) -> Tensor:
        """Return the gathered tensor's gradient, and note that the tensor itself is no longer needed."""
        self._regathered = None
        return gradient


class _View(NamedTuple):
    """A view of a gathered tensor."""

    shard: _GatheredShard
    size: Any
    stride: Any
    offset: Any

    def tensor(self) -> Tensor:
        return self.shard.regathered().as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class RedistributionSite:
    """Where a redistribution takes place: `me`, an index in the `ranks` of a stage, and the size of the tensor."""

    ranks: tuple[int, ...]
    me: int
    samples: int
    length: int
    groups: Groups


class Redistribution:
    """The change from `source` to `target` layout for one rank of a pipeline stage.

    Called on this rank's shard [samples, positions, features] in the source layout, it returns the shard in the target
    layout; the gradient takes the reverse way. In a layout with replicas each replica has the full gradient.
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
    """Return the number of elements to exchange with each rank of the group."""
    return [sum(x.numel() for x in with_peer) for with_peer in tensors]


def window(piece: ActivationShard, full: ActivationShard) -> Window:
    """Return the slices of a piece inside the tensor of `full`, a larger part of the microbatch that contains it."""
    return (
        slice(piece.batch_start - full.batch_start, piece.batch_end - full.batch_start),
        slice(piece.sequence_start - full.sequence_start, piece.sequence_end - full.sequence_start),
    )
