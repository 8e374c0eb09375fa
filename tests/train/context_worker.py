"""Run by forked_ranks, four ranks: attention to keys of other ranks, and its gradients, are those of one process."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import inf
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shardwright_train.parallel import context
from shardwright_train.parallel.attention_blocks import Block, Piece
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.parallel.context import ContextShares, GatherAttention, RingAttention, visible
from shardwright_train.parallel.world import joined_world

SAMPLES, HEADS, KV_HEADS, LENGTH, FEATURES, SCALE = 2, 6, 2, 48, 8, 0.3
NARROW, WIDE = 5, 11
"""Features of values that have others than queries."""
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


def drawn(dtype: torch.dtype, of_values: int = FEATURES) -> Drawn:
    generator = torch.Generator().manual_seed(0)

    def rand(heads: int, features: int) -> Tensor:
        return torch.randn(SAMPLES, heads, LENGTH, features, generator=generator, dtype=torch.float64).to(dtype)

    documents = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    for sample, cuts in zip(documents, CUTS, strict=True):
        for cut in cuts:
            sample[cut:] += 1
    inputs = rand(HEADS, FEATURES), rand(KV_HEADS, FEATURES), rand(KV_HEADS, of_values)
    return Drawn(inputs, rand(HEADS, of_values), documents)


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


def check_the_wrong_corner(of: Drawn, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal mask that is aligned at the upper left, as that of more keys than queries is on CPU, shows here."""

    def in_one(run: slice, end: int, scale: float) -> Iterator[Piece]:
        yield Piece(run, slice(0, end), Block(scale, is_causal=True))

    with monkeypatch.context() as patched:
        patched.setattr(context, "_causal", in_one)
        error = worst(GatherAttention, Given(zig_zag(4), True, None), of, group)
    assert error > 0.1, error


def events_of(attention: GatherAttention | RingAttention) -> list[str]:
    """What a forward and a backward pass do: sends begin before the block that they overlap with."""
    if isinstance(attention, GatherAttention):
        blocks = len(attention.pieces(SCALE))
        return ["gather", *["attend"] * blocks, "gather", *["backward"] * blocks, "scatter"]
    forward, backward = ["send", "attend"] * 3 + ["attend"], ["send", "backward", "send"] * 3 + ["backward", "send"]
    return forward + backward


def check_order(of: Drawn, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass does what it must, once; selective recomputation computes no block again and sends nothing."""
    events, given = list[str](), Given(zig_zag(4), True, None)
    places = (context, "pass_on", "send"), (context, "gather_dim", "gather")
    blocks = (Block, "attend", "attend"), (Block, "backward", "backward")
    for place, name, event in (*places, *blocks, (context, "scatter_dim", "scatter")):
        monkeypatch.setattr(place, name, noting(events, event, getattr(place, name)))
    inputs = [x.chunk(group.size(), 2)[group.rank()].clone().requires_grad_() for x in of.inputs]
    for kind in (GatherAttention, RingAttention):
        attention = attention_of(kind, given, group)
        wanted = torch.autograd.grad(attention(*inputs, SCALE).sin().sum(), inputs)
        assert events == (once := events_of(attention)), events
        events.clear()
        recomputation = Recomputation(keeps_last=True)
        kept = attention_of(kind, given, group, keep=recomputation.whole)
        output = recomputation.selective(lambda *inputs, kept=kept: kept(*inputs, SCALE).sin(), *inputs)
        gradients = torch.autograd.grad(output.sum(), inputs)
        assert events == once, events
        torch.testing.assert_close(gradients, wanted, rtol=0, atol=0)
        events.clear()
    attention_of(GatherAttention, given, group, keeps=True)(*inputs, SCALE).sum().backward()
    assert events.count("gather") == 1, events


def check_any_kernel(of: Drawn, group: dist.ProcessGroup) -> None:
    """Any kernel can be called with gathered keys and values, and a mask."""
    given = Given(zig_zag(4), True, of.documents)
    attention, order = attention_of(GatherAttention, given, group), torch.tensor(given.order)
    mine = order.chunk(group.size())[group.rank()]
    inputs = [x[:, :, mine].clone().requires_grad_() for x in of.inputs]
    query, key, value = inputs
    with attention.gathered(key, value) as (keys, values):
        seen = attention.seen(of.documents[:, order])
        output = scaled_dot_product_attention(query, keys, values, seen, scale=SCALE, enable_gqa=True)
    output.backward(of.gradient[:, :, mine])
    for x, whole in zip([output, *(x.grad for x in inputs)], reference(given, of), strict=True):
        torch.testing.assert_close(x, whole[:, :, mine], rtol=0, atol=1e-12)


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
        for other, kind in product((drawn(torch.float64, n) for n in (NARROW, WIDE)), (GatherAttention, RingAttention)):
            for numbers in (None, other.documents):
                assert worst(kind, Given(zig_zag(4), True, numbers), other, everyone) < 1e-10, (kind, numbers)
        check_any_kernel(drawn(torch.float64, NARROW), everyone)
        check_the_wrong_corner(of, everyone, monkeypatch)
        check_any_kernel(of, everyone)
        check_order(of, everyone, monkeypatch)
