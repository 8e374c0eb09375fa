"""FASOP's space in benchmarks/peers: candidates and partitions against all there are, and formulas by hand."""

from itertools import combinations, product

import numpy as np
import pytest
from fasop_estimate import batches, estimate_of, estimates
from fasop_exact import (
    Pipelines,
    check,
    fastest_partitions,
    min_bottlenecks,
    min_sums,
    pipeline_times,
    stage_times,
)
from fasop_problem import Candidate, FasopProblem, LayerKind, NodeCosts, candidates, rotations
from msgspec.structs import replace
from rest_long import rest_long

from shardwright.types import GIB


def all_cuts(layers, stages):
    return np.array([(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)])


def random_pipelines(rng):
    """Layers of few different times, so that many partitions are equal, on one to three speeds."""
    layers = int(rng.integers(1, 10))
    stages, speeds = int(rng.integers(1, layers + 1)), int(rng.integers(1, 4))
    times = rng.integers(1, 6, layers) * rng.choice([1, 2, 9], (speeds, 1)) + rng.integers(0, 2, (speeds, layers))
    table = np.concatenate([np.zeros((speeds, 1), np.int64), np.cumsum(times, axis=1)], axis=1)
    number = 6
    rows, sends = rng.integers(0, speeds, (number, stages)), rng.integers(0, 6, (number, stages))
    return Pipelines(table, rows, sends, rng.choice([0, 1, 2, 8], number))


@pytest.mark.parametrize("seed", rest_long(2, range(6)))
def test_partitions_are_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    raised = 0
    for _ in range(60):
        pipelines = random_pipelines(rng)
        least, chosen = min_bottlenecks(pipelines), fastest_partitions(pipelines)
        found, every = pipeline_times(pipelines, chosen), all_cuts(pipelines.layers, pipelines.rows.shape[1])
        within = min_sums(pipelines, least)
        for number in range(len(pipelines.rows)):
            one = pipelines.some(np.full(len(every), number))
            times = stage_times(one, every)
            assert least[number] == times.max(axis=1).min()
            assert found[number] == pipeline_times(one, every).min()
            inside = times[times.max(axis=1) <= least[number]]
            assert stage_times(pipelines, within)[number].sum() == inside.sum(axis=1).min()
            raised += stage_times(pipelines, chosen)[number].max() > least[number]
    assert raised > 2  # the fastest is not always that of the least bottleneck


def problem(**changes):
    """Two types of nodes of two devices, and a model of three blocks."""
    fast, slow = (
        NodeCosts(
            name=name,
            limit_gib=limit,
            usd_per_hour=usd,
            send_inside=8e9,
            send_between=between,
            reduce_inside=4e9,
            reduce_between=between / 2,
            shares_inside=name == "slow",
        )
        for name, limit, usd, between in (("fast", 40.0, 36.0, 2e9), ("slow", 20.0, 18.0, 1e9))
    )
    kinds = (LayerKind.EMBEDDING, *[LayerKind.BLOCK] * 3, LayerKind.HEAD)
    work = np.array([10, 100, 100, 100, 50]) * 10**9
    layer_ps = {
        (name, tp, size): work * size * slowness // tp + 10**8
        for name, slowness in (("fast", 1), ("slow", 3))
        for tp in (1, 2)
        for size in (1, 2, 4, 8)
    }
    parameters = {tp: np.array([6e6, 4e6, 4e6, 4e6, 6e6]) / tp for tp in (1, 2)}
    usual = {
        "node_types": (fast, slow),
        "devices_per_node": 2,
        "batch": 8,
        "max_pp_size": 3,
        "kinds": kinds,
        "layer_ps": layer_ps,
        "parameters": parameters,
        "reduced": parameters,
        "tied": 6_000_000,
        "outer_once": True,
        "hidden": 512,
        "sequence_length": 128,
        "vocabulary": 11_719,
        "heads": 8,
    }
    return FasopProblem(**(usual | changes))


@pytest.mark.parametrize("counts", [(1, 0), (2, 1), (1, 2), (0, 4)])
def test_candidates_are_all_that_divide(counts):
    devices = 2 * sum(counts)
    shapes = {
        (tp, dp, pp, size)
        for tp, dp, pp, size in product((1, 2), range(1, devices + 1), range(1, 4), range(1, 9))
        if tp * dp * pp == devices and 8 % (dp * size) == 0
    }
    found = list(candidates(problem(), counts))
    assert len(found) == len(set(found))
    assert {own[:4] for own in found} == shapes
    assert {own.nodes for own in found} == set(rotations(counts))


def test_nodes_are_placed_in_rotation():
    assert rotations((2, 1)) == ((0, 0, 1), (0, 1, 0), (1, 0, 0))
    assert rotations((0, 3)) == ((1, 1, 1),)


def test_a_step_by_hand():
    """Three stages of tp 1 x dp 2 on a fast and two slow nodes: every stage a node, every send between nodes."""
    own = Candidate(1, 2, 3, 2, nodes=(0, 1, 1))  # two microbatches
    found = estimate_of(problem(), own, (3, 1, 1))
    num_bytes = 2 * 128 * 512 * 2
    first, second = num_bytes / (1e9 / 2), num_bytes / (1e9 / 2)  # the slower end; two ranks share it
    stages = [0.4203 + first, 0.6001 + first + second, 0.3001 + second]
    assert found.pipeline_s == pytest.approx(sum(stages) + max(stages), rel=1e-9)
    # The first stage reduces an embedding and two blocks over two ranks inside a node; the last a head.
    assert found.reduction_s == pytest.approx(2 * 1 / 2 * 14e6 * 2 / 4e9, rel=1e-9)
    assert found.tied_s == pytest.approx(6e6 * 2 / (0.5e9 / 2), rel=1e-9)
    assert found.usd_per_step == pytest.approx((36 + 18 + 18) / 3600 * found.step_s)
    assert estimate_of(problem(tied=0), own, (3, 1, 1)).tied_s == 0


def test_a_stage_on_several_node_types_runs_as_the_slowest_and_has_the_least_memory():
    own = Candidate(2, 2, 2, 2, nodes=(0, 1, 1, 1))
    found = estimate_of(problem(), own, (3, 2))
    send = 2 * 128 * 512 * 2 / (1e9 / 4)
    stages = [(10 + 200) * 3e-3 + 3e-4 + send, (100 + 50) * 3e-3 + 2e-4 + send]
    assert found.pipeline_s == pytest.approx(sum(stages) + max(stages), rel=1e-9)
    limited = replace(problem().node_types[1], limit_gib=0.05)
    tight = estimate_of(problem(node_types=(problem().node_types[0], limited)), own, (3, 2))
    assert tight.memory.is_oom and not found.memory.is_oom


def test_memory_by_hand():
    """18 bytes a parameter, or 6 and a share of 12; activations of as many microbatches as there are stages."""
    own = Candidate(1, 2, 3, 2, nodes=(0, 1, 1))
    found = estimate_of(problem(), own, (3, 1, 1)).memory
    numel, in_flight = 2 * 128 * 512, 2
    first = numel * 3 * in_flight + 2 * numel * in_flight * (10 + 24 + 5 * 8 * 128 / 512)
    second = numel * in_flight * (10 + 24 + 5 * 8 * 128 / 512)
    last = 4 * 2 * 128 * (512 + 11_719)
    plain = [14e6 * 18 + first, 4e6 * 18 + second, 6e6 * 18 + last]
    shared = [14e6 * 12 + first, 4e6 * 12 + second, 6e6 * 12 + last]
    left = [limit - 1.1 * own / GIB for limit, own in zip((40, 20, 20), plain, strict=True)]
    tightest = left.index(min(left))
    assert found.gib == pytest.approx(1.1 * plain[tightest] / GIB, rel=1e-9)
    assert found.sharded_gib == pytest.approx(1.1 * shared[tightest] / GIB, rel=1e-9)


def test_sharded_states_get_smaller_beyond_12_ranks():
    """FASOP's int(12/dp) is 0 there: its estimate is that of states that take nothing."""
    wide = problem(devices_per_node=16, batch=64, layer_ps=problem().layer_ps)
    own = Candidate(1, 16, 1, 4, nodes=(0,))
    found = estimate_of(wide, own, (5,)).memory
    numel = 4 * 128 * 512
    activations = numel + 3 * numel * 44 + 4 * 4 * 128 * (512 + 11_719)
    assert found.sharded_gib == pytest.approx(1.1 * (24e6 * (6 + 12 / 16) + activations) / GIB, rel=1e-9)


def test_the_least_sum_of_links_binds_a_ring():
    """Stage 1 of tp 2 x dp 2 spans two slow nodes: both tensor-parallel ranks' rings share the link between them."""
    own = Candidate(2, 2, 2, 2, nodes=(0, 0, 1, 1))
    found = estimate_of(problem(), own, (3, 2))
    stages = [7e6 / (1e9 / 2), 5e6 / (0.5e9 / 2)]
    assert found.reduction_s == pytest.approx(2 * 1 / 2 * 2 * max(stages), rel=1e-9)


def test_every_candidate_stays_the_fastest_first_and_all_partitions_agree():
    """Those out of memory among them; no partition of any candidate gives less than the chosen one."""
    little = tuple(replace(own, limit_gib=0.3) for own in problem().node_types)
    own = problem(node_types=little, parameters={tp: 2 * of for tp, of in problem().parameters.items()})
    every = [*candidates(own, (2, 1)), *candidates(own, (1, 0))]  # of two and three stages, and of one and two
    found = estimates(own, every)
    assert sorted(e.candidate for e in found) == sorted(every)
    assert [e.step_s for e in found] == sorted(e.step_s for e in found)
    assert {e.memory.is_oom for e in found} == {True, False}
    for estimate in found:
        cuts = all_cuts(5, estimate.candidate.pp_size)
        least = min(estimate_of(own, estimate.candidate, np.diff(cut)).pipeline_s for cut in cuts)
        assert estimate.pipeline_s == pytest.approx(least, rel=1e-12)
    results = [check(batch.pipelines, batch.candidates) for batch in batches(own, every)]
    assert sum(result.tried for result in results) == len(every) and not any(result.wrong for result in results)


def test_the_check_finds_a_partition_that_is_not_the_best(monkeypatch):
    own = problem()
    every = [Candidate(1, 2, 3, 2, nodes=(0, 1, 1))]
    even = lambda pipelines: np.array([[0, 1, 2, 5]])  # noqa: E731
    monkeypatch.setattr("fasop_exact.fastest_partitions", even)
    (result,) = [check(batch.pipelines, batch.candidates) for batch in batches(own, every)]
    assert len(result.wrong) == 1 and "is possible" in result.wrong[0]
