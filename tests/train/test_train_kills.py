"""A few of the kills of `make kills`."""

from pathlib import Path

import pytest
from run_kills import prepared, survive


@pytest.mark.timeout(600)
def test_a_run_that_is_killed_at_random_moments_comes_to_the_same_bits(tmp_path: Path) -> None:
    assert survive(prepared(tmp_path / "work"), kills=2, seed=1) == 2
