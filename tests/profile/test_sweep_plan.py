from collections import Counter
from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.plan.axes import Layout
from shardwright.plan.sweep_plan import SizeRange, collective_kinds, overlap_kinds, pair_rounds
from shardwright.types.hardware_profile import Collective, CollectiveKey, GroupKind

_NODES = st.lists(st.tuples(st.integers(1, 2), st.sampled_from([1, 2, 3, 4, 8])), min_size=1, max_size=2)


@given(_NODES)
def test_groups_of_a_kind_are_disjoint_and_lie_as_it_says(make_cluster, nodes):
    cluster = make_cluster(*nodes)
    for key, groups in collective_kinds(cluster):
        ranks = [rank for group in groups for rank in group]
        assert len(ranks) == len(set(ranks))
        assert {lying_of(cluster, group) for group in groups} == {key.group}


def lying_of(cluster, group):
    """Counted rank by rank."""
    on_nodes = Counter(cluster.node_of_rank[rank] for rank in group)
    return GroupKind(len(group), max(on_nodes.values()), group == tuple(range(group[0], group[0] + len(group))))


@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 3))
def test_every_group_of_every_pipeline_stage_has_its_kind(make_cluster, devices, count):
    cluster = make_cluster((count, devices))
    known = {key.group for key, _ in collective_kinds(cluster) if key.collective is Collective.ALL_REDUCE}
    world = cluster.num_devices
    for width in (width for width in range(2, world + 1) if world % width == 0):
        for tp_size, consecutive in product((size for size in range(1, width + 1) if width % size == 0), (True, False)):
            for start in range(0, world, width):
                ranks = range(start, start + width)
                layout = Layout(width, tp_size, consecutive, 1)
                every = (*layout.sharers.groups(ranks), *layout.samples.groups(ranks))
                assert {lying_of(cluster, group) for group in every if len(group) > 1} <= known


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_a_few_groups_of_a_layout_are_of_all_its_kinds(make_cluster, count, devices):
    cluster = make_cluster((count, devices))
    known = {key.group for key, _ in collective_kinds(cluster) if key.collective is Collective.ALL_REDUCE}
    world = cluster.num_devices
    for size, stride in product(range(2, world + 1), range(1, world + 1)):
        if world % (size * stride) == 0:
            for first in (block + offset for block in range(0, world, size * stride) for offset in range(stride)):
                assert lying_of(cluster, tuple(range(first, first + size * stride, stride))) in known


def test_groups_that_share_a_nodes_network_are_timed_at_once(make_cluster):
    """Of 2 nodes of 4: four pairs, one rank on each node; two groups of four, two on each; one of all."""
    groups = {key.group: groups for key, groups in collective_kinds(make_cluster((2, 4)))}
    assert groups[GroupKind(4, 2, False)] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert groups[GroupKind(8, 4, True)] == (tuple(range(8)),)
    reduce = CollectiveKey(Collective.ALL_REDUCE, 2, 1, False)
    assert dict(collective_kinds(make_cluster((2, 4))))[reduce] == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_point_to_point_has_near_and_far_pairs_in_and_between_nodes(make_cluster):
    pairs = {
        (key.consecutive, key.group.across_nodes): groups
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


def test_overlap_is_timed_for_each_group_size_inside_a_node_and_across_nodes_and_for_sends(make_cluster):
    found = [(str(key.collective), key.group) for key, _ in overlap_kinds(collective_kinds(make_cluster((2, 4))))]
    wanted = [
        (collective, kind)
        for kind in ((8, 4, True), (4, 4, True), (4, 2, False), (2, 2, True), (2, 1, False))
        for collective in ("all_gather", "all_reduce", "reduce_scatter")
    ]
    assert [each for each in found if each[0] != "p2p"] == wanted
    assert [kind for collective, kind in found if collective == "p2p"] == [(2, 2, True), (2, 1, True)]


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
