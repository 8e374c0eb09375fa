"""Bounds of split backward passes: against all orders of tiny pipelines, against all plans, and certified."""

import json
from itertools import permutations, product

import numpy as np
import pytest
import split_problems
from certificate_attacks import SPLIT_FORMS, exact_problem
from command_calls import call
from msgspec.structs import replace
from random_problems import best_of, random_problem
from rest_long import rest_long

from shardwright.io import read_document, write_document
from shardwright.plan.schedules.passes import Pass
from shardwright.types import Certificate, Plan, Schedule
from shardwright_search.certificate.make import proof_of
from shardwright_search.cli import APP
from shardwright_search.search import split_words
from shardwright_search.simulation.simulator import StageTimes, lower_bound_ps, step_time_ps
from shardwright_search.solver.configuration_bounds import ConfigurationBounds
from shardwright_search.solver.quick_bounds import Relaxed
from shardwright_search.solver.stage_options import GroupCosts
from shardwright_search.space import split_problem

SPLIT = Schedule.ZERO_BUBBLE
KINDS = 3


def lists(m: int, limit: int) -> np.ndarray:
    """Every order of a stage's passes [orders, 3 m], each kind by micro-batch, with a limit of what is held."""
    found = []

    def grow(done: tuple[int, int, int], order: tuple[int, ...]) -> None:
        forward, backward, weight = done
        if weight == m:
            found.append(order)
            return
        for kind, can in enumerate((forward < m and forward - weight < limit, backward < forward, weight < backward)):
            if can:
                after = tuple(n + (kind == k) for k, n in enumerate(done))
                grow(after, (*order, kind * m + done[kind]))

    grow((0, 0, 0), ())
    return np.array(found)


def least_of_all_orders(stages: list[StageTimes], m: int, limit: int) -> int:
    """The least step time over all orders of all stages, all pipelines played at once, pass by pass."""
    p, orders = len(stages), lists(m, limit)
    chosen = np.stack([index.ravel() for index in np.indices((len(orders),) * p)])
    durations = np.array([(s.forward_ps, s.backward_ps, s.further_ps[Pass.WEIGHT]) for s in stages])
    sends, column = [s.send_ps for s in stages], np.arange(chosen.shape[1])
    ends = np.full((p, KINDS * m, len(column)), -1)
    free, place = np.zeros((2, p, len(column)), np.int64)
    for _ in range(p * KINDS * m):
        for stage in range(p):
            going = place[stage] < KINDS * m
            node = orders[chosen[stage], np.minimum(place[stage], KINDS * m - 1)]
            own = ends[stage, np.maximum(node - m, 0), column]
            above = ends[stage - 1, node, column] if stage else np.zeros_like(own)
            below = ends[stage + 1, node, column] if stage < p - 1 else own
            come = np.choose(node // m, (above, below, own))
            sent = np.choose(node // m, (sends[stage - 1] * (stage > 0), sends[stage], 0))
            ready = going & (come >= 0)
            over = np.maximum(free[stage], come + sent) + durations[stage][node // m]
            free[stage] = np.where(ready, over, free[stage])
            ends[stage, node[ready], column[ready]] = over[ready]
            place[stage] += ready
    done = (place == KINDS * m).all(0)
    return int(free.max(0)[done].min())


def random_stages(rng: np.random.Generator, p: int) -> list[StageTimes]:
    return [
        StageTimes(*map(int, rng.integers(1, 30, 2)), int(rng.integers(0, 9)) * (stage < p - 1), 0, 0,
                   further_ps={Pass.WEIGHT: int(rng.integers(0, 30))})
        for stage in range(p)
    ]  # fmt: skip


def _weighted_bounds(stages: list[StageTimes], m: int, limit: int) -> list[float]:
    """Each bound that `weighted_problem` takes a mean of, of one plan."""
    times = np.array([(s.forward_ps, s.backward_ps, s.further_ps[Pass.WEIGHT], 0, s.send_ps) for s in stages])
    return (split_problem._bounds(len(stages), m, limit) * times).sum((1, 2)).tolist()


@pytest.mark.parametrize("shapes", rest_long(1, ([(1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2)], [(3, 3)])))
def test_no_order_of_any_stage_takes_less_than_the_bounds(shapes):
    rng, tight = np.random.default_rng(5), 0
    for p, m in shapes:
        for _ in range(1 if p == m == 3 else 6):
            stages = random_stages(rng, p)
            for schedule, limit in ((SPLIT, p), (Schedule.ZERO_BUBBLE_H2, 2 * p - 1)):
                least = least_of_all_orders(stages, m, limit=limit)
                bound = max(lower_bound_ps(stages, m), *_weighted_bounds(stages, m, limit))
                assert bound <= least <= step_time_ps(stages, schedule, m), (p, m, stages)
                tight += bound == least
    assert tight


def test_equal_stages_take_as_long_as_their_bounds():
    for p, m in product((2, 3, 4), (4, 8)):
        stages = [StageTimes(1, 1, 0, 0, 0, further_ps={Pass.WEIGHT: 1})] * p
        assert max(_weighted_bounds(stages, m, p)) == lower_bound_ps(stages, m) == 3 * m + p - 1


def test_a_bound_that_lets_a_stage_hold_less_than_it_does_is_seen(monkeypatch):
    """More forward passes before the first backward pass leave less to do after it."""
    whole = split_problem._bounds

    def fewer(p: int, m: int, limit: int) -> np.ndarray:
        bounds = whole(p, m, limit)
        for j in range(p):
            bounds.reshape(3, p, p, 5)[1, j, j, 0] += 1
        return bounds

    monkeypatch.setattr(split_problem, "_bounds", fewer)
    rng, wrong = np.random.default_rng(5), 0
    for p, m in ((2, 2), (2, 3), (3, 2)):
        for _ in range(6):
            stages = random_stages(rng, p)
            wrong += max(_weighted_bounds(stages, m, p)) > least_of_all_orders(stages, m, limit=p)
    assert wrong


def test_the_best_mixture_of_bounds_is_that_of_the_game():
    """Rock, paper and scissors, and a row that beats all."""
    pays = np.array([[1.0, 0, 2], [2, 1, 0], [0, 2, 1]])
    for order in permutations(range(3)):
        assert split_problem._best_mixture(pays[list(order)]) == pytest.approx(np.ones(3) / 3)
    assert split_problem._best_mixture(np.array([[1.0, 2], [3, 4]])) == pytest.approx([0, 1])


@pytest.mark.parametrize("seeds", rest_long(1, (range(20), range(20, 120))))
def test_what_is_proven_of_split_backward_passes_holds_against_every_plan(seeds):
    assert split_problems.mistakes(seeds) == {}


def test_some_tiny_searches_are_proven():
    assert split_problems.proven(range(8)) > 4


@pytest.mark.parametrize("form", SPLIT_FORMS)
def test_the_bounds_of_the_solver_hold_for_forms_without_a_sum_or_without_a_slowest_stage(form):
    for problem in (random_problem(seed) for seed in range(15)):
        if problem.pp_size > 1:
            split = replace(problem, closed_form=form)
            best = best_of(split)
            assert ConfigurationBounds(split, GroupCosts).lower_ps <= best
            assert Relaxed().bound_ps(split) <= best


def test_proofs_of_these_forms_are_confirmed_just_below_the_best_plan_and_not_above():
    proven = 0
    for seed, form in product(range(1), SPLIT_FORMS):
        problem = next(p for p in map(exact_problem, range(50 * seed, 50 * seed + 50)) if p.pp_size > 1)
        split = replace(problem, closed_form=form)
        assert proof_of(split, "any", best_of(split) + 1) is None
        proven += proof_of(split, "any", best_of(split) * (1 - 1e-9)) is not None
    assert proven


def test_the_certificate_of_a_search_with_split_backward_passes_is_verified_and_forged_ones_are_refused(
    make, files, tmp_path
):
    model, cluster = make.model(4), make.cluster()
    request = make.request(num_microbatches=[4], pp_sizes=[2], schedules=["1f1b", "zero_bubble"])
    paths = files(model, cluster, request, make.profile(model))
    given = [part for role, path in paths.items() for part in (f"--{role}", str(path))]
    plan, certificate = tmp_path / "a.json", tmp_path / "a.certificate.json"
    with split_problems.with_weight_passes(1):
        made = call(APP, "plan", *given, "--out", plan, "--certificate", certificate)
        assert made.exit_code == 0 and "with split backward passes is" in " ".join(made.stdout.split()), made.output
        roles = [part for role in ("hardware", "profile", "search") for part in (f"--{role}", str(paths[role]))]
        asked = ("verify", plan, certificate, *roles)
        told = call(APP, *asked)
        assert told.exit_code == 0 and "no plan with split backward passes takes less than" in told.stdout, told.output
        assert "(simulated): none of them is" in told.stdout
        whole = read_document(certificate, Certificate)
        assert whole.split_configurations and read_document(plan, Plan).schedule in request.schedules
        simulated_s = json.loads((tmp_path / "a.prediction.json").read_text())["estimate"]["simulated_step_time_s"]
        for fields, problem in (
            ({"split_bound_ps": simulated_s * 1.5e12}, "its bound exceeds|does not confirm its bound"),
            ({"split_configurations": ()}, "leaves out a configuration of the space"),
            ({"split_configurations": whole.split_configurations * 2}, "has several proofs of one configuration"),
        ):
            write_document(certificate, replace(whole, **fields))
            refused = call(APP, *asked)
            assert refused.exit_code == 2 and any(each in refused.stderr for each in problem.split("|")), problem


def test_what_is_proven_is_told_in_one_sentence():
    assert split_words(1.0, 0.0).endswith("is not known")
    assert split_words(1.0, 1.0) == "no plan with split backward passes is faster by simulation, proven"
    assert "more than 25.00 % faster" in split_words(1.25, 1.0)
