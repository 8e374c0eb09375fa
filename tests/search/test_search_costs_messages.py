"""Time of messages and of what goes on beside them: numbers worked out by hand."""

import pytest
from stage_axes import stage_axes

from shardwright.io import BadInput
from shardwright.types.hardware_profile import Collective, GroupKind
from shardwright_search.cost_model.collectives import (
    Duration,
    Slowdowns,
    StageTopology,
    axis_group_kinds,
    collective_time,
    data_group_kinds,
    overlapped_time,
    send_kind_time,
    slowdowns_of,
    stage_topology,
)

NEAR, FAR = GroupKind(2, 2, True), GroupKind(2, 1, False)


def test_message_time_follows_the_measured_curve(make):
    profiles = make.profiles(make.model(), make.cluster())

    def taken(message_bytes: int) -> Duration:
        return collective_time(profiles, Collective.ALL_REDUCE, [NEAR], message_bytes)

    assert taken(1).time_s == pytest.approx(20e-6 + 1024e-9)  # constant below the smallest size
    assert taken(65536).time_s == pytest.approx(20e-6 + 65536e-9)
    assert taken(65536).warning is None
    assert taken(4 << 20).time_s == pytest.approx(20e-6 + (4 << 20) * 1e-9)  # bandwidth of the last segment
    assert "measured up to 1048576" in str(taken(4 << 20).warning)
    assert collective_time(profiles, Collective.ALL_REDUCE, [GroupKind(1, 1, True)], 1 << 20).time_s == 0
    assert taken(0).time_s == 0


def test_the_slowest_kind_of_group_counts(make):
    profiles = make.profiles(make.model(), make.cluster(4, nodes=2))
    assert collective_time(profiles, Collective.ALL_GATHER, [NEAR], 1024).time_s == pytest.approx(20e-6 + 512e-9)
    both = collective_time(profiles, Collective.ALL_GATHER, [NEAR, FAR], 1024)
    assert both.time_s == pytest.approx(40e-6 + 512e-9)


def test_a_group_that_was_not_measured_is_named(make):
    profiles = make.profiles(make.model(), make.cluster(2))
    said = r"^h\.h5: no all_gather among 3 consecutive ranks in a node, nor among more: measure"
    with pytest.raises(BadInput, match=said):
        collective_time(profiles, Collective.ALL_GATHER, [GroupKind(3, 3, True)], 1024)


def test_two_ranks_send_alike_whether_neighbours_or_not(make):
    profiles = make.profiles(make.model(), make.cluster())
    hardware = profiles.hardware
    keys = [point.key for point in hardware.points.rows]
    strided = [i for i, key in enumerate(keys) if key.collective is Collective.P2P and not key.consecutive]
    assert strided
    for key in {keys[i] for i in strided}:
        del hardware.curves[key]
    assert send_kind_time(profiles, False, True, 2048).time_s == pytest.approx(40e-6 + 1024e-9)


def test_a_message_beside_a_computation_slows_both():
    """4 s of message take 6, in which 4.8 of 10 s of computation are done; the other 5.2 follow alone."""
    slowdowns = Slowdowns(compute=1.25, collective=1.5)
    assert overlapped_time(10, Duration(4), slowdowns) == pytest.approx(6 + 5.2 - 10)
    # 4 s of computation take 5, in which 5/1.5 of 10 s of message are done
    assert overlapped_time(4, Duration(10), slowdowns) == pytest.approx(5 + (10 - 5 / 1.5) - 4)
    assert overlapped_time(10, Duration(4), None) == 4, "nothing overlaps that was not measured"
    assert overlapped_time(10, Duration(4), Slowdowns(1, 1)) == 0
    assert overlapped_time(10, Duration(0), slowdowns) == 0


def test_the_nearest_measured_slowdowns_are_taken(make):
    measured = [
        (Collective.ALL_REDUCE, 2, 1.2, 1.3),
        (Collective.ALL_REDUCE, 2, 1.4, 1.5),
        (Collective.ALL_REDUCE, 4, 2.0, 3.0),
        (Collective.ALL_GATHER, 2, 0.9, 1.1),
    ]
    sends = [(Collective.P2P, 2, 7.0, 8.0)]
    model, cluster = make.model(), make.cluster()
    without_sends = make.profiles(model, cluster, make.hardware(cluster, overlap=measured))
    assert slowdowns_of(without_sends, Collective.P2P, [NEAR], 1 << 20) == slowdowns_of(
        without_sends, Collective.REDUCE_SCATTER, [NEAR], 1 << 20
    ), "sends that were not measured slow as other collectives do"
    measured += sends
    profiles = make.profiles(model, cluster, make.hardware(cluster, overlap=measured))

    def found(collective: Collective, ranks: int) -> tuple[float, float]:
        return tuple(slowdowns_of(profiles, collective, [GroupKind(ranks, ranks, True)], 1 << 20))

    assert found(Collective.ALL_REDUCE, 2) == pytest.approx((1.3, 1.4))
    assert found(Collective.ALL_REDUCE, 8) == pytest.approx((1.4, 1.5)), "the median of all of this collective"
    assert found(Collective.ALL_GATHER, 2) == pytest.approx((1.0, 1.1)), "nothing is faster beside another"
    assert found(Collective.REDUCE_SCATTER, 2) == pytest.approx((1.2, 1.3)), "the median of as many ranks, but of sends"
    assert found(Collective.P2P, 2) == pytest.approx((7.0, 8.0))
    assert slowdowns_of(make.profiles(model, cluster), Collective.ALL_REDUCE, [NEAR], 1 << 20) is None


def test_slowdowns_are_those_of_the_link_and_of_the_size_of_the_message(make):
    """Pairs in a node: 1.2 at 64 KiB, 1.6 at 16 MiB; with a rank on each of two nodes 3 at 64 KiB. Half way is 1 MiB.

    Of two computations beside a message the median counts.
    """
    measured = [
        (Collective.ALL_REDUCE, 2, 1.2, 1.1, 2, 1 << 16),
        (Collective.ALL_REDUCE, 2, 1.5, 2.0, 2, 1 << 24),
        (Collective.ALL_REDUCE, 2, 1.7, 2.2, 2, 1 << 24),
        (Collective.ALL_REDUCE, 2, 3.0, 4.0, 1, 1 << 16),
        (Collective.ALL_REDUCE, 2, 9.0, 9.0, 2, 0),
    ]
    model, cluster = make.model(), make.cluster(4, nodes=2)
    profiles = make.profiles(model, cluster, make.hardware(cluster, overlap=measured))

    def found(num_bytes: int, *kinds: GroupKind) -> tuple[float, float]:
        return tuple(slowdowns_of(profiles, Collective.ALL_REDUCE, kinds, num_bytes))

    assert found(1 << 16, NEAR) == found(1, NEAR) == pytest.approx((1.2, 1.1))
    assert found(1 << 24, NEAR) == found(1 << 30, NEAR) == pytest.approx((1.6, 2.1))
    assert found(1 << 20, NEAR) == pytest.approx((1.4, 1.6))
    assert found(1 << 20, FAR) == found(1 << 20, GroupKind(4, 2, True)) == pytest.approx((3.0, 4.0))
    assert found(1 << 24, NEAR, FAR) == pytest.approx((3.0, 4.0)), "the slower of both kinds"


def test_a_stages_groups_are_told_by_how_their_ranks_lie(make):
    """Six ranks on two nodes of three: pairs of neighbours, of which the middle one crosses."""
    topology = stage_topology(make.cluster(6, nodes=2), range(6))
    assert topology == StageTopology("n", (3, 3))
    assert axis_group_kinds(topology, stage_axes(topology, 2, True).tensor) == (
        GroupKind(2, 1, True),
        GroupKind(2, 2, True),
    )
    assert axis_group_kinds(topology, stage_axes(topology, 2, False).tensor) == (GroupKind(2, 1, False),)
    assert axis_group_kinds(topology, stage_axes(topology, 3, True).tensor) == (GroupKind(3, 3, True),)
    # of neighbouring triples, ranks 0 and 3, 1 and 4, 2 and 5 reduce gradients
    assert data_group_kinds(topology, stage_axes(topology, 3, True)).replicas == (GroupKind(2, 1, False),)
    assert data_group_kinds(topology, stage_axes(topology, 3, False)).replicas == (
        GroupKind(2, 1, True),
        GroupKind(2, 2, True),
    )
    assert stage_topology(make.cluster(6, nodes=2), (2, 3)) == StageTopology("n", (1, 1))


def test_shard_groups_of_a_node_have_their_replicas_on_the_others(make):
    """Eight ranks on two nodes: of four ranks of data parallelism the first two share a node."""
    topology = stage_topology(make.cluster(8, nodes=2), range(8))
    whole = data_group_kinds(topology, stage_axes(topology, 1, True, 4))
    assert whole == ((GroupKind(4, 4, True),), (GroupKind(2, 1, False),))
    assert data_group_kinds(topology, stage_axes(topology, 2, True, 2)) == (
        (GroupKind(2, 2, False),),
        (GroupKind(2, 1, False),),
    )
    assert data_group_kinds(topology, stage_axes(topology, 2, False, 2)).shards == (GroupKind(2, 2, True),)
    assert data_group_kinds(topology, stage_axes(topology, 1, True, 8)).shards == (GroupKind(8, 4, True),), (
        "all ranks: no replicas"
    )
