"""Run by forked_ranks: rows go to the ranks of their experts and back, however many each rank sends and gets."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright_train.parallel.experts import dispatch, exchange
from shardwright_train.parallel.world import World, joined_world

RANKS, EXPERTS, CHOSEN, HIDDEN = 4, 8, 2, 3
SCALE = torch.tensor([2.0**i for i in range(EXPERTS)], dtype=torch.float64)
"""What each expert multiplies by."""
Grid = tuple[int, int]
"""Ranks that share experts out, and that share the features of each; the second are neighbours."""
GRIDS: tuple[Grid, ...] = ((4, 1), (2, 2), (1, 4), (2, 1), (1, 2))
Routing = Sequence[Tensor]
"""Experts of the positions of each rank [positions, CHOSEN]."""


def routings() -> Iterator[Routing]:
    """Even and skewed choices, as MoE systems are tried with: hot experts, hot ranks, idle ones, uneven sources."""
    yield [_drawn(5) for _ in range(RANKS)]
    yield [torch.tensor([[0, 1 + i % 7] for i in range(5)]) for _ in range(RANKS)]  # a hot expert
    yield [torch.tensor([[0, 1]] * 5) for _ in range(RANKS)]  # a hot rank: all others get nothing
    yield [torch.tensor([[0, 4], [2, 6]] * 3) for _ in range(RANKS)]  # hot experts, one of each rank
    yield [_drawn(3 * rank) for rank in range(RANKS)]  # uneven sources, of which one has nothing
    yield [_drawn(5 * (rank == 2)) for rank in range(RANKS)]  # a single source
    for hot in range(0, EXPERTS, 3):  # a hot spot that moves
        yield [torch.tensor([[hot, (hot + 1) % EXPERTS]] * (1 + rank)) for rank in range(RANKS)]
    yield [_drawn(0) for _ in range(RANKS)]


def _drawn(positions: int) -> Tensor:
    drawn = [torch.randperm(EXPERTS)[:CHOSEN] for _ in range(positions)]
    return torch.stack(drawn) if drawn else torch.empty(0, CHOSEN, dtype=torch.int64)


def groups_of(grid: Grid, rank: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The rank's groups of a grid [replicas, experts, features]."""
    lying = torch.arange(RANKS).view(-1, *grid)
    found: list[dist.ProcessGroup | None] = []
    for axis, size in ((1, grid[0]), (2, grid[1])):
        made = [(ranks, dist.new_group(ranks)) for ranks in lying.movedim(axis, -1).reshape(-1, size).tolist()]
        found.append(next(group for ranks, group in made if rank in ranks) if size > 1 else None)
    return found[0], found[1]


def compare(rank: int, index: Tensor, grid: Grid, groups: tuple[dist.ProcessGroup | None, ...]) -> None:
    """Ranks of an expert have shares of what it gives, which add up to its whole."""
    (parts, shares), positions = grid, len(index)
    x = torch.randn(positions, HIDDEN, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(positions, CHOSEN, dtype=torch.float64, requires_grad=True)
    counts = torch.bincount(index.reshape(-1), minlength=EXPERTS).to(torch.int32)
    rows = dispatch(index, counts)
    away = exchange(counts, len(rows.order), *groups, Tensor.tolist)
    part, share = rank // shares % parts, (1 + rank % shares) / sum(range(1, shares + 1))
    mine = SCALE.chunk(parts)[part] * share
    there = away.there(rows.sort(x)) * away.there(rows.sort_copies(weights))[:, None]
    results = there * mine.repeat_interleave(away.counts.tensor.long())[:, None]
    output = rows.collect(away.back(results))
    output.sum().backward()
    given, weighted = x.detach(), weights.detach()
    factors = weighted * SCALE[index]
    torch.testing.assert_close(output.detach(), given * factors.sum(1, keepdim=True))
    torch.testing.assert_close(x.grad, factors.sum(1, keepdim=True).expand_as(given))
    torch.testing.assert_close(weights.grad, given.sum(1, keepdim=True) * SCALE[index])


def run(world: World) -> None:
    for grid in GRIDS:
        groups = groups_of(grid, world.rank)
        torch.manual_seed(0)  # all ranks draw the same choices
        for routing in list(routings()):
            compare(world.rank, routing[world.rank], grid, groups)


def main() -> None:
    with joined_world("cpu") as world:
        run(world)
