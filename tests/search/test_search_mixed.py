"""Clusters of several node types: priced by the type a stage is on, searched against every plan, or refused."""

from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from brute_force import mistakes
from highs import solve
from made_up import make_mixed_cluster, make_request
from mixed_worlds import MIB, SLOWNESS, check_best, mixed_world, plain, profiles_of, walks
from msgspec.structs import replace
from plans_by_hand import plans_on
from random_problems import best_of, random_mixed
from random_requests import random_solution
from rest_long import rest_long

from shardwright.display.plan_words import node_type_uses
from shardwright.io import BadInput
from shardwright.types import GIB, Cluster, Model, Plan
from shardwright_search.cost_model.plan import cost_model_of, evaluate
from shardwright_search.cost_model.profiles import together
from shardwright_search.explain.tables import node_types_table
from shardwright_search.solver.configuration_bounds import ConfigurationBounds, StageLowerBounds
from shardwright_search.solver.problem import price
from shardwright_search.space.configurations import configurations, narrowed
from shardwright_search.space.placements import StageWays
from shardwright_search.space.request import SearchRequest, StageWidths
from shardwright_search.space.search_space import SearchSpace, space_of

FILE, ANY = Path("s.json"), StageWidths.ANY


@pytest.mark.parametrize("block", rest_long(1, range(2)))
def test_plans_on_several_node_types_cost_the_same_to_the_solver_and_to_evaluate(block):
    crossings = orders = 0
    for seed in range(12 * block, 12 * (block + 1)):
        world = mixed_world(seed)
        request, _, cluster, profiles = world
        instance, rng = space_of(*world, FILE).instance, np.random.default_rng(seed)
        try:
            targets = SearchSpace(instance, FILE).targets
        except BadInput:  # equal widths that no type's ranks can be shared out in
            assert request.stage_widths is StageWidths.EQUAL
            continue
        for number in rng.choice(len(targets), min(8, len(targets)), replace=False):
            target = targets[number]
            problem = instance.problem(target.configuration)
            solution = random_solution(rng, problem)
            plan, priced = instance.plan(target.configuration, solution), price(problem, solution)
            found = evaluate(plan, profiles, cost_model_of(plan, profiles))
            assert found.objective_ps == priced.objective_ps + target.offset_ps, seed
            types = [cluster.node_type_of_rank[stage.ranks[0]] for stage in plan.stages]
            process = [profiles.of_device(name).process_bytes for name in types]
            held = [stage.memory_bytes for stage in found.estimate.stages]
            assert [a - b for a, b in zip(held, process, strict=True)] == list(priced.memory_bytes), seed
            crossings += sum(a != b for a, b in pairwise(types))
            orders += plan.stages[0].ranks[0] != 0
    assert crossings > 50 and orders > 20


def test_a_message_between_node_types_takes_as_long_as_its_slower_end(make):
    """4 samples of 32 positions and 64 features over 2 ranks are 16 KiB: half of it counts, and 40 us across nodes."""
    model, cluster = make.model(), make_mixed_cluster(a=(2, 2, GIB), b=(1, 2, GIB))
    profiles = profiles_of(model, cluster, {"a": 1e9, "b": 1e8})
    found = evaluate(plain(model, cluster, [(0, 1), (2, 3), (4, 5)]), profiles)
    fast, slow = 40e-6 + 8192e-9, 40e-6 + 81920e-9
    sends = [stage.time_terms_s["sends"] for stage in found.estimate.stages]
    assert sends == pytest.approx([fast, fast + slow, slow], abs=1e-11)


def test_layers_cost_what_their_own_type_takes_and_memory_counts_its_process(make):
    model, cluster = make.model(), make_mixed_cluster(a=(1, 2, GIB), b=(1, 2, GIB))
    profiles = profiles_of(model, cluster, {"a": 1e9, "b": 1e9})
    heavy = profiles.each(lambda own: own._replace(process_bytes=own.process_bytes + (own.origin.device == "b") * MIB))
    ways = [plain(model, cluster, ranks) for ranks in ([(0, 1), (2, 3)], [(2, 3), (0, 1)])]
    (first, second), (swapped, _) = (evaluate(plan, profiles).estimate.stages for plan in ways)
    # The embedding and the head differ; the first stage is the same on either type but for its speed.
    assert swapped.time_terms_s["forward"] == pytest.approx(SLOWNESS["b"] * first.time_terms_s["forward"], rel=1e-9)
    assert evaluate(ways[0], heavy).estimate.stages[1].memory_bytes == second.memory_bytes + MIB
    assert evaluate(ways[1], heavy).estimate.stages[0].memory_bytes == swapped.memory_bytes + MIB


def by_hand(cluster: Cluster, p: int, widths: StageWidths) -> set[tuple[tuple[int, ...], ...]]:
    """The ranks of the stages of every plan: all orders of types, a type's stages on its ranks in their order."""
    pools = {t: [r for r, own in enumerate(cluster.node_type_of_rank) if own == t] for t in cluster.node_types}
    found = set()
    for types in product(pools, repeat=p):
        for sizes in product(range(1, cluster.num_devices + 1), repeat=p):
            used, ranks = dict.fromkeys(pools, 0), []
            for name, size in zip(types, sizes, strict=True):
                ranks.append(tuple(pools[name][used[name] : used[name] + size]))
                used[name] += size
            fits = all(used[name] == len(pool) for name, pool in pools.items())
            alike = len(set(sizes)) == 1
            if fits and (alike or (widths is ANY and all(on_nodes(cluster, own) for own in ranks))):
                found.add(tuple(ranks))
    return found


def on_nodes(cluster: Cluster, ranks: tuple[int, ...]) -> bool:
    """Whether ranks are in one node, or all that their nodes have."""
    nodes = cluster.node_of_rank
    used = {nodes[rank] for rank in ranks}
    return len(used) == 1 or len(ranks) == sum(node in used for node in nodes)


@pytest.mark.parametrize("widths", StageWidths)
@pytest.mark.parametrize("nodes", [{"a": (2, 2), "b": (1, 2)}, {"b": (1, 2), "c": (1, 2), "a": (2, 1)}])
def test_stages_can_be_wherever_they_can_by_hand(nodes, widths):
    cluster = make_mixed_cluster(**{name: (*own, GIB) for name, own in nodes.items()})
    seen = 0
    for p in range(1, 5):
        total = cluster.num_devices
        sizes = range(1, total + 1) if widths is ANY else [total // p] if total % p == 0 else []
        placed = StageWays(cluster, [sizes] * p, by_nodes=widths is ANY).placements
        every = set() if placed is None else {placed.stage_ranks(groups) for groups in walks(placed)}
        assert every == by_hand(cluster, p, widths) if sizes else not every
        seen += len(every)
    assert seen >= 1 + 10 * (widths is ANY)


def every_plan(request: SearchRequest, model: Model, cluster: Cluster) -> Iterator[Plan]:
    """All plans, put together without the solver."""
    request = narrowed(request, cluster)
    for configuration in configurations(request, model, cluster, FILE):
        for ranks in by_hand(cluster, configuration.pp_size, request.stage_widths):
            yield from plans_on(ranks, configuration, request, model, cluster)


@pytest.mark.parametrize("seed", rest_long(2, range(6)))
def test_the_searched_plan_is_the_best_of_all_plans_on_several_node_types(make, seed):
    rng = np.random.default_rng(seed)
    nodes = [{"a": (1, 2), "b": (1, 1)}, {"a": (1, 1), "b": (2, 1)}, {"c": (1, 1), "a": (1, 1), "b": (1, 1)}][seed % 3]
    model = make.model(3, tied=bool(seed % 2))
    cluster = make_mixed_cluster(**{name: (*own, GIB) for name, own in nodes.items()})
    rates = {name: float(rng.choice([1e8, 1e9])) for name in nodes}
    profiles = profiles_of(model, cluster, rates, tp_sizes=(1, 2), process_bytes=MIB)
    request = make_request(
        global_batch_size=4,
        num_microbatches=[int(rng.choice([1, 2, 4]))],
        schedules=["1f1b"],
        data_parallel=["ddp", "zero3"],
        recompute=["none", "full"],
        sequence_parallel=["none"],
        stage_widths="any",
        tp_sizes=[1, 2],
    )
    check_best(every_plan(request, model, cluster), request, model, cluster, profiles, rng)


@pytest.mark.parametrize("seeds", rest_long(1, (range(20), range(20, 60))))
def test_the_solver_equals_brute_force_over_several_node_types(seeds):
    assert mistakes(seeds, random_mixed) == {}


def test_a_solver_for_which_a_position_is_the_number_of_ranks_is_caught(monkeypatch):
    """The types that those ranks are of matter."""
    passed = ConfigurationBounds._pass

    def adding_up(self, stages, forward):
        found = passed(self, stages, forward)
        totals: dict[int, object] = {}
        for own in found:
            for position, rest in own.items():
                totals[sum(position)] = rest
            own.update({position: totals[sum(position)] for position in own})
        return found

    monkeypatch.setattr(ConfigurationBounds, "_pass", adding_up)
    assert any(mistakes(range(seed, seed + 1), random_mixed) for seed in range(60))


def test_bands_of_what_only_adds_up_with_the_least_sum_are_caught(monkeypatch):
    """The least of m A + U less the least of A is no bound on a stage's (m - 1) A + U."""

    def wrong(self, stage, group, send):
        own = self._costs(stage, group, send)
        return StageLowerBounds(own.total, own.slowest)

    monkeypatch.setattr(ConfigurationBounds, "_banded", wrong)
    assert any(mistakes(range(seed, seed + 1), random_mixed) for seed in range(8))


@pytest.mark.parametrize("seeds", rest_long(1, (range(10), range(10, 30))))
def test_highs_finds_the_best_plan_over_several_node_types(seeds):
    for seed in seeds:
        problem = random_mixed(seed)
        answer, best = solve(problem, 60.0), best_of(problem)
        assert answer.done and answer.objective_ps == pytest.approx(best, rel=1e-6), seed


def test_a_node_type_without_a_profile_and_a_device_with_two_are_refused(make):
    model, cluster = make.model(), make_mixed_cluster(a=(1, 2, GIB), b=(1, 2, GIB), c=(1, 1, GIB))
    profiles = profiles_of(model, cluster, {"a": 1e9, "b": 1e9})
    plan = plain(model, cluster, [(0, 1), (2, 3), (4,)])
    with pytest.raises(BadInput, match=r"^a\.h5: profiled on 'a', cluster 'mixed' has 'c': add its profile"):
        evaluate(plan, profiles)
    with pytest.raises(BadInput, match=r"^a\.h5: profiled on 'a', as a\.h5 was: give one profile for each device"):
        together([profiles, profiles.per_device[0]])


def test_profiles_of_two_models_or_precisions_are_refused(make):
    model, cluster = make.model(), make_mixed_cluster(a=(1, 2, GIB), b=(1, 2, GIB))
    plan = plain(model, cluster, [(0, 1), (2, 3)])
    other = profiles_of(make.model(hidden=128), cluster, {"b": 1e9})
    half = profiles_of(model, cluster, {"b": 1e9}, precision="float32/bfloat16/float32")
    good = profiles_of(model, cluster, {"a": 1e9})
    for bad, message in ((other, "profiled layers of"), (half, "profiled in float32/bfloat16/float32")):
        with pytest.raises(BadInput, match=f"^b.h5: {message}"):
            evaluate(plan, together([good, bad]))


def test_idle_time_is_told_by_node_type_with_its_price(make):
    """Stages of two ranks: busy is what each pass takes; b is slower, has one stage more, and is not priced."""
    model, cluster = make.model(6), make_mixed_cluster(a=(1, 2, GIB), b=(2, 2, GIB))
    types = {name: replace(own, usd_per_hour=3.6 if name == "a" else None) for name, own in cluster.node_types.items()}
    cluster = replace(cluster, node_types=types)
    profiles = profiles_of(model, cluster, {"a": 1e9, "b": 1e9})
    plan = plain(model, cluster, [(0, 1), (2, 3), (4, 5)])
    estimate = evaluate(plan, profiles).estimate
    end_s = max(event.end_s for event in estimate.timeline)
    kinds = ("forward", "backward", "gradient_sync", "optimizer")
    busy = [
        sum(event.end_s - event.start_s for event in estimate.timeline if event.stage == stage and event.kind in kinds)
        for stage in range(3)
    ]
    fast, slow = node_type_uses(plan, estimate)
    assert (fast.name, fast.stages, fast.ranks, slow.name, slow.stages, slow.ranks) == ("a", 1, 2, "b", 2, 4)
    assert fast.idle_share == pytest.approx(1 - busy[0] / end_s) and fast.busiest_s == pytest.approx(busy[0])
    assert slow.idle_share == pytest.approx(1 - (busy[1] + busy[2]) / 2 / end_s)
    assert slow.busiest_s == pytest.approx(max(busy[1:])) and slow.busiest_s > fast.busiest_s
    # Two ranks are the node of 0.001 USD a second.
    assert fast.idle_usd == pytest.approx((end_s - busy[0]) * 1e-3) and slow.idle_usd is None
    shown = node_types_table(plan, estimate)
    assert shown is not None and list(shown.columns[0].cells) == ["a", "b (binds)"]
    assert list(shown.columns[5].cells) == [f"{fast.idle_usd:.6f}", "no price"]
    alone = make_mixed_cluster(a=(2, 2, GIB))
    there = plain(model, alone, [(0, 1), (2, 3)])
    assert node_types_table(there, evaluate(there, profiles_of(model, alone, {"a": 1e9})).estimate) is None
