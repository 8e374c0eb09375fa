"""Run by forked_ranks: rows go to the ranks of their experts and back, however many each rank sends and gets."""

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright_train.parallel.experts import dispatch, exchange
from shardwright_train.parallel.world import joined_world

EXPERTS, CHOSEN, POSITIONS, HIDDEN = 4, 2, 5, 3
SCALE = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
"""What each expert multiplies by; each of two ranks has two of them."""


def cases() -> list[list[tuple[Tensor, Tensor, Tensor]]]:
    """Positions, experts and weights of both ranks."""
    drawn = [_drawn(EXPERTS), _drawn(EXPERTS)]
    empty = [tuple(x[:0] for x in each) for each in drawn]
    no_rows_for_the_second = [_drawn(EXPERTS // 2), _drawn(EXPERTS // 2)]
    return [drawn, no_rows_for_the_second, [drawn[0], empty[1]], [empty[0], drawn[1]], empty]  # type: ignore[list-item]


def _drawn(experts: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(POSITIONS, HIDDEN, dtype=torch.float64)
    index = torch.stack([torch.randperm(experts)[:CHOSEN] for _ in range(POSITIONS)])
    return x, index, torch.rand(POSITIONS, CHOSEN, dtype=torch.float64)


def compare(rank: int, x: Tensor, index: Tensor, weights: Tensor, is_whole: bool) -> None:
    """Two ranks have two experts each, or a share of what each of all experts gives; their shares add up to 1."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    counts = torch.bincount(index.reshape(-1), minlength=EXPERTS).to(torch.int32)
    rows, groups = dispatch(index, counts), (dist.group.WORLD, None)
    away = exchange(counts, len(rows.order), *groups if is_whole else groups[::-1])
    scale = SCALE[2 * rank : 2 * rank + 2] if is_whole else SCALE * (0.25 + 0.5 * rank)
    mine = scale.repeat_interleave(away.counts.long())
    there = away.there(rows.sort(x)) * (away.there(rows.sort_copies(weights)) * mine)[:, None]
    output = rows.collect(away.back(there))
    output.sum().backward()
    given, weighted = x.detach(), weights.detach()
    factors = weighted * SCALE[index]
    torch.testing.assert_close(output.detach(), given * factors.sum(1, keepdim=True))
    torch.testing.assert_close(x.grad, factors.sum(1, keepdim=True).expand_as(given))
    torch.testing.assert_close(weights.grad, given.sum(1, keepdim=True) * SCALE[index])


def main() -> None:
    with joined_world("cpu") as world:
        torch.manual_seed(0)  # the same on both ranks
        for case in cases():
            for is_whole in (True, False):
                compare(world.rank, *case[world.rank], is_whole)


if __name__ == "__main__":
    main()
