"""Run by forked_ranks, four ranks: attention to keys of other ranks, and its gradients, are those of one process."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import inf
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from shardwright_train.parallel import context_gather
from shardwright_train.parallel.attention_blocks import Block
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.parallel.context_gather import GatherAttention
from shardwright_train.parallel.context_ring import RingAttention
from shardwright_train.parallel.context_shares import ContextShares, visible
from shardwright_train.parallel.world import joined_world

SAMPLES, HEADS, KV_HEADS, LENGTH, FEATURES, SCALE = 2, 6, 2, 48, 8, 0.3
CUTS = ((5, 17, 18, 40), (31,))
"""First positions of the documents of each sample but its first document."""


class Drawn(NamedTuple):
    """Queries, keys, values, and the gradient of the output, for all positions in their order."""

    inputs: tuple[Tensor, Tensor, Tensor]
    gradient: Tensor
    documents: Tensor


class Given(NamedTuple):
    """What is compared: how positions lie in memory and what they see."""

    order: Sequence[int]
    causal: bool
    documents: Tensor | None


def zig_zag(pairs: int) -> tuple[int, ...]:
    """Positions in memory order: of 2 x pairs equal chunks the first, the last, the second, and so on."""
    chunks = torch.arange(LENGTH).chunk(2 * pairs)
    return tuple(torch.cat([chunk for i in range(pairs) for chunk in (chunks[i], chunks[-1 - i])]).tolist())


def drawn(dtype: torch.dtype) -> Drawn:
    generator = torch.Generator().manual_seed(0)

    def rand(heads: int) -> Tensor:
        return torch.randn(SAMPLES, heads, LENGTH, FEATURES, generator=generator, dtype=torch.float64).to(dtype)

    documents = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    for sample, cuts in zip(documents, CUTS, strict=True):
        for cut in cuts:
            sample[cut:] += 1
    return Drawn((rand(HEADS), rand(KV_HEADS), rand(KV_HEADS)), rand(HEADS), documents)


def reference(given: Given, of: Drawn) -> list[Tensor]:
    """Output and gradients of q, k and v of plain attention in one process, by position."""
    query, key, value = (x.to(torch.float64, copy=True).requires_grad_() for x in of.inputs)
    positions = torch.arange(LENGTH)
    documents = None if given.documents is None else (given.documents, given.documents)
    seen = visible(positions, positions, given.causal, documents)
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    scores = (query @ keys.transpose(-1, -2) * SCALE).masked_fill(~seen, -inf)
    output = scores.softmax(-1) @ values
    output.backward(of.gradient.double())
    return [output.detach(), *(x.grad for x in (query, key, value))]  # type: ignore[misc]


def attention_of(
    kind: type, given: Given, group: dist.ProcessGroup, dtype: torch.dtype = torch.float64, **options: object
) -> Any:
    """The attention of one kind over a group, which reduces in float32 at least."""
    reduce = torch.promote_types(dtype, torch.float32)
    return kind(ContextShares(given.order, group.size()), group, given.causal, reduce, torch.device("cpu"), **options)


def attended(kind: type, given: Given, of: Drawn, group: dist.ProcessGroup) -> tuple[list[Tensor], Tensor]:
    """Output and gradients of this rank's positions, and these."""
    attention, order = attention_of(kind, given, group, of.gradient.dtype), torch.tensor(given.order)
    mine = order.chunk(group.size())[group.rank()]
    inputs = [x[:, :, mine].clone().requires_grad_() for x in of.inputs]
    documents = None if given.documents is None else given.documents[:, order]
    output = attention(*inputs, SCALE, documents)
    output.backward(of.gradient[:, :, mine])
    return [output.detach(), *(x.grad for x in inputs)], mine


def worst(kind: type, given: Given, of: Drawn, group: dist.ProcessGroup) -> float:
    """The largest error of output and gradients on any rank of the world, relative to the largest number."""
    parts, mine = attended(kind, given, of, group)
    whole = [x[:, :, mine] for x in reference(given, of)]
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(parts, whole, strict=True)]
    error = torch.tensor(max(errors))
    dist.all_reduce(error, dist.ReduceOp.MAX)
    return float(error)


def compared(documents: Tensor) -> Iterator[Given]:
    """Zig-zag for as many ranks as there are, for fewer and for more; then positions in order."""
    for pairs in (4, 2, 8):
        yield from (Given(zig_zag(pairs), True, numbers) for numbers in (None, documents))
    in_order = tuple(range(LENGTH))
    yield from (Given(in_order, causal, numbers) for causal in (True, False) for numbers in (None, documents))


def check_the_wrong_corner(of: Drawn, group: dist.ProcessGroup) -> None:
    """A causal mask that is aligned at the upper left, as `is_causal` is, shows here: keys are more than queries."""
    context_gather.causal_lower_right = causal_upper_left
    error = worst(GatherAttention, Given(zig_zag(4), True, None), of, group)
    context_gather.causal_lower_right = causal_lower_right
    assert error > 0.1, error


def check_order(of: Drawn, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends begin before the block that they overlap with, and nothing is sent but what is needed."""
    events = list[str]()
    for kind, name in ((RingAttention, "pass_on"), (Block, "attend"), (Block, "backward")):
        monkeypatch.setattr(kind, name, noting(events, name, getattr(kind, name)))
    attended(RingAttention, Given(zig_zag(4), True, None), of, group)
    forward = ["pass_on", "attend"] * 3 + ["attend"]
    backward = ["pass_on", "backward", "pass_on"] * 3 + ["backward", "pass_on"]
    assert events == forward + backward, events
    events.clear()
    recomputation = Recomputation(keeps_last=True)
    ring = attention_of(RingAttention, Given(zig_zag(4), True, None), group, keep=recomputation.whole)
    inputs = [x.chunk(group.size(), 2)[group.rank()].clone().requires_grad_() for x in of.inputs]
    outputs = [ring(*inputs, SCALE), recomputation.selective(lambda *inputs: ring(*inputs, SCALE).sin(), *inputs)]
    wanted, gradients = (torch.autograd.grad(x.sum(), inputs) for x in (outputs[0].sin(), outputs[1]))
    torch.testing.assert_close(gradients, wanted, rtol=0, atol=0)
    assert events == forward * 2 + backward * 2, "no block is computed again, and nothing sent"


def check_gathered_again(of: Drawn, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """One gather in the forward pass and one in the backward pass, whatever is computed with what they gather."""
    events = list[str]()
    monkeypatch.setattr(context_gather, "gather_dim", noting(events, "gather", context_gather.gather_dim))
    attended(GatherAttention, Given(zig_zag(4), True, None), of, group)
    assert events == ["gather"] * 2, events
    keeps = attention_of(GatherAttention, Given(zig_zag(4), True, None), group, keeps=True)
    query, *others = (x.chunk(group.size(), 2)[group.rank()].clone().requires_grad_() for x in of.inputs)
    keeps(query, *others, SCALE).sum().backward()
    assert events == ["gather"] * 3, events


def noting(events: list[str], name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        events.append(name)
        return stock(*args, **kwargs)

    return noted


def main() -> None:
    with joined_world("cpu") as world, pytest.MonkeyPatch.context() as monkeypatch:
        pairs = [dist.new_group([i, i + 1]) for i in range(0, world.size, 2)]
        everyone, of = dist.group.WORLD, drawn(torch.float64)
        assert everyone is not None
        for group in (everyone, pairs[world.rank // 2]):
            for given, kind in product(compared(of.documents), (GatherAttention, RingAttention)):
                error = worst(kind, given, of, group)
                assert error < 1e-10, (kind, given.causal, given.documents is not None, error)
        short = drawn(torch.bfloat16)
        for given, kind in product(compared(of.documents), (GatherAttention, RingAttention)):
            assert worst(kind, given, short, everyone) < 0.05, (kind, given)
        check_the_wrong_corner(of, everyone)
        check_order(of, everyone, monkeypatch)
        check_gathered_again(of, everyone, monkeypatch)
