"""Mistakes on purpose: whoever makes one of them is found out by the comparison with every plan."""

from collections.abc import Callable

import numpy as np
import pytest
from brute_force import mistake, solved
from interleaved_problems import mistake as interleaved_mistake
from interleaved_problems import random_interleaved
from msgspec.structs import replace
from offload_problems import random_with_offload
from random_problems import random_problem

from shardwright_search.solver import interleaved, interleaved_problem, partition, stage_labels
from shardwright_search.solver.configuration_bounds import ConfigurationBounds
from shardwright_search.solver.interleaved_problem import InFlight
from shardwright_search.solver.problem import Options, Problem, Start
from shardwright_search.solver.stage_labels import StageLabels

SEEDS = range(200, 1500)


def changed(problem: Problem, **changes: object) -> Problem:
    fields = {name: getattr(problem, name) for name in Problem.__struct_fields__}
    return Problem(**fields | changes)


def without(term: str) -> Callable[[Problem], Problem]:
    """What a solver sees that forgets one column of the options."""

    def forgetful(options: Options) -> Options:
        return options._replace(**{term: np.zeros_like(getattr(options, term))})

    def seen(problem: Problem) -> Problem:
        device_groups = (
            replace(group, options=tuple(map(forgetful, group.options))) for group in problem.device_groups
        )
        return changed(problem, device_groups=tuple(device_groups))

    return seen


def without_sends(problem: Problem) -> Problem:
    free = {cut: np.where(np.isfinite(sends), 0, sends) for cut, sends in problem.sends_ps.items()}
    return changed(problem, sends_ps=free)


def without_redistribution(problem: Problem) -> Problem:
    device_groups = (replace(p, redistribution_ps=np.zeros_like(p.redistribution_ps)) for p in problem.device_groups)
    return changed(problem, device_groups=tuple(device_groups))


@pytest.mark.parametrize(
    "seen",
    [
        *(pytest.param(without(term), id=term) for term in Options._fields[: Options._fields.index("input_layout")]),
        pytest.param(without_redistribution, id="redistribution_ps"),
        pytest.param(
            lambda p: changed(
                p, sends_ps={cut: np.where(np.isfinite(sends), 0, sends) for cut, sends in p.sends_ps.items()}
            ),
            id="sends_ps",
        ),
        pytest.param(lambda p: changed(p, tied_ps=np.zeros_like(p.tied_ps)), id="tied_ps"),
        pytest.param(lambda p: changed(p, in_flight=(1,) * p.pp_size), id="in_flight"),
        pytest.param(lambda p: changed(p, num_microbatches=1), id="num_microbatches"),
        *(
            pytest.param(lambda p, of=of: changed(p, closed_form=p.closed_form._replace(**{of: 0})), id=of)
            for of in ("fill", "steady", "once")
        ),
    ],
)
def test_a_dropped_term_is_caught(seen):
    problems = (made(seed) for seed in SEEDS for made in (random_problem, random_with_offload))
    assert any(mistake(problem, solved(seen(problem))) for problem in problems)


def caught(seeds: range = SEEDS) -> bool:
    return any(mistake(problem, solved(problem)) for problem in map(random_problem, seeds))


def test_a_middle_stage_that_is_ignored_in_the_largest_time_is_caught(monkeypatch):
    appended = partition._appended

    def ignoring(bounds, stage, at, labels, *rest):
        found = appended(bounds, stage, at, labels, *rest)
        forgotten = found.labels._replace(slowest_ps=labels.slowest_ps[found.labels.parent])
        return found._replace(labels=forgotten) if 0 < stage < bounds.problem.pp_size - 1 else found

    monkeypatch.setattr(partition, "_appended", ignoring)
    assert caught()


def test_a_middle_stage_that_has_no_window_is_caught(monkeypatch):
    targets = ConfigurationBounds.target_runs

    def ignoring(self, below_ps):
        found = targets(self, below_ps)
        if found is None or self.problem.pp_size < 3:
            return found
        known = {self.problem.phases(0), self.problem.phases(self.problem.pp_size - 1)}
        return {kind: own for kind, own in found.items() if kind.start is Start.FIRST or kind.phases in known}

    monkeypatch.setattr(ConfigurationBounds, "target_runs", ignoring)
    assert caught()


def test_labels_that_are_compared_across_layouts_at_the_end_of_a_stage_are_caught(monkeypatch):
    whole, few = StageLabels.whole, stage_labels._FEW

    def pruned(self, labels, run, target):
        if run.layers[-1] == self.problem.layers[-1]:
            return whole(self, labels, run, target)  # behind the head there is no layout
        monkeypatch.setattr(stage_labels, "_FEW", 1)
        kept = labels.take(self.worth_extending(labels, run.layers[-1]))
        monkeypatch.setattr(stage_labels, "_FEW", few)
        return whole(self, kept, run, target)

    monkeypatch.setattr(StageLabels, "whole", pruned)
    assert caught(range(767, 1500))  # problems before this one have plans as good without what is lost


@pytest.mark.parametrize("dropped", ["peak", "resident"])
def test_labels_that_are_compared_without_a_measure_of_their_memory_are_caught(monkeypatch, dropped):
    """Behind the peaks of each phase stand, unless the run is over, the resident bytes."""
    undominated = StageLabels._undominated

    def blind(self, labels, memory):
        count = len(self.costs.phases)
        return undominated(self, labels, memory[count:] if dropped == "peak" else memory[:count])

    monkeypatch.setattr(StageLabels, "_undominated", blind)
    assert caught(range(430, 1500) if dropped == "peak" else SEEDS)  # as above


@pytest.mark.parametrize("stage", ["first", "last"])
def test_a_solver_that_wants_a_block_in_the_first_or_the_last_stage_is_caught(monkeypatch, stage):
    ends = Problem.ends

    def fewer(self, number, start):
        own = ends(self, number, start)
        if stage == "first":
            return range(max(own.start, 2), own.stop) if number == 0 else own
        return range(own.start, min(own.stop, len(self.layers) - 1)) if number == self.pp_size - 2 else own

    monkeypatch.setattr(Problem, "ends", fewer)
    assert caught()


def test_a_bound_above_the_best_plan_is_caught(monkeypatch):
    """The sum of the least times, half as much again."""
    costs = ConfigurationBounds._costs

    def bold(self, stage, group, send):
        own = costs.__get__(self, ConfigurationBounds)(stage, group, send)
        return own._replace(total=own.total * 1.5)

    monkeypatch.setattr(ConfigurationBounds, "_costs", bold)
    assert caught(range(256, 1500))  # as above


@pytest.mark.parametrize("dropped", ["sends_ps", "tied_ps"])
def test_an_interleaved_solver_that_drops_a_term_is_caught(monkeypatch, dropped):
    made = interleaved.Interleaved.__init__

    def forgetful(self, problem):
        fields = {name: getattr(problem, name) for name in type(problem).__struct_fields__}
        made(self, type(problem)(**fields | {dropped: np.zeros_like(fields[dropped])}))

    monkeypatch.setattr(interleaved.Interleaved, "__init__", forgetful)
    assert any(map(interleaved_mistake, map(random_interleaved, SEEDS)))


def test_an_interleaved_solver_that_never_looks_at_the_last_stage_is_caught(monkeypatch):
    made, nothing = interleaved.Interleaved.__init__, InFlight(0, 0, 0, False, 0, False, False)

    def forgetful(self, problem):
        fields = {name: getattr(problem, name) for name in type(problem).__struct_fields__}
        made(self, type(problem)(**fields | {"moments_in_flight": (*problem.moments_in_flight[:2], (nothing,))}))

    monkeypatch.setattr(interleaved.Interleaved, "__init__", forgetful)
    assert any(map(interleaved_mistake, map(random_interleaved, SEEDS)))


@pytest.mark.parametrize("count", ["too many", "none"])
def test_an_interleaved_solver_that_counts_other_outputs_as_freed_is_caught(monkeypatch, count):
    made = interleaved.Interleaved.__init__

    def wrong(self, problem):
        held = [
            tuple(moment._replace(freed=moment.chunks if count == "too many" else 0) for moment in moments)
            for moments in problem.moments_in_flight
        ]
        fields = {name: getattr(problem, name) for name in type(problem).__struct_fields__}
        made(self, type(problem)(**fields | {"moments_in_flight": tuple(held)}))

    monkeypatch.setattr(interleaved.Interleaved, "__init__", wrong)
    assert any(map(interleaved_mistake, map(random_interleaved, SEEDS)))


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *(("_time", field) for field in ("options", "wrap", "sends", "tied")),
        *(("_memory", field) for field in ("options", "received_bytes")),
    ],
)
def test_an_interleaved_bound_that_counts_too_much_is_caught(monkeypatch, kind, field):
    made = getattr(interleaved_problem, kind)

    def more(*given):
        found = made(*given)
        return found._replace(**{field: 2 * getattr(found, field)})

    monkeypatch.setattr(interleaved_problem, kind, more)
    assert any(map(interleaved_mistake, map(random_interleaved, SEEDS)))
