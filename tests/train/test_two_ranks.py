"""One plan on two ranks, for `make quick`; test_train_parity.py and `make parity` have all others."""

from collections.abc import Callable

from run_parity import TOLERANCE
from special_plans import mixed_plan

MUTATION = "gradients_averaged_instead_of_summed"


def test_a_plan_that_does_everything_at_once_trains_as_one_process(
    compare: Callable[..., dict[str, dict[str, float]]],
) -> None:
    found = compare([mixed_plan()], (MUTATION,))
    assert max(found["mixed"].values()) < TOLERANCE and max(found[MUTATION].values()) > 1e-6
