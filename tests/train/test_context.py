"""Attention over a context-parallel group: which rank sees what, and that gather and ring come to whole attention."""

from collections.abc import Sequence
from math import inf

import pytest
import torch
import torch.distributed as dist
from context_worker import LENGTH, zig_zag
from forked_ranks import run_worker

from shardwright.plan.process_groups import PlannedGroup, Purpose
from shardwright.types.hardware_profile import Collective
from shardwright_train.dry_run import Traffic, _SentBytes, _simulated_world
from shardwright_train.parallel.attention_blocks import Attended, Block, nothing_attended
from shardwright_train.parallel.context import (
    ContextShares,
    GatherAttention,
    Rectangle,
    RingAttention,
    StandIn,
    StandInAttention,
    visible,
)
from shardwright_train.parallel.process_groups import _send_a_number
from shardwright_train.torch_private import FakeTensorMode

IN_ORDER = tuple(range(LENGTH))


def test_gather_and_ring_come_to_attention_in_one_process() -> None:
    run_worker("context_worker", [], 4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_stands_for_one_of_several_with_keys_of_its_own_in_place_of_theirs(size: int, causal: bool) -> None:
    """As stock attention of the rank's rows to repeated keys; gradients of keys are those of its place."""
    order = torch.tensor(zig_zag(size)) if causal else None
    stand_in = StandIn(size, order)
    positions = list(range(LENGTH)) if order is None else order.tolist()
    given = stand_in.group, causal, torch.float64, torch.device("cpu")
    attention = StandInAttention(ContextShares(positions, size), *given)
    assert attention.group.rank() == (size - 1) // 2
    generator = torch.Generator().manual_seed(size)
    share = LENGTH // size
    query = torch.randn(2, 4, share, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    key, value = (
        torch.randn(2, 2, share, 8, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(2)
    )
    first = attention.group.rank() * share
    rows, places = torch.tensor(positions[first : first + share]), torch.tensor(positions)
    keys, values = (x.detach().repeat(1, 1, size, 1).requires_grad_() for x in (key, value))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, visible(rows, places, causal, None), scale=0.3, enable_gqa=True
    )
    output = attention(query, key, value, 0.3)
    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-12)
    gradient = torch.randn(output.shape, dtype=torch.float64, generator=generator)
    asked = torch.autograd.grad(wanted, (query, keys, values), gradient)
    mine = (asked[0], *(x[:, :, first : first + share] for x in asked[1:]))
    for made, other in zip(torch.autograd.grad(output, (query, key, value), gradient), mine, strict=True):
        torch.testing.assert_close(made, other, rtol=0, atol=1e-12)


def pairs_seen(order: Sequence[int], size: int) -> list[int]:
    """Pairs of a query and a key that it sees, by rank."""
    shares = ContextShares(order, size)
    return [sum(position + 1 for position in shares.positions(rank)) for rank in range(size)]


@pytest.mark.parametrize(("pairs", "size"), [(4, 4), (4, 2), (8, 4), (8, 2), (8, 8)])
def test_each_rank_sees_as_much_in_zig_zag_order(pairs: int, size: int) -> None:
    assert len(set(pairs_seen(zig_zag(pairs), size))) == 1
    assert pairs_seen(IN_ORDER, 4) == [78, 222, 366, 510]


@pytest.mark.parametrize(("pairs", "size"), [(4, 4), (8, 4), (4, 2)])
def test_steps_of_a_causal_ring_have_equal_work_and_need_no_mask(pairs: int, size: int) -> None:
    shares = ContextShares(zig_zag(pairs), size)
    half, full = LENGTH // size // 2, LENGTH // size
    for rank in range(size):
        assert shares.rectangle(rank, rank, causal=True) == Rectangle(slice(0, full), slice(0, full), True, False)
        for source in set(range(size)) - {rank}:
            queries, keys = (0, half) if source < rank else (half, full)
            wanted = Rectangle(slice(queries, full), slice(0, keys), False, True)
            assert shares.rectangle(rank, source, causal=True) == wanted


def test_shares_in_order_see_all_of_earlier_ranks_and_nothing_of_later_ones() -> None:
    shares = ContextShares(IN_ORDER, 4)
    whole = slice(0, LENGTH // 4)
    assert shares.rectangle(2, 1, causal=True) == Rectangle(whole, whole, False, True)
    assert shares.rectangle(1, 2, causal=True) is None
    assert shares.rectangle(1, 2, causal=False) == Rectangle(whole, whole, False, True)


def test_in_a_rectangle_of_another_order_lies_all_that_is_seen() -> None:
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    shares = ContextShares(order.tolist(), 4)
    for rank, source in ((0, 1), (1, 0), (3, 2), (2, 2)):
        queries, keys, *_ = shares.rectangle(rank, source, causal=True) or (slice(0), slice(0))
        positions = (torch.tensor(shares.positions(each)) for each in (rank, source))
        seen = visible(*positions, True, None)[0, 0]
        assert seen.sum() == seen[queries, keys].sum() > 0


def test_runs_of_a_rank_are_its_chunks_and_end_where_the_keys_that_they_see_do() -> None:
    assert list(ContextShares(zig_zag(4), 4).runs(1)) == [(slice(0, 6), 12), (slice(6, 12), 42)]
    assert list(ContextShares(zig_zag(8), 4).runs(1)) == [(slice(0, 6), 12), (slice(6, 12), 42)]
    assert list(ContextShares(IN_ORDER, 4).runs(1)) == [(slice(0, 12), 24)]


def test_a_query_that_sees_nothing_is_zero_and_no_number_is_missing() -> None:
    generator = torch.Generator().manual_seed(0)
    query, gradient = (torch.randn(1, 4, 3, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    key, value = (torch.randn(1, 2, 5, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    seen = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    seen[..., 1, :] = False
    block, total = Block(0.3, seen=seen), nothing_attended(query, 8)
    for _ in range(2):  # nothing, merged with nothing
        total.add(Block(0.3, seen=torch.zeros_like(seen)).attend(query, key, value))
    assert total.logsumexp.eq(-inf).all() and total.output.eq(0).all()
    total.add(block.attend(query, key, value))
    assert total.output[:, :, 1].eq(0).all() and total.logsumexp[:, :, 1].eq(-inf).all()
    dq, dk, dv = block.backward(gradient, query, key, value, total)
    assert dq[:, :, 1].eq(0).all()
    rows = torch.tensor([0, 2])
    attended = Attended(total.output[:, :, rows], total.logsumexp[:, :, rows])
    without = Block(0.3).backward(gradient[:, :, rows], query[:, :, rows], key, value, attended)
    torch.testing.assert_close((dq[:, :, rows], dk, dv), without)


def test_rows_of_a_mask_lie_as_far_apart_as_the_memory_efficient_kernel_asks() -> None:
    """No GPU is here: its kernel takes rows that begin at multiples of 8 numbers alone."""
    seen = torch.rand(2, 1, 3, 13, generator=torch.Generator().manual_seed(0)) < 0.5
    bias = Block(0.3, seen=seen)._bias(torch.zeros(2, 4, 3, 8))
    assert bias is not None and bias.shape == (2, 4, 3, 13)
    assert all(stride % 8 == 0 for stride in bias.stride()[:-1]) and bias.stride(-1) == 1
    assert torch.equal(bias[:, 1] == 0, seen[:, 0])


@pytest.mark.parametrize(
    ("dtype", "features", "capability", "is_flash"),
    [
        (torch.bfloat16, 128, (9, 0), True),
        (torch.float32, 128, (9, 0), False),
        (torch.float16, 128, (7, 5), False),
        (torch.bfloat16, 20, (9, 0), False),
        (torch.bfloat16, 512, (9, 0), False),
    ],
)
def test_the_flash_kernel_is_called_with_what_it_computes_alone(
    dtype: torch.dtype, features: int, capability: tuple[int, int], is_flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stand-in for a device: no GPU is here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert Block(0.3)._is_flash(torch.zeros(1, 2, 3, features, dtype=dtype)) is is_flash


@pytest.mark.parametrize(("kind", "sent"), [(RingAttention, (3 + 3) * 4 + 4 * 8), (GatherAttention, 0)])
def test_a_simulated_step_knows_what_a_group_of_four_sends(kind: type, sent: int) -> None:
    """Ring: keys and values go round forward and backward, and behind them their gradients, in float64."""
    shares = ContextShares(zig_zag(4), 4)
    with _simulated_world(1, 4), FakeTensorMode(), _SentBytes() as counted:
        group = dist.group.WORLD
        attention = kind(shares, group, True, torch.float64, torch.device("cpu"))
        query = torch.zeros(2, 6, LENGTH // 4, 8, requires_grad=True)
        key, value = (torch.zeros(2, 2, LENGTH // 4, 8, requires_grad=True) for _ in range(2))
        attention(query, key, value, 0.3).sum().backward()
    share, messages = 2 * key.numel(), dict(counted.bytes)
    assert messages.pop(Traffic(Collective.P2P, 2), 0) == sent * share
    if kind is GatherAttention:
        gathers, scatters = (messages.pop(Traffic(Collective[name], 4)) for name in ("ALL_GATHER", "REDUCE_SCATTER"))
        assert (gathers, scatters) == (2 * 4 * 4 * share, 4 * 8 * share)
    assert messages == {}


def test_ranks_that_share_positions_are_connected_as_a_ring_before_a_step() -> None:
    """Connections that NCCL makes in the midst of a schedule could wait for a receive that was posted ahead."""
    with _simulated_world(1, 4), FakeTensorMode(), _SentBytes() as counted:
        assert dist.group.WORLD is not None
        _send_a_number(PlannedGroup(Purpose.CONTEXT, (0, 1, 2, 3)), dist.group.WORLD, torch.zeros(1))
    assert Traffic(Collective.P2P, 2) in counted.bytes and Traffic(Collective.ALL_REDUCE, 4) in counted.bytes
