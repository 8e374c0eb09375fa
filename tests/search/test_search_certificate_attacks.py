"""Forged certificates of false claims: none is confirmed, whatever its numbers are."""

import numpy as np
import pytest
from certificate_attacks import accepted, exact_problem
from random_problems import best_of
from rest_long import rest_long

from shardwright.plan.schedules.schedule import ClosedForm
from shardwright.types import Band, ConfigurationProof, MemoryPrice
from shardwright_search.certificate import bounds
from shardwright_search.certificate.check import confirms
from shardwright_search.certificate.make import proof_of
from shardwright_search.solver.problem import DeviceGroup, Options, Problem

MS = 1e9


def only_plan(time_ps: float, sizes_bytes: tuple[int, ...]) -> Problem:
    """Return a problem with one plan, of one stage, whose layers fill the budget to the byte."""
    zero, layout = np.zeros(1), np.zeros(1, int)
    options = tuple(
        Options(np.array([time_ps / 4]), zero, np.array([float(size)]), *[zero] * 6, layout, layout)
        for size in sizes_bytes
    )
    return Problem(
        layers=(0, 1, 2, 3),
        device_groups=(DeviceGroup(options, np.zeros((4, 1, 1)), sum(sizes_bytes)),),
        placements=({(0,): ((0, (1,)),)},),
        sends_ps={},
        in_flight=(1,),
        num_microbatches=1,
        closed_form=ClosedForm(1, 0),
        boundary_bytes=np.zeros((4, 1)),
        tied_ps=np.zeros((1, 1)),
    )


def test_a_claim_of_159_ms_where_a_plan_takes_145_is_refused():
    """A byte at 1e15 ps makes sums of 1e26 ps, which float64 rounds by more than the plan takes."""
    problem = only_plan(145.2 * MS, (48977647979, 7701856590, 46305774746, 17577970204))
    assert best_of(problem) == 145.2 * MS
    free, dear = ((MemoryPrice(ps_per_byte=price),) for price in (0.0, 1e15))
    band = Band(slowest_below_ps=None, slowest_weights=(0.0,), exposed_weights=(0.0,), prices=(dear,))
    proof = ConfigurationProof(configuration="any", layouts=True, time_prices=(free,), bands=(band,))
    assert not confirms(problem, proof, 159.0 * MS)


def test_a_bound_a_picosecond_below_the_only_plan_is_confirmed_and_one_above_is_not():
    problem = only_plan(4e12, (3, 5, 7, 9))
    band = Band(
        slowest_below_ps=None,
        slowest_weights=(0.0,),
        exposed_weights=(1.0,),
        prices=((MemoryPrice(ps_per_byte=0.0),),),
    )
    proof = ConfigurationProof(configuration="any", layouts=True, time_prices=band.prices, bands=(band,))
    assert confirms(problem, proof, 4e12 - 1)
    assert not confirms(problem, proof, 4e12 + 1)


@pytest.mark.parametrize("block", rest_long(1, range(20)))
def test_no_forged_proof_confirms_what_a_plan_is_below(block):
    """Budgets are exact to the byte, and a byte costs up to 1e15 ps: float64 rounds sums of 1e25 ps by 1e9."""
    assert accepted(range(100 * block, 100 * block + 100)) == {}


@pytest.mark.parametrize("block", rest_long(1, range(12)))
def test_a_picosecond_above_the_best_plan_nothing_is_proven_and_just_below_it_some_is(block):
    """The dual values are the best that are known: those that certificates are made of."""
    proven = 0
    for problem in map(exact_problem, range(5 * block, 5 * block + 5)):
        assert proof_of(problem, "any", best_of(problem) + 1) is None
        proven += proof_of(problem, "any", best_of(problem) * (1 - 1e-9)) is not None
    assert proven


def test_costs_that_are_not_rounded_down_are_caught(monkeypatch):
    monkeypatch.setattr(bounds, "_LEAST_SHARE", 1.0)
    monkeypatch.setattr(bounds, "_unit_ps", lambda *_: 2.0**-8)
    assert accepted(range(100, 160))
