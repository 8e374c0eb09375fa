"""Groups, activation shards and redistribution plans against brute force over every element."""

from collections import Counter
from itertools import pairwise
from math import lcm

from hypothesis import given
from hypothesis import strategies as st

from shardwright.plan.axes import ActivationShard, Layout, layout_of
from shardwright.plan.layout import Transfer, closed_groups, redistribution_plan, sent_numel
from shardwright.types import SequenceParallel, Strategy

SIZES = (1, 2, 3, 4, 6, 8)
FEATURES = 3


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _layouts(size: int) -> st.SearchStrategy[Layout]:
    return st.builds(
        lambda degrees, consecutive, sequence: layout_of(
            Strategy(
                tp_size=degrees[0],
                cp_size=degrees[1],
                dp_size=size // degrees[0] // degrees[1],
                tp_consecutive=consecutive or degrees[1] > 1,
                sequence_parallel=sequence,
            )
        ),
        st.sampled_from([(tp, cp) for tp in _divisors(size) for cp in _divisors(size // tp)]),
        st.booleans(),
        st.sampled_from(list(SequenceParallel)),
    )


@st.composite
def changes(draw: st.DrawFn) -> tuple[Layout, Layout, int, int]:
    """Two layouts of one stage, with samples and a sequence length that both can share out."""
    size = draw(st.sampled_from(SIZES))
    return (
        draw(_layouts(size)),
        draw(_layouts(size)),
        size * draw(st.integers(1, 2)),
        size * draw(st.integers(1, 2)),
    )


def _elements(piece: ActivationShard) -> set[tuple[int, int]]:
    return {
        (sample, position)
        for sample in range(piece.batch_start, piece.batch_end)
        for position in range(piece.sequence_start, piece.sequence_end)
    }


def _held(layout: Layout, rank: int, samples: int, length: int) -> set[tuple[int, int]]:
    return _elements(layout.activation_shard(rank, samples, length))


@given(changes())
def test_the_ranks_of_a_layout_hold_a_microbatch_as_often_as_it_is_copied(
    change: tuple[Layout, Layout, int, int],
) -> None:
    layout, _, samples, length = change
    held = Counter(e for rank in range(layout.stage_size) for e in _held(layout, rank, samples, length))
    copies = layout.replicas
    assert held == {(sample, position): copies for sample in range(samples) for position in range(length)}


@given(changes())
def test_a_tensor_parallel_group_shares_samples_and_groups_have_others(
    change: tuple[Layout, Layout, int, int],
) -> None:
    layout, _, samples, length = change
    for dp_index in range(layout.samples.size):
        for tp_index, rank in enumerate(layout.holders(dp_index)):
            assert (layout.samples.part_of(rank), layout.sharers.part_of(rank)) == (dp_index, tp_index)
            shard = layout.activation_shard(rank, samples, length)
            assert shard.batch_start == dp_index * samples // layout.samples.size
            assert shard.batch_end - shard.batch_start == samples // layout.samples.size
            assert shard.tokens == len(_elements(shard))


def _served_once(source: Layout, target: Layout, samples: int, length: int) -> None:
    """Every element of the target comes once, from one who holds it."""
    served: Counter[tuple[int, tuple[int, int]]] = Counter()
    for transfer in redistribution_plan(source, target, samples, length):
        assert _elements(transfer.piece) <= _held(source, transfer.source, samples, length)
        served.update((transfer.target, element) for element in _elements(transfer.piece))
    wanted = {(rank, e) for rank in range(target.stage_size) for e in _held(target, rank, samples, length)}
    assert served == dict.fromkeys(wanted, 1)


@given(changes())
def test_redistribution_plans_serve_every_element_of_the_target_exactly_once_from_one_who_holds_it(
    change: tuple[Layout, Layout, int, int],
) -> None:
    _served_once(*change)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Layout, Layout, int, int]:
    """Layouts on both sides of a cut between pipeline stages of unequal width."""
    before, after = draw(st.lists(st.sampled_from(SIZES), min_size=2, max_size=2, unique=True))
    whole = lcm(before, after)
    return draw(_layouts(before)), draw(_layouts(after)), whole * draw(st.integers(1, 2)), whole


@given(cuts())
def test_between_stages_of_unequal_width_every_element_is_served_once_and_nobody_asked_twice(
    cut: tuple[Layout, Layout, int, int],
) -> None:
    _served_once(*cut)
    pairs = Counter((t.source, t.target) for t in redistribution_plan(*cut))
    assert set(pairs.values()) == {1}


@given(cuts())
def test_between_stages_of_unequal_width_replicas_take_turns_and_all_that_is_sent_is_counted(
    cut: tuple[Layout, Layout, int, int],
) -> None:
    source, target, samples, length = cut
    sent = Counter({rank: 0 for rank in range(source.stage_size)})
    pieces = Counter(sent)
    for transfer in redistribution_plan(source, target, samples, length):
        pieces[transfer.source] += 1
        sent[transfer.source] += FEATURES * transfer.piece.tokens
    assert sent_numel(source, target, samples, length, FEATURES) == tuple(sent[rank] for rank in sorted(sent))
    for dp_index in range(source.samples.size):
        for group in source.replica_groups(dp_index):
            replicas = [pieces[rank] for rank in group]
            assert max(replicas) <= min(replicas) + 1


@given(changes())
def test_a_layout_sends_itself_its_shards(change: tuple[Layout, Layout, int, int]) -> None:
    layout, _, samples, length = change
    shards = [Transfer(i, i, layout.activation_shard(i, samples, length)) for i in range(layout.stage_size)]
    assert list(redistribution_plan(layout, layout, samples, length)) == shards


@given(changes())
def test_a_rank_serves_itself_whatever_it_holds(change: tuple[Layout, Layout, int, int]) -> None:
    source, target, samples, length = change
    kept: dict[int, set[tuple[int, int]]] = {rank: set() for rank in range(source.stage_size)}
    for transfer in redistribution_plan(source, target, samples, length):
        if transfer.source == transfer.target:
            kept[transfer.target] |= _elements(transfer.piece)
    for rank, elements in kept.items():
        assert elements == _held(source, rank, samples, length) & _held(target, rank, samples, length)


@given(changes())
def test_values_come_back_to_where_they_were(change: tuple[Layout, Layout, int, int]) -> None:
    source, target, samples, length = change
    there = _moved(
        source, target, samples, length, [_held(source, r, samples, length) for r in range(source.stage_size)]
    )
    back = _moved(target, source, samples, length, there)
    assert back == [_held(source, rank, samples, length) for rank in range(source.stage_size)]


def _moved(
    source: Layout, target: Layout, samples: int, length: int, held: list[set[tuple[int, int]]]
) -> list[set[tuple[int, int]]]:
    received: list[set[tuple[int, int]]] = [set() for _ in held]
    for transfer in redistribution_plan(source, target, samples, length):
        received[transfer.target] |= held[transfer.source] & _elements(transfer.piece)
    return received


@given(changes())
def test_closed_groups_are_closed_and_cannot_be_cut_further(change: tuple[Layout, Layout, int, int]) -> None:
    source, target, samples, length = change
    groups = closed_groups(source, target, samples, length)
    assert sorted(rank for group in groups for rank in group) == list(range(source.stage_size))
    there = redistribution_plan(source, target, samples, length)
    back = redistribution_plan(target, source, samples, length)
    edges = {
        frozenset((transfer.source, transfer.target))
        for transfer in there + back + redistribution_plan(target, source, samples, length)
    }
    for group in groups:
        for edge in edges:
            assert edge <= set(group) or not edge & set(group)
        assert _reached_from(group[0], edges) == set(group)


def _reached_from(rank: int, edges: set[frozenset[int]]) -> set[int]:
    reached = {rank}
    while grown := {r for edge in edges if edge & reached for r in edge} - reached:
        reached |= grown
    return reached


@given(changes())
def test_closed_groups_are_the_same_in_either_direction(change: tuple[Layout, Layout, int, int]) -> None:
    source, target, samples, length = change
    assert closed_groups(source, target, samples, length) == closed_groups(target, source, samples, length)


@given(st.sampled_from(SIZES), st.booleans(), st.data())
def test_tensor_and_data_parallel_groups_form_a_grid(size: int, consecutive: bool, data: st.DataObject) -> None:
    tp_size = data.draw(st.sampled_from(_divisors(size)))
    ranks = data.draw(st.permutations(range(10, 10 + size)))
    layout = Layout(size, tp_size, consecutive, 1)
    rows, columns = layout.sharers.groups(ranks), layout.samples.groups(ranks)
    assert rows == tuple(tuple(ranks[i] for i in layout.holders(part)) for part in range(size // tp_size))
    assert {len(row) for row in rows} == {tp_size}
    assert {len(column) for column in columns} == {size // tp_size}
    assert sorted(rank for row in rows for rank in row) == sorted(ranks)
    for row in rows:
        for column in columns:
            assert len(set(row) & set(column)) == 1
    neighbours = [ranks.index(b) - ranks.index(a) for row in rows for a, b in pairwise(row)]
    assert set(neighbours) <= {1 if consecutive else size // tp_size}


@given(changes())
def test_sent_numel_count_what_leaves_a_rank(change: tuple[Layout, Layout, int, int]) -> None:
    source, target, samples, length = change
    sent = [0] * source.stage_size
    for transfer in redistribution_plan(source, target, samples, length):
        sent[transfer.source] += FEATURES * len(_elements(transfer.piece)) * (transfer.source != transfer.target)
    assert sent_numel(source, target, samples, length, FEATURES) == tuple(sent)


@given(st.sampled_from(SIZES), st.data())
def test_between_data_parallel_and_a_split_sequence_each_rank_keeps_its_share(size: int, data: st.DataObject) -> None:
    """V * (1 - min/max) elements leave each rank, with V its shard, when one of the two tp sizes is 1."""
    tp_size = data.draw(st.sampled_from(_divisors(size)))
    alone, split = (Layout(size, tp, True, tp) for tp in (1, tp_size))
    shard = size * size * FEATURES // size
    for source, target in ((alone, split), (split, alone)):
        assert sent_numel(source, target, size, size, FEATURES) == (shard - shard // tp_size,) * size


@given(st.sampled_from(SIZES), st.data())
def test_between_two_split_sequences_a_rank_sends_its_shard_or_keeps_one_share(size: int, data: st.DataObject) -> None:
    few, many = (data.draw(st.sampled_from(_divisors(size))) for _ in range(2))
    source, target = (Layout(size, tp, True, tp) for tp in (few, many))
    shard = size * size * FEATURES // size
    for sent in sent_numel(source, target, size, size, FEATURES):
        assert shard * (1 - min(few, many) / max(few, many)) <= sent + 1e-9 and sent <= shard


def test_equal_layouts_move_nothing_and_have_one_spelling() -> None:
    alone = layout_of(Strategy(tp_size=1, dp_size=4, tp_consecutive=False))
    assert alone == layout_of(Strategy(tp_size=1, dp_size=4, sequence_parallel=SequenceParallel.MEGATRON))
    whole = layout_of(Strategy(tp_size=4, dp_size=1, tp_consecutive=False))
    assert whole == layout_of(Strategy(tp_size=4, dp_size=1))
    assert sent_numel(alone, alone, 4, 4, FEATURES) == (0, 0, 0, 0)
    assert closed_groups(alone, alone, 4, 4) == ((0,), (1,), (2,), (3,))


def test_a_gather_within_pairs_is_closed_within_pairs() -> None:
    alone, pairs = Layout(4, 1, True, 1), Layout(4, 2, True, 2)
    assert closed_groups(alone, pairs, 4, 4) == ((0, 1), (2, 3))
    strided = Layout(4, 2, False, 2)
    assert strided.holders(0) == (0, 2)
    assert strided.activation_shard(2, 4, 4) == ActivationShard(0, 2, 2, 4)
