"""What is told of a configuration on a sub-cluster before it is known where its stages can be."""

from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from made_up import make_mixed_cluster, make_request
from mixed_worlds import mixed_world, profiles_of
from msgspec.structs import replace
from rest_long import rest_long

from shardwright.types import GIB, NodeGroup
from shardwright_search.solver import quick_bounds
from shardwright_search.solver.quick_bounds import _NodeTypeBounds
from shardwright_search.space import search_space
from shardwright_search.space.placements import StageWays
from shardwright_search.space.request import StageWidths
from shardwright_search.space.search_space import FirstBounds, SearchSpace, space_of

FILE = Path("s.json")


def test_whether_equal_stages_can_be_placed_is_told_without_their_places(monkeypatch):
    rng, answers = np.random.default_rng(0), list[bool]()
    cases = []
    for _ in range(60):
        names = list("abc")[: int(rng.integers(1, 4))]
        cluster = make_mixed_cluster(**{n: (int(rng.integers(1, 4)), int(rng.choice([1, 2, 3])), GIB) for n in names})
        ends = [None, *product([(n,) for n in "abc"], repeat=2)]
        for p, width, own in product(range(1, 5), range(1, 5), ends):
            widths = [(width,)] * (p - 1) + [() if rng.random() < 0.05 else (width,)]
            cases.append((cluster, widths, own, StageWays(cluster, widths, ends=own).placements is not None))
    monkeypatch.delattr(StageWays, "placements")
    for cluster, widths, own, wanted in cases:
        answers.append(StageWays(cluster, widths, ends=own).exist)
        assert answers[-1] == wanted, (cluster, widths, own)
    assert 100 < sum(answers) < len(answers) - 300


@pytest.mark.parametrize("by_nodes", [False, True])
def test_whether_stages_of_any_widths_can_be_placed_is_told_without_their_places(monkeypatch, by_nodes):
    rng, answers, cases = np.random.default_rng(1), list[bool](), []
    for _ in range(150):
        names = list("abc")[: int(rng.integers(1, 4))]
        cluster = make_mixed_cluster(**{n: (int(rng.integers(1, 4)), int(rng.choice([1, 2, 3])), GIB) for n in names})
        for p in range(1, 6):
            few = [tuple(rng.choice(range(1, 7), int(rng.integers(1, 5)), replace=False).tolist()) for _ in range(p)]
            widths = [(1, 2, 3), *few[1:-1], (2, 4)] if p > 2 and rng.random() < 0.3 else few
            for own in (None, (("a",), ("a",)), (("a",), ("b",)), (("b",), ("a",))):
                if own is None or p > 1 or own[0] == own[1]:
                    wanted = StageWays(cluster, widths, by_nodes, own).placements is not None
                    cases.append((cluster, widths, by_nodes, own, wanted))
    monkeypatch.delattr(StageWays, "placements")
    for *case, wanted in cases:
        answers.append(StageWays(*case).exist)
        assert answers[-1] == wanted, case
    assert 150 < sum(answers) < len(answers) - 150


def test_there_are_no_more_stages_than_are_told_without_their_places():
    rng, most = np.random.default_rng(2), 0.0
    for seed in range(200):
        names = list("ab")[: int(rng.integers(1, 3))]
        cluster = make_mixed_cluster(**{n: (int(rng.integers(1, 4)), int(rng.choice([1, 2, 4])), GIB) for n in names})
        widths = [tuple(range(1, int(rng.integers(2, 7)))) for _ in range(int(rng.integers(1, 6)))]
        spans = bool(seed % 2)
        ways = StageWays(cluster, widths, bool(seed % 3), None, spans)
        if ways.placements is not None:
            count = sum(len(moves) for own in ways.placements.moves for moves in own.values())
            assert count <= ways.max_moves
            most = max(most, count / ways.max_moves)
    assert most > 0.4


def bounds_and_bests(seeds: Iterable[int], slow_links: bool, **changes: object) -> Iterator[tuple[float, float]]:
    """Of each configuration that has a plan."""
    for seed in seeds:
        request, model, cluster, profiles = mixed_world(seed)
        if slow_links:
            profiles = profiles_of(model, cluster, dict.fromkeys(cluster.node_types, 1e6), tp_sizes=(1, 2, 4))
        if seed % 3 == 0:  # nodes of the types in turn, so that neighbours of a type have others between them
            nodes = [NodeGroup(node_type=own.node_type, count=1) for own in cluster.nodes for _ in range(own.count)]
            cluster = replace(cluster, nodes=tuple(nodes[::2] + nodes[1::2]))
        asked = replace(request, **{"stage_widths": StageWidths.EQUAL} | changes)
        space = space_of(asked, model, cluster, profiles, FILE)
        for target in space.listed:
            found = space.whole(target.configuration).solve_below(np.inf, 1, lambda made: None)
            if found:
                yield FirstBounds(space.instance).bound_ps(target.configuration), found[0].objective_ps


ANY = {"stage_widths": StageWidths.ANY, "global_batch_size": 8, "num_microbatches": (4, 8), "max_pp_size": 3}


@pytest.mark.parametrize(("count", "at_least"), rest_long(1, ((8, 30), (24, 100))))
def test_no_plan_of_any_widths_is_below_the_first_bound(count, at_least):
    pairs = list(bounds_and_bests(range(count), slow_links=False, **ANY))
    assert all(0 < bound <= best for bound, best in pairs)
    assert len(pairs) > at_least and sum(bound > 0.6 * best for bound, best in pairs) > len(pairs) / 10


def test_a_first_bound_of_any_widths_that_counts_too_much_is_caught(monkeypatch):
    """Stages' shares in the ranks, half as much again."""
    right = search_space.mean_weights
    monkeypatch.setattr(search_space, "mean_weights", lambda form, p, weight: right(form, p, 1.5 * weight))
    pairs = bounds_and_bests(range(60), slow_links=False, **ANY)
    assert any(bound > best for bound, best in pairs)


@pytest.mark.parametrize(("count", "at_least"), rest_long(1, ((10, 30), (30, 100))))
@pytest.mark.parametrize("slow_links", [False, True])
def test_no_plan_is_below_the_first_bound_and_many_are_near_it(slow_links, count, at_least):
    """Where links are slow it matters at how many ends a stage sends."""
    pairs = list(bounds_and_bests(range(count), slow_links))
    assert all(0 < bound <= best for bound, best in pairs)
    assert len(pairs) > at_least and sum(bound > 0.7 * best for bound, best in pairs) > len(pairs) / 10


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        pytest.param(quick_bounds, "sends_ps", lambda right: lambda of: 2 * right(of), id="sends counted twice"),
        pytest.param(
            _NodeTypeBounds,
            "most",
            lambda right: lambda own, bands, ps: right(own, bands, 4 * ps),
            id="sends at each end four times",
        ),
        pytest.param(
            _NodeTypeBounds,
            "max_with_head",
            lambda right: lambda own, bands, ps: right(own, bands, ps) - 1,
            id="a block less beside the head",
        ),
        pytest.param(
            quick_bounds,
            "_cheapest",
            lambda right: lambda *of: right(*of) * 1.5,
            id="blocks that take more",
        ),
    ],
)
def test_a_first_bound_that_counts_too_much_is_caught(monkeypatch, owner, name, wrong):
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    assert any(bound > best for slow in (True, False) for bound, best in bounds_and_bests(range(60), slow))


def test_stages_that_span_types_have_no_first_bound():
    for seed in range(8):
        request, *world = mixed_world(seed, spans=True)
        space = space_of(replace(request, stage_widths=StageWidths.ANY), *world, FILE)
        assert {FirstBounds(space.instance).bound_ps(target.configuration) for target in space.listed} == {None}


@pytest.mark.parametrize("tied", [False, True])
def test_a_sub_cluster_is_priced_as_by_itself_with_what_was_priced_for_the_whole(make, tied):
    """Stages of 3 and of 5 ranks have degrees that the 8 ranks of the whole have not."""
    model, whole = make.model(3, tied=tied), make_mixed_cluster(a=(3, 1, GIB), b=(5, 1, GIB))
    profiles = profiles_of(model, whole, {"a": 1e9, "b": 1e8}, tp_sizes=(1, 2, 3, 4, 5))
    request = make_request(global_batch_size=30, data_parallel=["ddp", "zero3"])
    known = space_of(replace(request, shard_sizes=(2,)), model, whole, profiles, FILE).instance
    for target in SearchSpace(known, FILE).listed[:40]:
        known.problem(target.configuration)
    seen = 0
    for counts in ({"a": 3}, {"b": 5}, {"a": 1, "b": 1}, {"a": 2, "b": 4}):
        nodes = tuple(NodeGroup(node_type=name, count=count) for name, count in counts.items())
        sizes = tuple(size for size in (2, 3) if sum(counts.values()) % size == 0)
        world = replace(request, shard_sizes=sizes or None), model, replace(whole, nodes=nodes), profiles, FILE
        alone, shared = space_of(*world).instance, space_of(*world, known).instance
        assert SearchSpace(alone, FILE).listed == SearchSpace(shared, FILE).listed
        for target in SearchSpace(alone, FILE).listed:
            one, other = (own.problem(target.configuration) for own in (alone, shared))
            assert one.placements == other.placements and one.in_flight == other.in_flight
            for group, same in zip(one.device_groups, other.device_groups, strict=True):
                assert group.budget_bytes == same.budget_bytes
                for options, columns in zip(group.options, same.options, strict=True):
                    assert all(map(np.array_equal, options[:7], columns[:7]))
            assert all(np.array_equal(times, other.sends_ps[cut]) for cut, times in one.sends_ps.items())
            assert one.tied_ps.min() == other.tied_ps.min()
            seen += 1
    assert seen >= 40
