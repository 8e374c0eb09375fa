"""`shardwright profile analytic`: given rates of links, published times of all_reduce, and slowdowns."""

import pytest
from test_analytic_command import a_cluster

from shardwright.devices.table import read_devices
from shardwright.estimate.hardware import NETWORK_STEP_S, START_S, node_rates
from shardwright.estimate.overlap import overlap_slowdowns
from shardwright.io import BadInput, write_document
from shardwright.io.table import Source
from shardwright.types.hardware_profile import Collective, CollectiveKey, read_hardware_profile


def test_groups_over_more_nodes_get_what_is_told_of_so_many(command, tmp_path):
    """4 nodes of 8: 40 GB/s each over all four (told up to 6), 100 where groups span two of them."""

    def time_s(nodes, size, on_a_node, given="2:800,6:320"):
        write_document(tmp_path / "c.json", a_cluster(nodes))
        files = ("--cluster", tmp_path / "c.json", "--hardware-out", tmp_path / "h.h5")
        finished = command("analytic", *files, "--inter-node-gbit-s", given)
        assert finished.returncode == 0, finished.stderr
        profile = read_hardware_profile(tmp_path / "h.h5")
        assert "between nodes 1e+11 of up to 2 nodes, 4e+10 of up to 6 nodes bytes/s a node" in profile.provenance.notes
        sizes, times = profile.curves[CollectiveKey(Collective.ALL_REDUCE, size, on_a_node, size > 8)]
        return float(times[list(sizes).index(1 << 20)])

    for nodes, rate in ((2, 0.75 * 100e9), (4, 0.75 * 40e9)):
        size = 8 * nodes
        steps_s = START_S + 2 * (nodes - 1) * NETWORK_STEP_S + 2 * (size - nodes) * 3e-6
        assert time_s(nodes, size, 8) == pytest.approx(steps_s + 2 * (size - 1) / size * (1 << 20) / rate)
        # Pairs over two nodes: eight leave each of them.
        assert time_s(nodes, 2, 1) == pytest.approx(START_S + 2 * NETWORK_STEP_S + 8 * (1 << 20) / (0.75 * 100e9))
    short = command("analytic", "--cluster", tmp_path / "c.json", "--hardware-out", tmp_path / "n.h5",
                    "--inter-node-gbit-s", "2:800,3:400")  # fmt: skip
    assert (
        short.returncode == 2
        and "has no rate for groups of more than 3 nodes, but groups of the cluster span 4" in short.stderr
    )


def test_collectives_get_the_rates_and_steps_that_are_told_of_them(command, tmp_path):
    write_document(tmp_path / "c.json", a_cluster(2))
    files = ("--cluster", tmp_path / "c.json", "--hardware-out", tmp_path / "h.h5")
    told = ("--inter-node-gbit-s", "2:800+all_gather=2:400,4:100+reduce_scatter=200", "--network-step-us", 50)
    finished = command("analytic", *files, *told)
    assert finished.returncode == 0, finished.stderr
    profile = read_hardware_profile(tmp_path / "h.h5")
    notes = (
        "1e+11 of up to 2 nodes; all_gather 5e+10 of up to 2 nodes, 1.25e+10 of up to 4 nodes; reduce_scatter 2.5e+10"
    )
    assert notes in profile.provenance.notes and "a step takes 50 us" in profile.provenance.notes
    steps = 50e-6 + 14 * 3e-6
    for collective, way, rate in (
        (Collective.ALL_REDUCE, 2, 100e9), (Collective.ALL_GATHER, 1, 50e9), (Collective.REDUCE_SCATTER, 1, 25e9),
    ):  # fmt: skip
        sizes, times = profile.curves[CollectiveKey(collective, 16, 8, True)]
        time_s = float(times[list(sizes).index(1 << 20)])
        assert time_s == pytest.approx(START_S + way * steps + way * 15 / 16 * (1 << 20) / (0.75 * rate))


def test_a_latency_of_links_without_a_rate_is_refused(command, tmp_path):
    write_document(tmp_path / "c.json", a_cluster(1))
    files = ("--cluster", tmp_path / "c.json", "--hardware-out", tmp_path / "h.h5")
    finished = command("analytic", *files, "--network-step-us", 50)
    assert finished.returncode == 2 and finished.stderr.count("\n") == 1
    assert finished.stderr.startswith(
        "error: --network-step-us: applies to links between nodes, whose rate is not given: give"
    )
    assert not (tmp_path / "h.h5").exists()


@pytest.mark.parametrize("text", ["400+gather=3", "400+all_gather=3+all_gather=4", "400+=3", "400+all_gather"])
def test_a_collective_that_is_none_or_has_no_rate_is_refused(text):
    with pytest.raises(
        BadInput, match=r"--inter-node-gbit-s: '.*' is (not a collective, or is named twice|not a rate): write 400"
    ):
        node_rates(text)


def test_an_all_reduce_inside_a_node_takes_the_published_time_of_its_size(command, tmp_path):
    write_document(tmp_path / "c.json", a_cluster(2, "NVIDIA H100 80GB HBM3"))

    def times_s(*options):
        files = ("--cluster", tmp_path / "c.json", "--hardware-out", tmp_path / "h.h5", "--inter-node-gbit-s", 3200)
        finished = command("analytic", *files, *options)
        assert finished.returncode == 0, finished.stderr
        curves = read_hardware_profile(tmp_path / "h.h5").curves
        return {size: curves[CollectiveKey(Collective.ALL_REDUCE, size, size, True)] for size in (4, 8)}

    published = dict(read_devices().devices["H100-SXM"].all_reduce_s)
    sizes, times = times_s()[8]
    found = dict(zip(sizes.tolist(), times.tolist(), strict=True))
    for size in (1 << 20, 1 << 24, 1 << 28, 1 << 30):
        assert found[size] == pytest.approx(published[size])
    # Between two sizes a line; four ranks take as long for what moves as many bytes: 3/2 of a message for 7/4.
    first, second = 1 << 16, 1 << 20

    def between(size):
        return published[first] + (published[second] - published[first]) * (size - first) / (second - first)

    assert found[1 << 18] == pytest.approx(between(1 << 18))
    sizes, times = times_s()[4]
    assert float(times[list(sizes).index(1 << 20)]) == pytest.approx(between(6 / 7 * (1 << 20)))
    # A given rate holds for all sizes.
    sizes, times = times_s("--link-gbyte-s", 450)[8]
    by_rate = START_S + 14 * 3e-6 + 14 / 8 * (1 << 28) / (0.75 * 450e9)
    assert float(times[list(sizes).index(1 << 28)]) == pytest.approx(by_rate)
    assert published[1 << 28] < 0.8 * by_rate


@pytest.mark.parametrize("text", ["fast", "0", "nan", "-1", "1e30", "2:1,2:1", "4:1,2:1", "2:1:1", "x:1", "1,2"])
def test_a_rate_that_is_none_is_refused(text):
    with pytest.raises(BadInput, match=r"--inter-node-gbit-s: '.*' is not a rate: write 400, or 2:400,4:300"):
        node_rates(text)


def test_computation_and_collectives_slow_one_another_as_is_told(command, tmp_path):
    write_document(tmp_path / "c.json", a_cluster(2))
    files = ("--cluster", tmp_path / "c.json", "--hardware-out", tmp_path / "h.h5", "--inter-node-gbit-s", "400")
    for given, inside, across in (("1.25:1.1", (1.25, 1.1), (1.25, 1.1)), ("1.25:1.1,1:1.5", (1.25, 1.1), (1, 1.5))):
        assert command("analytic", *files, "--overlap-slowdowns", given).returncode == 0
        profile = read_hardware_profile(tmp_path / "h.h5")
        told = {(row.collective, row.group_size, row.ranks_per_node): row for row in profile.overlap.rows}
        assert {(collective, size) for collective, size, _ in told} == {
            (collective, size)
            for collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
            for size in (2, 4, 8, 16)
        }
        for (_, size, on_a_node), row in told.items():
            assert (row.compute_slowdown, row.collective_slowdown) == (across if on_a_node < size else inside)
            assert row.source is Source.ASSUMED
        assert "assumed: computation and collectives of data parallelism beside" in profile.provenance.notes
        assert "is absent" not in profile.provenance.notes


@pytest.mark.parametrize("text", ["fast", "1.25", "0.9:1", "nan:1", "1:inf", "1:2:3", "1:1,1:1,1:1", "", "2000:1"])
def test_a_slowdown_that_is_none_is_refused(text):
    with pytest.raises(BadInput, match=r"--overlap-slowdowns: '.*' is not a pair of slowdowns: write 1.25:1.1 or"):
        overlap_slowdowns(text)
