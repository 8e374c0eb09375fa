"""Cutting the chain of layers into pipeline stages, given the labels of every run of layers."""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardwright_search.solver.configuration_bounds import ConfigurationBounds, CostsOf
from shardwright_search.solver.prefix_labels import At, LabelsOf, Level, first_level, next_level
from shardwright_search.solver.problem import Problem, Solution
from shardwright_search.solver.relaxed_bound import Relaxed
from shardwright_search.solver.stage_labels import stage_labels

_FEW_LABELS = 24
"""Of each run, in a guess."""


class Found(NamedTuple):
    """A plan of a configuration and its T."""

    objective_ps: float
    solution: Solution


class Pipeline:
    """A configuration of GPipe or 1F1B."""

    def __init__(self, problem: Problem, costs_of: CostsOf, relaxed: Relaxed) -> None:
        self._problem, self._costs_of, self._relaxed = problem, costs_of, relaxed

    @property
    def relaxed_bound_ps(self) -> float:
        """A quick lower bound on T."""
        return self._relaxed.bound_ps(self._problem)

    @property
    def lower_ps(self) -> float:
        """A lower bound on T."""
        return ConfigurationBounds(self._problem, self._costs_of, rough=True).lower_ps

    def guess(self, below_ps: float) -> Found | None:
        """The best plan with T < below_ps among a few labels of each step; None: there is none among them."""
        return next(iter(solve_below(self._bounds, below_ps, 1, lambda made: None, _FEW_LABELS)), None)

    def solve_below(self, below_ps: float, most: int, tick: Callable[[int], None]) -> tuple[Found, ...]:
        """See the function."""
        return solve_below(self._bounds, below_ps, most, tick)

    @cached_property
    def _bounds(self) -> ConfigurationBounds:
        return ConfigurationBounds(self._problem, self._costs_of)


def solve_below(
    bounds: ConfigurationBounds, below_ps: float, most: int, tick: Callable[[int], None], max_labels: int | None = None
) -> tuple[Found, ...]:
    """Plans with T < below_ps: the best one first and up to `most` in all, non-dominated ones; none: there is none.

    With `max_labels` only so many of a run are extended, the most promising ones, and some thousands in all behind a
    stage: plans may be missed.
    """
    problem = bounds.problem
    if (targets := bounds.targets(below_ps)) is None:
        return ()
    labels_of: LabelsOf = {}
    for kind, found in targets.items():
        costs = bounds.costs_of(problem.device_groups[kind.group], kind.phases)
        labels_of[kind] = stage_labels(problem, kind, costs, found, tick, max_labels)
    levels = [first_level(problem)]
    for stage in range(problem.pp_size):
        tick(0)
        levels.append(next_level(bounds, stage, levels[-1], labels_of, below_ps, max_labels is not None))
    return _best(problem, levels, below_ps, most)


def _best(problem: Problem, levels: list[Level], below_ps: float, most: int) -> tuple[Found, ...]:
    found: list[tuple[float, At, int]] = []
    for at, labels in levels[-1].labels.items():
        objective = problem.closed_form.time(labels.total_ps, labels.slowest_ps, labels.exposed_ps)
        objective = objective + problem.tie_ps[labels.tie_class, labels.output_layout]
        rows = np.flatnonzero(objective < below_ps)
        best = rows[np.argsort(objective[rows], kind="stable")][:most]
        found += [(float(objective[row]), at, int(row)) for row in best]
    found.sort(key=lambda plan: plan[0])
    return tuple(Found(objective, _decoded(levels, at, row)) for objective, at, row in found[:most])


def _decoded(levels: list[Level], at: At, label: int) -> Solution:
    ends: list[int] = []
    options: list[int] = []
    groups: list[int] = []
    for level in reversed(levels[1:]):
        labels = level.labels[at]
        before, own = level.sources[int(labels.source[label])]
        ends.insert(0, at.end)
        groups.insert(0, at.group)
        options[:0] = own.options_of(int(labels.chosen[label]))
        at, label = before, int(labels.parent[label])
    return Solution(tuple(ends), tuple(options), tuple(groups))
