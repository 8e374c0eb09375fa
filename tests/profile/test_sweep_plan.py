from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardwright_formats.semantics.layout import dp_groups, tp_groups
from shardwright_formats.semantics.sweep_plan import SizeRange, collective_kinds, overlap_kinds, pair_rounds
from shardwright_formats.types.hardware_profile import Collective, CollectiveKey

_NODES = st.lists(st.tuples(st.integers(1, 2), st.sampled_from([1, 2, 3, 4, 8])), min_size=1, max_size=2)


@given(_NODES)
def test_groups_of_a_kind_are_disjoint_and_of_its_size_and_place(make_cluster, nodes):
    cluster = make_cluster(*nodes)
    for key, groups in collective_kinds(cluster):
        ranks = [rank for group in groups for rank in group]
        assert len(ranks) == len(set(ranks))
        assert {len(group) for group in groups} == {key.group_size}
        crossing = [len({cluster.node_of_rank[rank] for rank in group}) > 1 for group in groups]
        assert any(crossing) == key.across_nodes
        if key.collective is not Collective.P2P and key.consecutive:
            assert all(group == tuple(range(group[0], group[0] + len(group))) for group in groups)


@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 3))
def test_every_group_that_a_plan_of_one_stage_can_form_has_its_kind(make_cluster, devices, count):
    cluster = make_cluster((count, devices))
    known = {kind.key for kind in collective_kinds(cluster)}
    world = range(cluster.num_devices)
    for tp_size in (size for size in range(1, len(world) + 1) if len(world) % size == 0):
        for consecutive in {True, 1 < tp_size < len(world)}:
            for groups in (tp_groups(world, tp_size, not consecutive), dp_groups(world, tp_size, not consecutive)):
                size = len(groups[0])
                across = any(len({cluster.node_of_rank[rank] for rank in group}) > 1 for group in groups)
                neighbours = size == len(world) or groups[0][1:2] == (1,)
                if size > 1:
                    assert CollectiveKey(Collective.ALL_REDUCE, size, neighbours, across) in known


def test_point_to_point_has_near_and_far_pairs_in_and_between_nodes(make_cluster):
    pairs = {
        (key.consecutive, key.across_nodes): groups
        for key, groups in collective_kinds(make_cluster((2, 4)))
        if key.collective is Collective.P2P
    }
    assert pairs == {
        (True, False): ((0, 1), (2, 3), (4, 5), (6, 7)),
        (True, True): ((3, 4),),
        (False, False): ((0, 2), (1, 3), (4, 6), (5, 7)),
        (False, True): ((0, 4), (1, 5), (2, 6), (3, 7)),
    }


def test_one_device_exchanges_nothing(make_cluster):
    assert collective_kinds(make_cluster((1, 1))) == ()


@given(st.integers(2, 9), st.integers(4, 10**6), st.integers(1, 10**8))
def test_message_sizes_grow_fourfold_and_split_evenly_into_float32(group_size, min_bytes, max_bytes):
    sizes = SizeRange(min_bytes, max_bytes).all(group_size)
    assert bool(sizes) == (min_bytes <= max_bytes)
    assert all(size % (4 * group_size) == 0 for size in sizes)
    assert all(a < b and abs(b - 4 * a) <= 16 * group_size for a, b in pairwise(sizes))
    assert all(size < max_bytes + 4 * group_size for size in sizes)
    assert all(size > max_bytes / 4 for size in sizes[-1:])


@given(_NODES)
def test_each_rank_has_a_link_to_its_neighbour_in_every_pipeline_and_one_message_at_a_time(make_cluster, nodes):
    cluster = make_cluster(*nodes)
    world = cluster.num_devices
    rounds = pair_rounds(cluster, (1024, 4096))
    for message_bytes in (1024, 4096):
        of_size = [r.pairs for r in rounds if r.message_bytes == message_bytes]
        wanted = [
            (rank, rank + world // stages)
            for stages in range(2, world + 1)
            if world % stages == 0
            for rank in range(world - world // stages)
        ]
        assert sorted(pair for pairs in of_size for pair in pairs) == sorted(wanted)
        for pairs in of_size:
            ranks = [rank for pair in pairs for rank in pair]
            assert len(ranks) == len(set(ranks))
            assert len({target - source for source, target in pairs}) == 1


def test_overlap_is_timed_once_a_group_size_from_the_whole_world_down_and_inside_nodes_where_it_can_be(make_cluster):
    found = overlap_kinds(collective_kinds(make_cluster((2, 4))))
    assert [(str(key.collective), key.group_size, key.across_nodes) for key, _ in found] == [
        (collective, size, across)
        for size, across in ((8, True), (4, False), (2, False))
        for collective in ("all_gather", "all_reduce", "reduce_scatter")
    ]
    assert all(key.consecutive for key, _ in found)


def test_overlap_is_timed_at_every_second_size_with_one_mebibyte_among_them():
    assert SizeRange(1024, 64 * 2**20).overlapped(2) == (4096, 65536, 2**20, 16 * 2**20)
    assert SizeRange(1024, 65536).overlapped(2) == (4096, 65536)
    assert SizeRange(1024, 2048).overlapped(2) == (1024,)
    # Three ranks share whole numbers: the mebibyte is rounded up.
    assert SizeRange(1024, 2**22).overlapped(3) == (4104, 65544, 1048584)


@given(st.integers(2, 9), st.integers(4, 10**8), st.integers(1, 10**8))
def test_what_is_always_timed_reaches_one_mebibyte_and_no_further(group_size, min_bytes, max_bytes):
    sizes = SizeRange(min_bytes, max_bytes).all(group_size)
    always = SizeRange(min_bytes, max_bytes).always(group_size)
    assert always == sizes[: len(always)]
    assert all(size < 2**20 for size in always[:-1])
    assert always == sizes or always[-1] >= 2**20
    overlapped = SizeRange(min_bytes, max_bytes).overlapped(group_size)
    assert set(overlapped) <= set(sizes)
    assert bool(overlapped) == bool(sizes)
