"""Certificates: what they confirm is never above the best of all plans, and it is near it."""

import numpy as np
import pytest
from certificate_attacks import one_way
from middle_problems import middle_problem, solved
from msgspec.structs import replace
from random_problems import best_of, random_problem, random_unequal
from rest_long import rest_long

from shardwright.types import Band, ConfigurationProof, MemoryPrice
from shardwright_search.certificate import check
from shardwright_search.certificate.check import confirms
from shardwright_search.certificate.make import GAPS, certified, proof_of
from shardwright_search.solver.problem import Problem

MADE = {"equal": random_problem, "unequal": random_unequal}


def some_proof(problem: Problem, seed: int) -> ConfigurationProof:
    """Dual values and bands of any kind: each is a proof of something."""
    rng = np.random.default_rng(seed)
    stages, m = problem.pp_size, problem.num_microbatches
    most = max(float(o.time_ps.max()) for group in problem.device_groups for o in group.options) * len(problem.layers)

    def prices() -> tuple[tuple[MemoryPrice, ...], ...]:
        values, shares = rng.choice([0, 0.01, 0.1, 0.3, 1, 3], (stages, 2)), rng.choice([0, 0.5, 1], (stages, 2))
        return tuple(
            tuple(MemoryPrice(ps_per_byte=v, last_layer=s) for v, s in zip(*own, strict=True))
            for own in zip(values.tolist(), shares.tolist(), strict=True)
        )

    ends = sorted(rng.uniform(0.05, 1, int(rng.integers(0, 4))) * most)
    bands = tuple(
        Band(
            slowest_below_ps=end,
            slowest_weights=tuple((rng.dirichlet([1] * stages) * (m - 1) * rng.choice([0, 1])).tolist()),
            exposed_weights=tuple((rng.dirichlet([1] * stages) * rng.choice([0, 1])).tolist()),
            prices=prices(),
        )
        for end in (*ends, None)
    )
    layouts = bool(rng.random() < 0.7)
    return ConfigurationProof(configuration="any", layouts=layouts, time_prices=prices(), bands=bands)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("block", rest_long(1, range(3)))
def test_no_proof_confirms_more_than_the_best_of_all_plans(kind, block):
    """Whatever its dual values and bands are; and some confirm just that."""
    tight = 0
    for seed in range(30 * block, 30 * block + 30):
        problem = MADE[kind](seed)
        best, proof = best_of(problem), some_proof(problem, seed)
        if np.isfinite(best):
            assert not confirms(problem, proof, best * (1 + 1e-6)), seed
            tight += confirms(problem, proof, best * (1 - 1e-6))
    assert tight >= (1 if kind == "equal" else 0)


@pytest.mark.parametrize(("kind", "count"), [("equal", 4), ("unequal", 3)])
def test_what_is_made_is_confirmed_and_near_the_best_of_all_plans(kind, count):
    """These problems are hard on it: their ends of a step are as long as a microbatch, and some sends as a stage."""
    gaps = []
    for problem in [p for p in map(MADE[kind], range(20)) if np.isfinite(best_of(p))][:count]:
        best = best_of(problem)
        bound, proofs = certified([one_way(problem)], best, lambda line: None)
        assert confirms(problem, proofs[0], bound)
        assert not confirms(problem, proofs[0], best * (1 + 1e-6))
        gaps.append(1 - bound / best)
    assert np.median(gaps) <= 0.01


def test_nothing_fits_can_be_certified_too():
    problem = next(p for p in map(random_problem, range(200)) if np.isinf(best_of(p)))
    proof = proof_of(problem, "any", 1e9)
    assert proof is not None and confirms(problem, proof, 1e9)


def test_middle_sized_problems_are_proven_to_a_gap_that_is_told(capsys):
    found = []
    for seed in (2, 5):
        problem = middle_problem(seed)
        best = solved(problem).objective_ps
        bound, proofs = certified([one_way(problem)], best, lambda line: None)
        assert bound in [best * (1 - gap) for gap in GAPS] and confirms(problem, proofs[0], bound)
        found.append(1 - bound / best)
    with capsys.disabled():
        print(f" gaps {', '.join(f'{gap:.2%}' for gap in found)}", end="")
    assert max(found) <= 0.01


def test_bands_that_leave_a_range_out_or_fit_no_stage_confirm_nothing():
    problem = next(p for p in map(random_problem, range(50)) if p.pp_size == 2 and np.isfinite(best_of(p)))
    proof = replace(some_proof(problem, 0), time_prices=((MemoryPrice(ps_per_byte=0.0),),))
    free = Band(
        slowest_below_ps=None,
        slowest_weights=(0.0,),
        exposed_weights=(0.0,),
        prices=((MemoryPrice(ps_per_byte=0.0),),),
    )
    assert confirms(problem, replace(proof, bands=(free,)), 1.0)
    for bands in (
        (replace(free, slowest_below_ps=5.0),),
        (free, free),
        (replace(free, slowest_below_ps=5.0), replace(free, slowest_below_ps=2.0), free),
        (replace(free, slowest_weights=(0.0,) * 3),),
        (replace(free, prices=((),)),),
        (replace(free, prices=((MemoryPrice(ps_per_byte=0.0, phase=1),),) * 2),)
        if problem.num_microbatches > 2
        else (),
        (replace(free, exposed_weights=(9.0,)),),
        (replace(free, slowest_weights=(problem.num_microbatches * 9.0,)),),
    ):
        assert not bands or not confirms(problem, replace(proof, bands=bands), 1.0), bands


@pytest.mark.parametrize("kind", MADE)
def test_a_range_whose_ends_count_as_its_most_is_caught(monkeypatch, kind):
    """What is confirmed then is above the best of all plans."""
    within = check._within
    monkeypatch.setattr(check, "_within", lambda *given: within(*given[:3], given[3] + [[0, 0], [100, 0]], given[4]))
    problems = [p for p in map(MADE[kind], range(12)) if np.isfinite(best_of(p))]
    assert any(proof_of(problem, "any", best_of(problem) * 1.001) is not None for problem in problems)


def test_more_than_is_listed_confirms_nothing(monkeypatch):
    problem = middle_problem(2)
    bound, proofs = certified([one_way(problem)], solved(problem).objective_ps, lambda line: None)
    assert confirms(problem, proofs[0], bound)
    monkeypatch.setattr(check, "MAX_WAYS", 0)
    assert not confirms(problem, proofs[0], bound)
