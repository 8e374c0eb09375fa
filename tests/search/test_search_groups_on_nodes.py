"""What groups that lie differently on nodes cost: rates worked out by hand from what shares a node's network."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from stage_axes import stage_axes

from shardwright.io import BadInput
from shardwright.io.hdf5 import Provenance
from shardwright.io.table import Source, Table
from shardwright.plan.sweep_plan import collective_kinds
from shardwright.types.hardware_profile import Collective, GroupKind, HardwareProfile, PointRow, RepeatRow
from shardwright_search.cost_model.collectives import (
    axis_group_kinds,
    collective_time,
    data_group_kinds,
    stage_topology,
)
from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.space.search_space import space_of

MIB, NETWORK, LINK = 1 << 20, 1e9, 16e9
WIDTH = 8
"""Devices of a node."""


def profiles_of(make, *kinds: GroupKind):
    """All-reduces by bandwidth alone: all groups that a node takes part in share what it sends."""
    points = [(kind, size) for kind in kinds for size in (MIB, 16 * MIB)]
    hardware = HardwareProfile(
        cluster="some",
        device="cpu",
        backend="gloo",
        provenance=Provenance(date="2026-01-31", versions="torch 0"),
        points=Table.from_rows(
            PointRow,
            (
                PointRow(
                    collective=Collective.ALL_REDUCE,
                    group_size=kind.size,
                    ranks_per_node=kind.ranks_per_node,
                    consecutive=kind.consecutive,
                    message_bytes=size,
                    interval=0.0,
                    source=Source.MEASURED,
                )
                for kind, size in points
            ),
        ),
        repeats=Table.from_rows(
            RepeatRow,
            (RepeatRow(point=i, time_s=seconds(*point), outlier=False) for i, point in enumerate(points)),
        ),
    )
    model, cluster = make.model(), make.cluster(64, nodes=8)
    return make.profiles(model, cluster, hardware)


def seconds(kind: GroupKind, message_bytes: int) -> float:
    moved = 2 * (kind.size - 1) / kind.size * message_bytes
    return moved * WIDTH / kind.ranks_per_node / NETWORK if kind.across_nodes else moved / LINK


def reduce_s(profiles, *kinds: GroupKind):
    return collective_time(profiles, Collective.ALL_REDUCE, kinds, MIB)


def test_gradients_of_a_stage_of_two_nodes_share_the_network_of_as_many_groups_as_there_are(make):
    """8x8, four stages of two nodes, tensor parallelism of 2: two groups of eight, four ranks on each node.

    Both send 2 * 7/8 of a message out of a node. Eight groups with a rank on each node would take four times as long.
    """
    topology = stage_topology(make.cluster(64, nodes=8), range(16))
    (kind,) = data_group_kinds(topology, stage_axes(topology, 2, True)).replicas
    assert kind == GroupKind(8, 4, False)
    spread = GroupKind(8, 1, False)
    profiles = profiles_of(make, kind, spread)
    assert reduce_s(profiles, kind) == (pytest.approx(2 * 2 * 7 / 8 * MIB / 1e9), None)
    assert reduce_s(profiles, spread).time_s == pytest.approx(4 * reduce_s(profiles, kind).time_s)


@pytest.mark.parametrize(
    ("devices", "nodes", "ranks", "tp_size", "consecutive", "tp_kinds", "dp_kinds"),
    [
        # tp 8 on whole nodes: eight groups a node, each with one rank on every node
        (64, 8, range(64), 8, True, {(8, 8, True)}, {(8, 1, False)}),
        # four ranks in one node never touch the network
        (64, 8, range(4, 8), 1, True, {(1, 1, True)}, {(4, 4, True)}),
        # 2x4 with strided tensor parallelism: a group has two ranks on each node, and neighbours reduce gradients
        (8, 2, range(8), 4, False, {(4, 2, False)}, {(2, 2, True)}),
        (8, 2, range(8), 2, False, {(2, 1, False)}, {(4, 4, True)}),
        # twelve ranks over one and a half nodes of eight: groups of three have two ranks on one of them
        (24, 3, range(12), 4, True, {(4, 4, True)}, {(3, 2, False)}),
        (64, 8, range(16), 16, True, {(16, 8, True)}, {(1, 1, True)}),
    ],
)
def test_groups_are_told_by_how_many_of_their_ranks_share_a_node(
    make, devices, nodes, ranks, tp_size, consecutive, tp_kinds, dp_kinds
):
    topology = stage_topology(make.cluster(devices, nodes), ranks)
    assert set(axis_group_kinds(topology, stage_axes(topology, tp_size, consecutive).tensor)) == tp_kinds
    assert set(data_group_kinds(topology, stage_axes(topology, tp_size, consecutive)).replicas) == dp_kinds


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        ((3, 3, True), (4, 4, True)),  # more ranks in a node
        ((3, 2, False), (8, 2, False)),  # more ranks, as few on a node: as many groups share it
        ((4, 2, False), (8, 2, False)),  # the cheaper of that and of one rank on each of eight nodes
        ((5, 1, False), (8, 1, False)),
        ((16, 8, True), (32, 8, True)),  # more nodes
        ((2, 2, False), (4, 4, True)),  # neighbours stand for others where no others were measured
    ],
)
def test_what_was_not_measured_is_rounded_up_with_a_warning(make, wanted, taken):
    measured = [(4, 4, True), (8, 8, True), (8, 2, False), (8, 1, False), (32, 8, True)]
    profiles = profiles_of(make, *(GroupKind(*kind) for kind in measured))
    found, stands = reduce_s(profiles, GroupKind(*wanted)), GroupKind(*taken)
    assert found.time_s == reduce_s(profiles, stands).time_s >= seconds(GroupKind(*wanted), MIB)
    assert found.warning == f"rounded up: all_reduce among {GroupKind(*wanted)}: as measured among {stands}"
    assert reduce_s(profiles, stands).warning is None


@pytest.mark.parametrize("consecutive", [[True], [True, False]])
@pytest.mark.parametrize("nodes", [2, 4])
def test_a_search_over_all_tensor_parallel_sizes_takes_those_that_were_profiled(make, nodes, consecutive):
    """Of 8 ranks the profile has sizes up to 4, and a sweep the groups that layouts on the cluster have.

    More ranks than a node has are priced where they are asked for, and those of a node refused: these can be measured.
    """
    cluster, model = make.cluster(8, nodes), make.model()
    hardware = make.hardware(cluster)
    swept = {kind.key for kind in collective_kinds(cluster)}
    for key in set(hardware.curves) - swept:
        del hardware.curves[key]
    profiles = make.index(hardware, make.profile(model, tp_sizes=(1, 2, 4)))
    request = make.request(tp_consecutive=consecutive, data_parallel=["ddp"], schedules=["gpipe"], recompute=["none"])
    found = find_best(request, model, cluster, profiles, Path("s.json"), lambda line: None)
    assert isinstance(found, SearchAnswer)
    assert space_of(request, model, cluster, profiles, Path("s.json")).instance.request.tp_sizes == (1, 2, 4)
    wide = find_best(replace(request, tp_sizes=(8,)), model, cluster, profiles, Path("s.json"), lambda line: None)
    assert isinstance(wide, SearchAnswer) and wide.chosen.plan.layers[0].tp_size == 8
    told = wide.chosen.evaluation.warnings
    assert "rounded up: block tp_size 8: as profiled with tp_size 4" in told
    assert not any("rounded" in line for line in found.chosen.evaluation.warnings)
    narrow = make.index(hardware, make.profile(model, tp_sizes=(1,)))
    listed = replace(request, tp_sizes=(8 // nodes,))
    with pytest.raises(BadInput, match=f"no point for embedding tp_size {8 // nodes} .*: add it to the profile"):
        find_best(listed, model, cluster, narrow, Path("s.json"), lambda line: None)


def test_what_nothing_measured_bounds_is_refused(make):
    profiles = profiles_of(make, GroupKind(8, 8, True), GroupKind(16, 8, True))
    said = r"^h\.h5: no all_reduce among 16 strided ranks, 4 on a node, nor among more: measure the hardware"
    with pytest.raises(BadInput, match=said):
        reduce_s(profiles, GroupKind(16, 4, False))
    assert profiles.hardware_file == Path("h.h5")
