"""Pipeline stages that span node types: priced by their slowest rank, and searched against every plan."""

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from brute_force import mistakes
from certificate_attacks import one_way
from highs import solve
from made_up import make_hardware, make_mixed_cluster, make_profile, make_request
from mixed_worlds import MIB, SLOWNESS, check_best, mixed_world, plain, profiles_of, walks
from msgspec.structs import replace
from plans_by_hand import plans_on
from random_problems import best_of, random_spanning
from random_requests import random_solution
from rest_long import rest_long
from stage_axes import stage_axes
from test_search_certificate import some_proof

from shardwright.display.plan_words import node_type_uses
from shardwright.io import BadInput
from shardwright.types import GIB, Cluster, Model, Plan
from shardwright_search.certificate.check import confirms
from shardwright_search.certificate.make import certified
from shardwright_search.commands.prediction import prediction_of_searched
from shardwright_search.cost_model.collectives import axis_group_kinds, stage_topology
from shardwright_search.cost_model.plan import cost_model_of, evaluate
from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.solver.problem import Problem, price
from shardwright_search.space.configurations import configurations, narrowed
from shardwright_search.space.placements import StageWays
from shardwright_search.space.request import SearchRequest, StageWidths
from shardwright_search.space.search_space import SearchSpace, space_of

FILE, ANY = Path("s.json"), StageWidths.ANY


@pytest.mark.parametrize("block", rest_long(1, range(2)))
def test_plans_that_span_node_types_cost_the_same_to_the_solver_and_to_evaluate(block):
    spanning = crossings = 0
    for seed in range(10 * block, 10 * (block + 1)):
        world = mixed_world(seed, spans=True)
        request, _, cluster, profiles = world
        instance, rng = space_of(*world, FILE).instance, np.random.default_rng(seed)
        try:
            targets = SearchSpace(instance, FILE).targets
        except BadInput:  # no equal widths that divide the batch and the model
            assert request.stage_widths is StageWidths.EQUAL
            continue
        for number in rng.choice(len(targets), min(8, len(targets)), replace=False):
            target = targets[number]
            problem = instance.problem(target.configuration)
            solution = random_solution(rng, problem)
            plan, priced = instance.plan(target.configuration, solution), price(problem, solution)
            found = evaluate(plan, profiles, cost_model_of(plan, profiles))
            assert found.objective_ps == priced.objective_ps + target.offset_ps, seed
            types = [{cluster.node_type_of_rank[rank] for rank in stage.ranks} for stage in plan.stages]
            process = [max(profiles.of_device(name).process_bytes for name in own) for own in types]
            held = [stage.memory_bytes for stage in found.estimate.stages]
            assert [a - b for a, b in zip(held, process, strict=True)] == list(priced.memory_bytes), seed
            spanning += sum(len(own) > 1 for own in types)
            crossings += len(types) - 1
            assert sum(use.ranks for use in node_type_uses(plan, found.estimate)) in (0, cluster.num_devices)
    assert spanning > 10 and crossings > 30


def test_each_part_of_a_spanning_stage_takes_as_long_as_on_its_slowest_rank(make):
    """b computes 2.5 times as slowly, a has the slower links; alone in its stage each does as much on as many ranks."""
    model, cluster = make.model(), make_mixed_cluster(a=(1, 2, GIB), b=(1, 2, GIB))
    profiles = profiles_of(model, cluster, {"a": 1e8, "b": 1e9})
    alone = {
        name: evaluate(
            plain(model, make_mixed_cluster(**{name: (2, 2, GIB)}), [(0, 1, 2, 3)]), profiles
        ).estimate.stages[0]
        for name in "ab"
    }
    (both,) = evaluate(plain(model, cluster, [(0, 1, 2, 3)]), profiles).estimate.stages
    for term in ("forward", "backward", "optimizer"):
        assert both.time_terms_s[term] == max(own.time_terms_s[term] for own in alone.values()), term
    assert alone["b"].time_terms_s["forward"] == pytest.approx(SLOWNESS["b"] * alone["a"].time_terms_s["forward"])
    assert alone["a"].time_terms_s["gradient_sync"] > 2 * alone["b"].time_terms_s["gradient_sync"]
    assert both.time_terms_s["gradient_sync"] == alone["a"].time_terms_s["gradient_sync"]
    heavy = profiles.each(lambda own: own._replace(process_bytes=own.process_bytes + (own.origin.device == "a") * MIB))
    assert evaluate(plain(model, cluster, [(0, 1, 2, 3)]), heavy).estimate.stages[0].memory_bytes == (
        both.memory_bytes + MIB
    )


def test_groups_inside_one_type_are_not_priced_as_those_of_another():
    """Pairs of neighbours lie on two nodes of a, or in one of b."""
    cluster = make_mixed_cluster(a=(2, 1, GIB), b=(1, 2, GIB))
    on_a, on_b = stage_topology(cluster, (0, 1, 2, 3)).each_type
    assert [kind.across_nodes for kind in axis_group_kinds(on_a, stage_axes(on_a, 2, True).tensor)] == [True]
    assert [kind.across_nodes for kind in axis_group_kinds(on_b, stage_axes(on_b, 2, True).tensor)] == [False]
    assert [
        kind.across_nodes for on in (on_a, on_b) for kind in axis_group_kinds(on, stage_axes(on, 4, True).tensor)
    ] == [True, True]


def by_hand(cluster: Cluster, p: int, widths: StageWidths) -> set[tuple[tuple[int, ...], ...]]:
    """The ranks of the stages of every plan: what is left of each type is taken up in its order."""
    types, nodes, equal = cluster.node_type_of_rank, cluster.node_of_rank, cluster.num_devices / p

    def whole(ranks: tuple[int, ...]) -> bool:
        return all(rank in ranks for rank, node in enumerate(nodes) if node in {nodes[own] for own in ranks})

    def allowed(stage: int, ranks: tuple[int, ...], left: dict[str, list[int]]) -> bool:
        as_wide = len(ranks) == equal and cluster.num_devices - sum(map(len, left.values())) == stage * equal
        if widths is not ANY and not as_wide:
            return False
        if len({types[rank] for rank in ranks}) == 1:
            return as_wide or whole(ranks) or len({nodes[rank] for rank in ranks}) == 1
        parts = sum(0 < sum(rank in ranks for rank in own) < len(own) for own in left.values())
        return whole(ranks) or (as_wide and parts <= 1)

    def further(stage: int, left: dict[str, list[int]]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if stage == p:
            yield from [()] if not any(left.values()) else []
            return
        for counts in product(*(range(len(own) + 1) for own in left.values())):
            taken = zip(left.items(), counts, strict=True)
            ranks = tuple(sorted(rank for (_, own), count in taken for rank in own[:count]))
            if ranks and allowed(stage, ranks, left):
                rest = {name: own[count:] for (name, own), count in zip(left.items(), counts, strict=True)}
                yield from ((ranks, *others) for others in further(stage + 1, rest))

    return set(further(0, {name: [r for r, of in enumerate(types) if of == name] for name in cluster.node_types}))


@pytest.mark.parametrize("widths", StageWidths)
@pytest.mark.parametrize("nodes", [{"a": (2, 2), "b": (1, 2)}, {"b": (1, 2), "c": (1, 1), "a": (3, 1)}])
def test_stages_can_be_wherever_they_can_by_hand(nodes, widths):
    cluster = make_mixed_cluster(**{name: (*own, GIB) for name, own in nodes.items()})
    seen = 0
    for p in range(1, 5):
        total = cluster.num_devices
        sizes = range(1, total + 1) if widths is ANY else [total // p] if total % p == 0 else []
        placed = StageWays(cluster, [sizes] * p, by_nodes=widths is ANY, spans=True).placements
        every = set() if placed is None else {placed.stage_ranks(groups) for groups in walks(placed)}
        assert every == by_hand(cluster, p, widths) if sizes else not every
        seen += sum(len({cluster.node_type_of_rank[rank] for rank in ranks}) > 1 for own in every for ranks in own)
    assert seen >= 3


def test_listed_widths_take_what_is_left_of_a_type_and_a_part_of_the_next():
    cluster = make_mixed_cluster(a=(1, 4, GIB), b=(2, 4, GIB))
    placed = StageWays(cluster, [[6], [6]], spans=True).placements
    assert placed is not None
    found = {placed.stage_ranks(groups) for groups in walks(placed)}
    assert found == {(tuple(range(6)), tuple(range(6, 12))), ((4, 5, 6, 7, 8, 9), (0, 1, 2, 3, 10, 11))}


def every_plan(request: SearchRequest, model: Model, cluster: Cluster) -> Iterator[Plan]:
    """All plans whose stages may span node types, put together without the solver."""
    request = narrowed(request, cluster)
    for configuration in configurations(request, model, cluster, FILE):
        for ranks in by_hand(cluster, configuration.pp_size, ANY):
            yield from plans_on(ranks, configuration, request, model, cluster)


@pytest.mark.parametrize("seed", rest_long(2, range(6)))
def test_the_searched_plan_is_the_best_of_all_plans_that_may_span_node_types(make, seed):
    rng = np.random.default_rng(seed)
    nodes = [{"a": (1, 2), "b": (1, 1)}, {"a": (1, 1), "b": (2, 1)}, {"c": (1, 1), "a": (1, 1), "b": (1, 1)}][seed % 3]
    model = make.model(3 if len(nodes) == 2 else 2, tied=bool(seed % 2))
    cluster = make_mixed_cluster(**{name: (*own, GIB) for name, own in nodes.items()})
    rates = {name: float(rng.choice([1e8, 1e9])) for name in nodes}
    profiles = profiles_of(model, cluster, rates, tp_sizes=(1, 2), process_bytes=MIB)
    profiles = profiles.each(lambda own: own._replace(process_bytes=MIB * (1 + (own.origin.device == "a"))))
    request = make_request(
        global_batch_size=6,
        num_microbatches=[int(rng.choice([1, 2]))],
        schedules=["1f1b"],
        data_parallel=["ddp", "zero3"],
        recompute=["none", "full"],
        sequence_parallel=["none"],
        stage_widths="any",
        span_node_types=True,
        tp_sizes=[1, 2],
        tp_consecutive=[bool(rng.random() < 0.5)],
    )
    check_best(every_plan(request, model, cluster), request, model, cluster, profiles, rng)


@pytest.mark.parametrize("seeds", rest_long(1, (range(20), range(20, 100))))
def test_the_solver_equals_brute_force_over_stages_that_span_node_types(seeds):
    assert mistakes(seeds, random_spanning) == {}


def test_weights_that_do_not_add_up_over_the_types_of_a_stage_are_caught(monkeypatch):
    """A mean bounds the largest only if the shares of all stages are 1 on average in any plan."""
    weights = Problem.relative_weights.func

    @cache
    def of_one_type(self: Problem) -> tuple[float, ...]:
        used = [np.subtract(after, at) for moves in self.placements for at, own in moves.items() for _, after in own]
        groups = [group for moves in self.placements for own in moves.values() for group, _ in own]
        spanning = {group for group, taken in zip(groups, used, strict=True) if (taken > 0).sum() > 1}
        return tuple(of * (3 if group in spanning else 1) for group, of in enumerate(weights(self)))

    monkeypatch.setattr(Problem, "relative_weights", property(of_one_type))
    assert any(mistakes(range(seed, seed + 1), random_spanning) for seed in range(60))


@pytest.mark.parametrize("seeds", rest_long(1, (range(6), range(6, 15))))
def test_highs_finds_the_best_plan_of_stages_that_span_node_types(seeds):
    for seed in seeds:
        problem = random_spanning(seed)
        answer, best = solve(problem, 60.0), best_of(problem)
        assert answer.done and answer.objective_ps == pytest.approx(best, rel=1e-6), seed


def test_a_certificate_of_stages_that_span_confirms_what_is_near_the_best_plan_and_no_more():
    every = (problem for problem in map(random_spanning, range(60)) if problem.pp_size == 2)
    problem = next(problem for problem in every if np.isfinite(best_of(problem)))
    made = certified([one_way(problem)], best_of(problem), lambda line: None)
    assert made is not None
    bound, (proof,) = made
    assert bound > 0.95 * best_of(problem) and confirms(problem, proof, bound)
    assert not confirms(problem, proof, best_of(problem) * (1 + 1e-6))
    for seed, other in enumerate(map(random_spanning, range(40))):
        assert not np.isfinite(best_of(other)) or not confirms(
            other, some_proof(other, seed), best_of(other) * (1 + 1e-6)
        )


def test_what_the_runtime_cannot_run_is_marked_plan_only_and_says_why(make):
    model, cluster = make.model(), make_mixed_cluster(a=(1, 2, GIB), b=(1, 2, GIB))
    profiles = profiles_of(model, cluster, {"a": 1e9, "b": 1e9})
    plan = plain(model, cluster, [(0, 1, 2, 3)])
    assert not any(line.startswith("plan_only") for line in evaluate(plan, profiles).warnings)
    types = cluster.node_types | {"b": replace(cluster.node_types["b"], device="cpu")}
    there = replace(plan, cluster=replace(cluster, node_types=types))
    of_cpu = make.index(make_hardware(cluster), make_profile(model))
    told = evaluate(there, profiles._replace(others=(of_cpu,))).warnings
    assert told[0] == "plan_only: cpu and other devices in one cluster exchange no collectives"


def test_a_search_that_may_span_is_never_worse_and_its_proof_says_so(make):
    """Two nodes of one rank: one stage over both shares out the samples where two stages cannot share the layer."""
    model, cluster = make.model(1), make_mixed_cluster(a=(1, 1, GIB), c=(1, 1, GIB))
    profiles = profiles_of(model, cluster, {"a": 4e9, "c": 4e9}, tp_sizes=(1,))
    request = make_request(global_batch_size=64, num_microbatches=[1], schedules=["1f1b"])
    found = [
        find_best(replace(request, span_node_types=spans), model, cluster, profiles, FILE, lambda _: None)
        for spans in (False, True)
    ]
    apart, spanning = (own for own in found if isinstance(own, SearchAnswer))
    assert [len(own.chosen.plan.stages) for own in (apart, spanning)] == [2, 1]
    assert spanning.optimum_s < 0.85 * apart.optimum_s
    scopes = [
        prediction_of_searched(
            own, replace(request, span_node_types=spans), [GIB] * len(own.chosen.plan.stages), {}
        ).proof.scope
        for own, spans in ((apart, False), (spanning, True))
    ]
    assert "each stage on ranks of one type" in scopes[0] and "of one type or of several" in scopes[1]


def test_equal_widths_that_no_types_ranks_divide_into_need_stages_that_span(make):
    model, cluster = make.model(4), make_mixed_cluster(a=(1, 1, GIB), b=(1, 3, GIB))
    profiles = profiles_of(model, cluster, {"a": 1e9, "b": 1e9}, tp_sizes=(1, 2))
    request = make_request(pp_sizes=[2], schedules=["1f1b"])
    with pytest.raises(BadInput, match="no strategy divides"):
        find_best(request, model, cluster, profiles, FILE, lambda _: None)
    found = find_best(replace(request, span_node_types=True), model, cluster, profiles, FILE, lambda _: None)
    assert isinstance(found, SearchAnswer)
    assert {stage.ranks for stage in found.chosen.plan.stages} in ({(0, 1), (2, 3)}, {(1, 2), (0, 3)})
