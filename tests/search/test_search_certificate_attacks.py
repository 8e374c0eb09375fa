"""Forged certificates of false claims: none is confirmed, whatever its numbers are."""

import pytest
from certificate_attacks import accepted
from rest_long import rest_long

from shardwright_search.certificate import bounds


@pytest.mark.parametrize("block", rest_long(1, range(10)))
def test_no_forged_proof_confirms_what_a_plan_is_below(block):
    """Budgets are exact to the byte, and a byte costs up to 1e15 ps: float64 rounds sums of 1e25 ps by 1e9."""
    assert accepted(range(200 * block, 200 * block + 200)) == {}


def test_costs_that_are_not_rounded_down_are_caught(monkeypatch):
    monkeypatch.setattr(bounds, "rounded_down", lambda values, unit_ps: values)
    assert accepted(range(100, 160))
