"""Moving activations from one layout to another with one uneven all_to_all, and their gradients back."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright_formats.semantics.layout import ActivationShard, Layout, closed_groups, redistribution_plan
from shardwright_train.parallel.process_groups import Groups

__all__ = ["Redistribution"]


class Redistribution:
    """The change from `source` to `target` layout for one rank of a pipeline stage.

    Called on [samples, positions, features] of the source's rectangle, it returns the target's; the gradient takes the
    reverse way. A layout that holds copies expects the full gradient on each of them, and gives it.
    """

    def __init__(
        self, source: Layout, target: Layout, samples: int, length: int, ranks: tuple[int, ...], me: int, groups: Groups
    ) -> None:
        self.forward_move = _Move(source, target, samples, length, ranks, me, groups)
        self.backward_move = _Move(target, source, samples, length, ranks, me, groups)

    def __call__(self, x: Tensor) -> Tensor:
        """Move a tensor; differentiable."""
        moved: Tensor = _Moved.apply(x, self.forward_move, self.backward_move)  # type: ignore[no-untyped-call]
        return moved


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: "_Move", back: "_Move") -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


class _Move:
    """One direction: which pieces this rank keeps, sends and receives."""

    def __init__(
        self, source: Layout, target: Layout, samples: int, length: int, ranks: tuple[int, ...], me: int, groups: Groups
    ) -> None:
        members = next(group for group in closed_groups(source, target, samples, length) if me in group)
        index = {rank: i for i, rank in enumerate(members)}
        every = redistribution_plan(source, target, samples, length)
        mine_before = source.activation_shard(me, samples, length)
        mine_after = target.activation_shard(me, samples, length)
        self.size = len(members)
        self.group = groups.among("redistribute", (ranks[i] for i in members)) if self.size > 1 else None
        self.shape = (
            mine_after.batch_end - mine_after.batch_start,
            mine_after.sequence_end - mine_after.sequence_start,
        )
        self.kept = [
            (_window(r.piece, mine_before), _window(r.piece, mine_after)) for r in every if r.source == r.target == me
        ]
        sends = sorted((r for r in every if r.source == me != r.target), key=lambda r: index[r.target])
        receives = sorted((r for r in every if r.target == me != r.source), key=lambda r: index[r.source])
        self.sends = [(index[r.target], _window(r.piece, mine_before), r.piece.tokens) for r in sends]
        self.receives = [(index[r.source], _window(r.piece, mine_after), r.piece.tokens) for r in receives]

    def __call__(self, x: Tensor) -> Tensor:
        features = x.shape[2:]
        width = features.numel()
        out = x.new_empty(self.shape + features)
        for before, after in self.kept:
            out[after] = x[before]
        if self.group is None:
            return out
        send_counts, receive_counts = [0] * self.size, [0] * self.size
        for peer, _, tokens in self.sends:
            send_counts[peer] += tokens * width
        for peer, _, tokens in self.receives:
            receive_counts[peer] += tokens * width
        pieces = [x[window].reshape(-1) for _, window, _ in self.sends]
        outgoing = torch.cat(pieces) if pieces else x.new_empty(0)
        incoming = x.new_empty(sum(receive_counts))
        dist.all_to_all_single(incoming, outgoing, receive_counts, send_counts, group=self.group)
        for (_, window, _), piece in zip(
            self.receives, incoming.split([tokens * width for _, _, tokens in self.receives]), strict=True
        ):
            out[window] = piece.view(out[window].shape)
        return out


def _window(piece: ActivationShard, whole: ActivationShard) -> tuple[slice, slice]:
    return (
        slice(piece.batch_start - whole.batch_start, piece.batch_end - whole.batch_start),
        slice(piece.sequence_start - whole.sequence_start, piece.sequence_end - whole.sequence_start),
    )
