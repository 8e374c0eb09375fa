"""Pipeline stages of unequal width: priced as they are solved, searched against every plan, certified, told."""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from brute_force import mistake, mistakes, solved
from command_calls import call
from highs import solve
from made_up import make_cluster, make_model, make_profiles
from msgspec.structs import replace
from plans_by_hand import plans_on
from random_problems import best_of, random_unequal
from random_requests import World, random_solution, random_world
from rest_long import rest_long

from shardwright.io import read_document
from shardwright.plan.axes import Layout
from shardwright.plan.layout import sent_numel
from shardwright.types import GIB, BoundaryTensor, Cluster, Model, Plan, Prediction
from shardwright_search.cli import APP
from shardwright_search.cost_model.collectives import handover_time, send_kind_time
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.explain.tables import plan_differences
from shardwright_search.search import Infeasible, SearchAnswer, find_best
from shardwright_search.solver import partition
from shardwright_search.solver.configuration_bounds import ConfigurationBounds
from shardwright_search.solver.problem import Problem, Start, price
from shardwright_search.space.configurations import configurations, narrowed
from shardwright_search.space.request import SearchRequest, StageWidths

FILE = Path("s.json")
PROFILES = make_profiles(make_model(), make_cluster(8))
ANY = StageWidths.ANY


@pytest.mark.parametrize("block", rest_long(1, range(4)))
def test_the_solver_equals_brute_force_over_stages_of_unequal_width(block):
    assert mistakes(range(50 * block, 50 * (block + 1)), random_unequal) == {}


@pytest.mark.parametrize("seeds", rest_long(1, (range(20), range(20, 60))))
def test_highs_finds_the_best_plan_over_stages_of_unequal_width(seeds):
    for seed in seeds:
        problem = random_unequal(seed)
        answer, best = solve(problem, 60.0), best_of(problem)
        assert answer.done and answer.objective_ps == pytest.approx(best, rel=1e-6), seed
        if answer.solution is not None:
            assert price(problem, answer.solution).objective_ps == best, seed


def any_widths(world: World) -> World:
    return world._replace(request=replace(world.request, stage_widths=ANY))


@pytest.mark.parametrize("block", rest_long(1, range(2)))
def test_plans_of_any_widths_cost_the_same_to_the_solver_and_to_evaluate(block):
    """On one node and on several, tied or with shared parameters, wherever the stages are cut."""
    unequal = 0
    for seed in range(3000 + 15 * block, 3000 + 15 * (block + 1)):
        world, rng = any_widths(random_world(seed)), np.random.default_rng(seed)
        instance = world.instance
        for target in world.targets(instance):
            configuration = target.configuration
            if configuration.widths is not ANY:
                continue
            problem = instance.problem(configuration)
            solution = random_solution(rng, problem)
            plan, priced = instance.plan(configuration, solution), price(problem, solution)
            found = evaluate(plan, world.profiles, instance.costs)
            assert found.objective_ps == priced.objective_ps + target.offset_ps, seed
            process_bytes = world.profiles.process_bytes
            held = tuple(stage.memory_bytes - process_bytes for stage in found.estimate.stages)
            assert held == priced.memory_bytes, seed
            assert found.estimate.simulated_lower_bound_s <= found.estimate.simulated_step_time_s, seed
            unequal += len({len(stage.ranks) for stage in plan.stages}) > 1
    assert unequal > 100


def on_nodes(cluster: Cluster, ranks: Sequence[int]) -> bool:
    """Whether ranks are in one node, or all that their nodes have."""
    nodes = cluster.node_of_rank
    used = {nodes[rank] for rank in ranks}
    return len(used) == 1 or len(ranks) == sum(node in used for node in nodes)


def every_plan(request: SearchRequest, model: Model, cluster: Cluster) -> Iterator[Plan]:
    """All plans of any widths, put together without the solver."""
    request = narrowed(request, cluster)
    for configuration in configurations(request, model, cluster, FILE):
        p = configuration.pp_size
        for widths in product(range(1, cluster.num_devices + 1), repeat=p):
            ranks = [tuple(range(sum(widths[:i]), sum(widths[: i + 1]))) for i in range(p)]
            if sum(widths) != cluster.num_devices:
                continue
            if len(set(widths)) > 1 and not all(on_nodes(cluster, own) for own in ranks):
                continue
            yield from plans_on(ranks, configuration, request, model, cluster)


def searched(request: SearchRequest, model: Model, cluster: Cluster, profiles) -> SearchAnswer | Infeasible:
    return find_best(request, model, cluster, profiles, FILE, lambda line: None)


@pytest.mark.parametrize("seed", rest_long(3, range(8)))
def test_the_searched_plan_is_the_best_of_all_plans_of_any_widths(make, seed):
    rng = np.random.default_rng(seed)
    devices, nodes = (3, 1) if seed % 2 else (4, 2)
    model, cluster = make.model(3, tied=bool(seed // 2 % 2)), make.cluster(devices, nodes=nodes)
    request = make.request(
        global_batch_size=6,
        num_microbatches=[int(rng.choice([1, 2]))],
        schedules=[str(rng.choice(["1f1b", "gpipe"]))],
        data_parallel=[str(rng.choice(["ddp", "zero2", "zero3"]))],
        recompute=["none", "full"] if devices == 3 else ["none"],
        sequence_parallel=[str(rng.choice(["none", "megatron"]))],
        stage_widths="any",
        tp_sizes=[1, 2],
    )
    profiles = make.profiles(model, cluster, tp_sizes=(1, 2, 3, 4), slow=float(rng.choice([0.01, 1.0])))
    plans = list(every_plan(request, model, cluster))
    prices = [
        (found.objective_ps, found.estimate.memory_bytes)
        for found in (evaluate(plan, profiles, timeline=False) for plan in plans)
    ]
    assert any(len({len(stage.ranks) for stage in plan.stages}) > 1 for plan in plans)
    needs = sorted(need for _, need in prices)
    budget = needs[int(len(needs) * rng.choice([0, 0.1, 0.5, 0.99]))]
    found = searched(replace(request, memory_gib=budget / GIB), model, cluster, profiles)
    assert isinstance(found, SearchAnswer)
    best = min(time for time, need in prices if need <= budget)
    assert found.optimum_s * 1e12 == pytest.approx(best, rel=1e-12)
    assert found.bound_s == found.optimum_s and not found.stopped
    too_little = searched(replace(request, memory_gib=(needs[0] - 1) / GIB), model, cluster, profiles)
    assert isinstance(too_little, Infeasible) and too_little.missing_bytes == 1


def caught(first: int = 0) -> bool:
    """Whether a problem of this number or a later one shows the mistake; those before it have as good plans with it."""
    return any(mistake(problem, solved(problem)) for problem in map(random_unequal, range(first, 80)))


def test_a_solver_that_never_starts_a_stage_in_place_is_caught(monkeypatch):
    targets = ConfigurationBounds.target_runs

    def ignoring(self, below_ps):
        found = targets(self, below_ps)
        return found and {kind: own for kind, own in found.items() if kind.start is not Start.IN_PLACE}

    monkeypatch.setattr(ConfigurationBounds, "target_runs", ignoring)
    assert caught()


@pytest.mark.parametrize("ignored", ["output_layout", "received_layout"])
def test_labels_before_a_cut_that_are_compared_by_one_of_its_layouts_are_caught(monkeypatch, ignored):
    undominated = partition._undominated

    def blind(problem, labels):
        return undominated(problem, labels._replace(**{ignored: np.zeros_like(labels.parent)}))

    monkeypatch.setattr(partition, "_undominated", blind)
    assert caught({"output_layout": 52, "received_layout": 9}[ignored])


def test_a_mean_over_more_than_all_ranks_is_caught(monkeypatch):
    weights = Problem.relative_weights.func
    monkeypatch.setattr(Problem, "relative_weights", property(lambda self: tuple(2 * of for of in weights(self))))
    assert caught()


@pytest.fixture
def paths(make, files):
    """A search for stages of 3 ranks and of 1."""
    model, cluster = make.model(4), make.cluster(4)
    request = make.request(global_batch_size=12, stage_widths=[[3, 1]], num_microbatches=[4])
    return files(model, cluster, request, make.profile(model, micro_batch_sizes=(1, 2, 3)))


def test_a_plan_of_unequal_stages_goes_through_every_command(paths, tmp_path):
    def told(*arguments: object, code: int = 0) -> str:
        result = call(APP, *arguments)
        assert result.exit_code == code, result.output
        return result.output

    profiles = [part for role in ("hardware", "profile") for part in (f"--{role}", paths[role])]
    inputs = [part for role in ("cluster", "model", "search") for part in (f"--{role}", paths[role])]
    out = tmp_path / "plan.json"
    assert "ranks 0-2" in told("plan", *inputs, *profiles, "--out", out)
    plan, prediction = read_document(out, Plan), read_document(tmp_path / "plan.prediction.json", Prediction)
    assert [stage.ranks for stage in plan.stages] == [(0, 1, 2), (3,)]
    assert "into pipeline stages of 3 + 1 ranks" in prediction.proof.scope
    told("evaluate", out, *profiles, "--out", tmp_path / "again.json")
    assert read_document(tmp_path / "again.json", Prediction).estimate == prediction.estimate
    told("simulate", out, *profiles, "--svg", tmp_path / "step.svg", "--trace", tmp_path / "trace.json")
    assert "stage 1 (rank 3)" in told("explain", out, *profiles, "--search", paths["search"])
    for target in ("galvatron", "megatron", "torchtitan"):
        (line,) = told("export", out, "--to", target, "--out", tmp_path / target, code=2).splitlines()
        assert line.startswith(f"error: {out}: ") and "plan stages of equal width" in line
        assert not (tmp_path / target).exists()


def test_the_difference_of_two_plans_names_the_ranks_of_their_stages(make):
    model, cluster = make.model(2), make.cluster(4)
    profiles = make.profiles(model, cluster, tp_sizes=(1, 2, 3, 4))
    plans = []
    for widths in ([3, 1], [2, 2]):
        found = searched(make.request(global_batch_size=6, stage_widths=[widths]), model, cluster, profiles)
        assert isinstance(found, SearchAnswer)
        plans.append(found.chosen.plan)
    assert "ranks of the pipeline stages: 3 + 1 → 2 + 2" in plan_differences(*plans)


def test_any_widths_are_never_worse_than_equal_or_listed_ones(make):
    model, cluster = make.model(4, tied=True), make.cluster(4)
    profiles = make.profiles(model, cluster, tp_sizes=(1, 2, 4))

    def best(widths: object) -> float:
        found = searched(make.request(global_batch_size=12, stage_widths=widths), model, cluster, profiles)
        assert isinstance(found, SearchAnswer)
        return found.optimum_s / found.chosen.plan.global_batch_size

    assert best("any") <= min(best("equal"), best([[3, 1], [2, 1, 1]]), best([[1, 3], [1, 2, 1]]))


@pytest.mark.parametrize("tied", [False, True])
def test_a_mixture_of_whole_and_parted_nodes_is_searched(make, tied):
    """Two nodes of two: 2 + 1 + 1, 1 + 1 + 2; never 1 + 2 + 1, nor 3 + 1."""
    model, cluster = make.model(3, tied=tied), make.cluster(4, nodes=2)
    request = make.request(global_batch_size=4, num_microbatches=[2], stage_widths="any", tp_sizes=[1, 2])
    instance = World(request, model, cluster, make.profiles(model, cluster)).instance
    found = {}
    for configuration in configurations(instance.request, model, cluster, FILE):
        if instance.choices.has_plans(configuration):
            ways: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), (0,))]
            for moves in instance.problem(configuration).placements:
                ways = [((*own, after[0] - at[0]), after) for own, at in ways for _, after in moves[at]]
            found[configuration.pp_size] = {own for own, _ in ways}
    assert found == {1: {(4,)}, 2: {(2, 2)}, 3: {(2, 1, 1), (1, 1, 2)}, 4: {(1, 1, 1, 1)}}


def test_a_cut_between_unequal_stages_waits_for_its_busiest_rank():
    """What it sends forward or back, by the formula of the runtime's messages, or gets: its share of its own layout."""
    rng, samples, length, features = np.random.default_rng(0), 12, 12, 5
    tensors = (BoundaryTensor(name="hidden", sequence_length=length, features=features),)
    for _ in range(200):
        widths = [int(width) for width in rng.choice([1, 2, 3, 4, 6], 2, replace=False)]
        here, there = (random_layout(rng, width) for width in widths)
        sent = [
            *sent_numel(here, there, samples, length, features),
            *sent_numel(there, here, samples, length, features),
        ]
        gets = [layout.activation_shard(0, samples, length).tokens * features for layout in (here, there)]
        most = 4 * max(*sent, *gets)
        for far in (False, True):
            nodes = (0,) * widths[0], (int(far),) * widths[1]
            taken = handover_time(PROFILES, nodes, here, there, samples, tensors, 4)
            assert taken.time_s == pytest.approx(send_kind_time(PROFILES, False, far, most).time_s)


def random_layout(rng: np.random.Generator, width: int) -> Layout:
    """Of a stage so wide."""
    tp_size = int(rng.choice([size for size in (1, 2, 3, 4, 6) if width % size == 0]))
    alone = tp_size in (1, width)
    return Layout(width, tp_size, alone or rng.random() < 0.5, tp_size if tp_size > 1 and rng.random() < 0.5 else 1)
