"""HiGHS against the search: equal where both are right, and loud where one is not."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from command_calls import Called, call
from middle_problems import middle_problem, solved
from msgspec.structs import replace
from random_problems import best_of, random_problem
from random_requests import FILE, World, random_world
from rest_long import rest_long

from shardwright_formats.io import BadInput, RunFailed, read_document
from shardwright_formats.types import Prediction, Recompute, Schedule
from shardwright_search import second_opinion as prove
from shardwright_search.cli import APP
from shardwright_search.second_opinion import verdict
from shardwright_search.solver import milp as integer_programme
from shardwright_search.solver.branch_and_bound import optimize
from shardwright_search.solver.milp import HighsAnswer, solve
from shardwright_search.solver.problem import Problem, price
from shardwright_search.solver.targets import Best, Target
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.search_space import SearchSpace

pytest.importorskip("highspy")

NEAR = 1e-6
SECONDS = 60.0


def costlier(problem: Problem, solution_options: tuple[int, ...], element: int) -> Problem:
    """The option that one element has, slower by a tenth."""
    kind = problem.layers[element]
    place = problem.device_groups[0]
    times = place.options[kind].time_ps.copy()
    times[solution_options[element]] *= 1.1
    options = list(place.options)
    options[kind] = options[kind]._replace(time_ps=times)
    return replace(problem, device_groups=(replace(place, options=tuple(options)),))


@pytest.mark.parametrize("block", rest_long(1, range(2)))
def test_the_solver_and_highs_find_equally_good_plans_of_middle_sized_problems(block):
    for seed in range(5 * block, 5 * block + 5):
        problem = middle_problem(seed)
        ours, theirs = solved(problem).objective_ps, solve(problem, SECONDS)
        assert theirs.done and theirs.solution is not None, seed
        assert theirs.objective_ps == pytest.approx(ours, rel=NEAR), seed
        counted = price(problem, theirs.solution)
        assert counted.objective_ps == pytest.approx(theirs.objective_ps, rel=NEAR), seed
        assert max(counted.memory_bytes) <= problem.device_groups[0].budget_bytes, seed


def test_memory_binds_in_middle_sized_problems():
    """With no end of memory most of them have a faster plan."""
    binding = 0
    for seed in range(10):
        problem = middle_problem(seed)
        free = replace(problem, device_groups=(replace(problem.device_groups[0], budget_bytes=1 << 50),))
        binding += solved(free).objective_ps < solved(problem).objective_ps
    assert binding >= 8


@pytest.mark.parametrize("count", rest_long(1, (50, 120)))
def test_highs_finds_the_best_of_all_plans_of_tiny_problems_and_nothing_below_it(count):
    """Several places, places of which there are too few, ties, and cases that nothing fits in."""
    nothing = 0
    for seed in range(count):
        problem = random_problem(seed)
        best, answer = best_of(problem), solve(problem, SECONDS)
        assert answer.done, seed
        nothing += answer.solution is None
        assert answer.objective_ps == pytest.approx(best, rel=NEAR), seed
        if np.isfinite(best):
            assert price(problem, answer.solution).objective_ps == best, seed
            assert solve(problem, SECONDS, best - 0.5) == (None, np.inf, True), seed
    assert nothing > 0


def test_highs_notices_that_a_problem_was_changed():
    problem = middle_problem(15)
    found = solved(problem)
    changed = solve(costlier(problem, found.solution.options, 1), SECONDS)
    assert changed.done and changed.objective_ps > found.objective_ps * (1 + NEAR)


def test_highs_that_has_no_time_claims_nothing():
    answer = solve(middle_problem(0), 0.0)
    assert not answer.done


def world() -> World:
    """Cases of one and several pipeline stages, some of them interleaved."""
    found = random_world(5, devices=(4,), most_layers=4)
    kept = {"global_batch_size": 4, "fine_grained": True, "megatron_gather_buffer": False, "chunks_per_stage": (2,)}
    schedules = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED_1F1B)
    kinds = {"schedules": schedules, "recompute": (Recompute.NONE, Recompute.FULL)}
    model = replace(found.model, layers=found.model.layers[:1] * 4)
    return found._replace(request=replace(found.request, **kept | kinds), model=model)


@pytest.fixture(scope="module")
def searched() -> tuple[Instance, tuple[Target[Configuration], ...], Best[Configuration]]:
    """A request's cases and its best plan."""
    given = world()
    instance = given.instance
    targets = given.targets(instance)
    best = optimize(targets, SearchSpace(instance, FILE).solvable).best
    assert best is not None and best.target.configuration.num_chunks == 1
    return instance, targets, best


def ask(searched, best: Best[Configuration] | None = None, seconds: float = SECONDS) -> str:
    instance, _, found = searched
    return verdict(SearchSpace(instance, FILE), best or found, seconds, lambda line: None)


def test_the_verdict_tells_what_was_compared(searched):
    _, targets, best = searched
    interleaved = sum(target.configuration.num_chunks > 1 for target in targets)
    step_ms = (best.priced.objective_ps + best.target.offset_ps) * 1e-9
    said = ask(searched)
    assert said.startswith("HiGHS 1.") and f"{step_ms:.6f} ms, equal" in said
    others = len(targets) - 1
    assert f"{others - interleaved} of {others} other configurations have no better plan" in said
    assert interleaved and said.endswith(f"{interleaved} interleaved ones not asked")


@pytest.mark.parametrize("seed", rest_long(3, range(300, 308)))
def test_highs_knows_no_better_plan_in_any_case_of_random_requests(seed):
    given = random_world(seed, most_layers=5)
    instance = given.instance
    targets = given.targets(instance)
    space = SearchSpace(instance, FILE)
    best = optimize(targets, space.solvable).best
    said = verdict(space, best, SECONDS, lambda line: None)
    others, interleaved = len(targets) - 1, sum(target.configuration.num_chunks > 1 for target in targets)
    assert "ms, equal" in said
    assert f" {others - interleaved} of {others} other configurations have no better plan" in said


def test_what_time_did_not_suffice_for_is_told(searched, monkeypatch):
    said = ask(searched, seconds=0.0)
    assert "; 0 of" in said and "not decided within 0 s" in said
    monkeypatch.setattr(prove, "solve", lambda *_: HighsAnswer(None, np.inf, False))
    said = ask(searched, seconds=0.2)
    assert "the best plan's configuration was not decided in time; 0 of" in said


def test_a_case_that_needs_more_than_its_share_is_asked_again(searched, monkeypatch):
    _, targets, _ = searched
    limits: list[float] = []

    def slow_at_first(problem: Problem, time_limit_s: float, *below_ps: float) -> HighsAnswer:
        limits.append(time_limit_s)
        return HighsAnswer(None, np.inf, False) if len(limits) == 2 else solve(problem, time_limit_s, *below_ps)

    monkeypatch.setattr(prove, "solve", slow_at_first)
    single = sum(target.configuration.num_chunks == 1 for target in targets)
    assert f"{single - 1} of {len(targets) - 1} other configurations" in ask(searched)
    assert len(limits) == single + 1 and limits[-1] > SECONDS / 2 > limits[1]


@pytest.mark.parametrize("factor", [0.999, 1.001])
def test_a_best_plan_that_is_said_to_take_another_time_is_noticed(searched, factor):
    _, _, best = searched
    claimed = best.priced.objective_ps * factor
    wrong = best._replace(priced=best.priced._replace(objective_ps=claimed), score=best.target.score(claimed))
    with pytest.raises(RunFailed, match="HiGHS disagrees: batch 4"):
        ask(searched, wrong)


def test_a_search_that_missed_a_better_case_is_noticed(searched):
    instance, targets, best = searched
    others = [
        target
        for target in targets
        if target.configuration != best.target.configuration and target.configuration.num_chunks == 1
    ]
    second = optimize(others, SearchSpace(instance, FILE).solvable).best
    assert second is not None and second.score > best.score * (1 + NEAR)
    with pytest.raises(RunFailed, match=f"HiGHS disagrees: {best.target.configuration}"):
        ask(searched, second)


def test_a_plan_that_is_over_budget_by_rounding_is_no_better_plan():
    problem = middle_problem(0)
    answer = solve(problem, SECONDS)
    need = max(price(problem, answer.solution).memory_bytes)
    tight = replace(problem, device_groups=(replace(problem.device_groups[0], budget_bytes=need - 1),))
    assert prove._is_better(problem, answer, answer.objective_ps * 2, 0.0)
    assert not prove._is_better(tight, answer, answer.objective_ps * 2, 0.0)


def test_without_highs_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "highspy", None)
    with pytest.raises(BadInput, match="HiGHS is not installed"):
        integer_programme.highs_version()


def plan(paths: dict[str, Path], out: Path, *more: str) -> Called:
    roles = [part for role, path in paths.items() for part in (f"--{role}", str(path))]
    return call(APP, "plan", *roles, "--out", out, "--prove", *more)


@pytest.fixture
def inputs(make, files):
    model, cluster = make.model(4), make.cluster()
    return files(model, cluster, make.request(memory_gib=4 / 1024), make.profile(model))


def test_plan_writes_the_second_opinion_into_the_prediction_and_shows_it(inputs, tmp_path):
    result = plan(inputs, tmp_path / "a.json")
    assert result.exit_code == 0, result.output
    said = read_document(tmp_path / "a.prediction.json", Prediction).proof.second_opinion
    assert said.startswith("HiGHS 1.") and said.endswith("ms, equal; 7 of 7 other configurations have no better plan")
    assert f"second opinion: {said}" in result.output
    # The key is that of files from before there were certificates, which are read as they are.
    assert msgspec.json.decode((tmp_path / "a.prediction.json").read_bytes())["proof"]["certificate"] == said


def test_a_stopped_search_has_no_second_opinion(inputs, tmp_path):
    result = plan(inputs, tmp_path / "a.json", "--time-limit", "0")
    assert result.exit_code == 0, result.output
    assert "second opinion: none: the search was stopped before it was done" in result.output


def test_a_disagreement_ends_with_4_and_both_numbers_and_writes_nothing(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(prove, "solve", lambda *_: HighsAnswer(None, np.inf, True))
    result = plan(inputs, tmp_path / "a.json")
    assert result.exit_code == 4
    *_, line = result.stderr.splitlines()
    assert line.startswith("error: HiGHS disagrees: batch 8,") and "it finds no plan, the search's takes" in line
    assert not list(tmp_path.glob("a*"))
