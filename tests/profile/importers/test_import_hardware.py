import json

import msgspec
import pytest
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.types.hardware_profile import Collective, CollectiveKey, read_hardware_profile
from shardwright_profile.importers.galvatron.hardware import import_galvatron_hardware
from shardwright_profile.options import GalvatronHardwareOptions

MIB = 1024**2
NAMES = {
    "allreduce": "allreduce_bandwidth_{}_per_node.json",
    "p2p": "p2p_bandwidth_{}_per_node.json",
    "sp_time": "sp_time_{}_per_node.json",
}


@pytest.fixture
def tables_for(tmp_path):
    """Files of one size of cluster, by the option that names them."""

    def made(size="1nodes_8gpus", overlap=None, **contents):
        paths = {}
        for option, name in NAMES.items():
            found = []
            if option in contents:
                found.append(tmp_path / name.format(size))
                found[0].write_text(json.dumps(contents[option]))
            paths[option] = tuple(found)
        if overlap is not None:
            (tmp_path / "overlap_coefficient.json").write_text(json.dumps(overlap))
        paths["overlap"] = None if overlap is None else tmp_path / "overlap_coefficient.json"
        return GalvatronHardwareOptions(**paths, cluster="toys", device="A100", out=tmp_path / "hardware.h5")

    return made


def imported(options):
    return import_galvatron_hardware(options)


def time_s(profile, collective, group_size, message_bytes, consecutive=True):
    sizes, times_s = profile.curves[CollectiveKey(collective, group_size, group_size, consecutive)]
    return times_s[sizes.tolist().index(message_bytes)]


def source(profile, collective):
    points = profile.points
    return {s.decode() for c, s in zip(points["collective"], points["source"], strict=True) if c.decode() == collective}


def test_a_bandwidth_is_of_the_bus_in_gigabytes_of_1e9(tables_for):
    profile = imported(tables_for(allreduce={"allreduce_size_4_consec_1": 150.0, "allreduce_size_4_consec_0": 75.0}))
    assert time_s(profile, Collective.ALL_REDUCE, 4, MIB) == pytest.approx(2 * 3 / 4 * MIB / 150e9)
    assert time_s(profile, Collective.ALL_REDUCE, 4, MIB, consecutive=False) == pytest.approx(1.5 * MIB / 75e9)
    assert source(profile, "all_reduce") == {"derived"}


def test_a_gather_and_a_scatter_are_half_of_a_reduction(tables_for):
    profile = imported(tables_for(allreduce={"allreduce_size_4_consec_1": 150.0}))
    for collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        assert time_s(profile, collective, 4, MIB) == pytest.approx(3 / 4 * MIB / 150e9)
        assert source(profile, collective) == {"derived"}


def test_a_time_is_of_the_whole_collective_in_ms_on_mib_and_taken_before_a_bandwidth(tables_for):
    sp_time = {"allreduce_size_8_1024MB_time": 8.14, "allreduce_size_8_1MB_time": 0.08, "all2all_size_8_1MB_time": 0.1}
    profile = imported(tables_for(allreduce={"allreduce_size_8_consec_1": 154.203}, sp_time=sp_time))
    assert time_s(profile, Collective.ALL_REDUCE, 8, 1024 * MIB) == pytest.approx(8.14e-3)
    assert time_s(profile, Collective.ALL_GATHER, 8, 1024 * MIB) == pytest.approx(4.07e-3)
    assert time_s(profile, Collective.ALL_TO_ALL, 8, MIB) == pytest.approx(1e-4)
    assert source(profile, "all_reduce") == source(profile, "all_to_all") == {"measured"}
    assert (
        "An all-reduce of 1024 MiB among 8 neighbours takes 8.14 ms by sp_time and 12.19 ms by bandwidth: sp_time is"
        " taken."
    ) in profile.provenance.notes


def test_an_all_to_all_that_was_not_timed_is_assumed(tables_for):
    profile = imported(tables_for(allreduce={"allreduce_size_4_consec_1": 150.0}))
    assert time_s(profile, Collective.ALL_TO_ALL, 4, MIB) == pytest.approx(3 / 4 * MIB / 150e9)
    assert source(profile, "all_to_all") == {"assumed"}


def test_neighbours_cross_nodes_when_one_is_too_small_and_strided_ranks_when_there_are_two(tables_for):
    bandwidths = {
        "allreduce_size_16_consec_1": 40.0,
        "allreduce_size_8_consec_1": 150.0,
        "allreduce_size_2_consec_0": 8.0,
    }
    keys = imported(tables_for("2nodes_8gpus", allreduce=bandwidths)).curves
    found = {key.group for key in keys if key.collective is Collective.ALL_REDUCE}
    assert found == {(16, 8, True), (8, 8, True), (2, 1, False)}


def test_of_sends_over_several_distances_the_slowest_is_taken_and_named(tables_for):
    bandwidths = {"pp_size_2": 160.0, "pp_size_4": 140.0, "pp_size_8": 110.0}
    profile = imported(tables_for(allreduce={"allreduce_size_2_consec_1": 1.0}, p2p=bandwidths))
    assert time_s(profile, Collective.P2P, 2, MIB, consecutive=False) == pytest.approx(MIB / 140e9)
    assert time_s(profile, Collective.P2P, 2, MIB) == pytest.approx(MIB / 110e9)
    assert "(160, 140 GB/s) the slowest is taken" in profile.provenance.notes


def test_the_file_that_is_named_first_counts(tables_for):
    large = tables_for("2nodes_8gpus", allreduce={"allreduce_size_8_consec_1": 100.0})
    small = tables_for(allreduce={"allreduce_size_8_consec_1": 200.0, "allreduce_size_4_consec_0": 50.0})
    profile = imported(replace(large, allreduce=large.allreduce + small.allreduce))
    assert time_s(profile, Collective.ALL_REDUCE, 8, MIB) == pytest.approx(2 * 7 / 8 * MIB / 100e9)
    assert time_s(profile, Collective.ALL_REDUCE, 4, MIB, consecutive=False) == pytest.approx(1.5 * MIB / 50e9)


def test_an_overlap_slows_both_sides_at_no_known_size(tables_for):
    profile = imported(tables_for(allreduce={"allreduce_size_2_consec_1": 1.0}, overlap={"overlap_coe": 1.125}))
    (row,) = map(msgspec.structs.asdict, profile.overlap.rows)
    assert row["compute_slowdown"] == row["collective_slowdown"] == 1.125
    assert (row["collective_bytes"], row["compute_s"], row["group_size"], row["source"]) == (0, 0, 8, "measured")


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        ({}, "no table of collectives"),
        ({"allreduce": {"allreduce_size_2_consec_1": 0}}, "not positive"),
        ({"allreduce": {"allreduce_size_2_consec_1": -4}}, "not positive"),
        ({"allreduce": {"allreduce_size_2_consec_1": "fast"}}, "not a number"),
        ({"allreduce": {"allreduce_size_2_consec_1": float("inf")}}, "not a finite number"),
        ({"allreduce": {"a": 1.0}, "overlap": {"overlap_coe": 0.5}}, "a speed-up"),
        ({"allreduce": {"a": 1.0}, "overlap": {}}, "has no overlap_coe"),
        ({"size": "some", "allreduce": {"a": 1.0}}, "its name does not state"),
    ],
)
def test_impossible_tables_are_one_clear_line(tables_for, contents, problem):
    with pytest.raises(BadInput, match=problem):
        imported(tables_for(**contents))


def test_the_command_writes_what_can_be_read(command, tables_for, tmp_path):
    tables = tables_for(allreduce={"allreduce_size_2_consec_1": 1.0, "odd": 2.0})
    options = ("--cluster", "toys", "--device", "A100", "--allreduce", str(tables.allreduce[0]))
    done = command("import", "galvatron-hardware", *options, "--out", str(tmp_path / "h.h5"))
    assert done.returncode == 0, done.stderr
    assert "are not understood were passed over: odd." in done.stderr
    profile = read_hardware_profile(tmp_path / "h.h5")
    assert (profile.cluster, profile.device, len(profile.rates)) == ("toys", "A100", 0)
