"""Scores of configurations that are compared in other units than their times: rounding makes no plan the better one."""

from types import SimpleNamespace

import numpy as np

from shardwright_search.solver.branch_and_bound import Search
from shardwright_search.solver.targets import Target

TIME_PS, SCALE = 3973875103145.0, 1 / 448


class One:
    """A configuration of one plan."""

    relaxed_bound_ps = lower_ps = TIME_PS / 1.5

    def guess(self, below_ps):
        """None is found."""

    def solve_below(self, below_ps, most, tick):
        return (SimpleNamespace(objective_ps=TIME_PS),) if below_ps > TIME_PS else ()


def test_a_plan_as_good_as_the_limit_is_none_below_it_whatever_the_time_of_a_score_is_rounded_to():
    """Searches of several batch sizes compare times of a sample: two plans of one time ended in a StopIteration."""
    targets = [Target(name, 0.0, SCALE) for name in ("first", "second")]
    assert targets[0].time_ps(targets[0].score(TIME_PS)) > TIME_PS
    search = Search(targets, lambda _: One(), 1, np.inf)
    search.run(lambda _: search.best_score, lambda bound, left: None)
    assert search.best is not None and search.best.score == targets[0].score(TIME_PS)
    assert sorted(len(plans) for plans in search.plans.values()) == [0, 1]
