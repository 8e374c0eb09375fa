"""A label of the interleaved schedule replaces another only where no plan through the other is better for it."""

import numpy as np
import pytest
from interleaved_problems import random_interleaved
from msgspec.structs import replace

from shardwright_search.solver.interleaved import Interleaved, _Labels
from shardwright_search.solver.interleaved_problem import InterleavedProblem

LABELS, BUDGETS, LARGEST = 60, 40, 12
SEEDS = range(80)


def random_labels(problem: InterleavedProblem, rng: np.random.Generator) -> _Labels:
    """Of a whole chunk: small numbers, so that often one is no larger than another in all of them."""
    numbers = rng.integers(0, LARGEST, (5, LABELS)).astype(float)
    layouts = problem.group.redistribution_ps.shape[1]
    return _Labels(*numbers, *rng.integers(0, layouts, (2, LABELS)), *np.zeros((2, LABELS), int))


def varied(problem: InterleavedProblem, budget_bytes: float, head_bytes: float) -> Interleaved:
    """With another budget and a larger head, which makes the last stage the fullest."""
    *layers, head = problem.group.options
    options = *layers, head._replace(state_bytes=head.state_bytes + head_bytes)
    fields = {name: getattr(problem, name) for name in InterleavedProblem.__struct_fields__}
    group = replace(problem.group, options=options, budget_bytes=int(budget_bytes))
    return Interleaved(InterleavedProblem(**fields | {"group": group}))


def lost(seed: int) -> int:
    """How many labels would be replaced by one that a plan is slower with, or with which it does not fit."""
    rng, problem = np.random.default_rng(seed), random_interleaved(seed)
    labels, head_bytes = random_labels(problem, rng), 200 * (seed % 2)
    compared = Interleaved(problem)._compared(labels)
    layouts = np.stack([labels.input_layout, labels.output_layout], 1)
    replaces = (layouts[:, None] == layouts).all(2) & (compared[:, None] <= compared).all(2)
    found = 0
    for budget in head_bytes + np.linspace(LARGEST, 40 * LARGEST, BUDGETS):
        times = varied(problem, budget, head_bytes)._whole(labels, np.arange(LABELS)).objective_ps
        worse = (times.reshape(LABELS, 1, -1) > times.reshape(1, LABELS, -1)).any(2)
        found += int((replaces & worse).sum())
    return found


def test_a_label_that_is_no_larger_in_any_number_is_never_the_worse_one() -> None:
    assert sum(map(lost, SEEDS)) == 0


@pytest.mark.parametrize("column", range(6))
def test_labels_that_are_not_compared_in_one_number_are_caught(monkeypatch: pytest.MonkeyPatch, column: int) -> None:
    """Of one time or two, what is held at two moments, and the peak at these."""
    compared = Interleaved._compared

    def fewer(self: Interleaved, labels: _Labels) -> np.ndarray:
        columns = compared(self, labels)
        return np.delete(columns, max(column - 6, -columns.shape[1]), 1)

    monkeypatch.setattr(Interleaved, "_compared", fewer)
    assert any(map(lost, SEEDS))
