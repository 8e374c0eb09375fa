"""Stages of any widths with too many places are bounded, told of, and answered by equal widths; stopped searches."""

from pathlib import Path
from time import monotonic

import numpy as np
import pytest
from made_up import make_mixed_cluster, make_model, make_request
from mixed_worlds import profiles_of
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.types import GIB, DataParallel
from shardwright_search.commands.prediction import plan_summary, prediction_of_searched
from shardwright_search.commands.verify import problems_of
from shardwright_search.rent.front import find_front, sub_clusters
from shardwright_search.search import find_best
from shardwright_search.solver.branch_and_bound import optimize
from shardwright_search.solver.targets import Target
from shardwright_search.space import choices
from shardwright_search.space.request import Offers, StageWidths
from shardwright_search.space.search_space import FirstBounds, SearchSpace, space_of

FILE = Path("s.json")


def wide_world(spans=False):
    """Four ranks and two of a slower type: three equal stages, or two of unequal width."""
    model = make_model(5)
    cluster = make_mixed_cluster(a=(1, 4, GIB), b=(1, 2, GIB))
    request = make_request(
        global_batch_size=16, num_microbatches=[4, 8], max_pp_size=4, stage_widths="any", span_node_types=spans
    )
    return request, model, cluster, profiles_of(model, cluster, {"a": 1e9, "b": 1e8}, tp_sizes=(1, 2, 4))


def best_of(*world, **limits):
    return find_best(*world, FILE, lambda line: None, **limits)


@pytest.mark.parametrize("spans", [False, True])
def test_what_has_too_many_places_is_answered_by_equal_widths_and_keeps_its_bound(monkeypatch, spans):
    request, *world = wide_world(spans)
    whole, equal = (best_of(replace(request, stage_widths=of), *world) for of in (StageWidths.ANY, StageWidths.EQUAL))
    assert whole.unlisted is None and whole.bound_s == whole.optimum_s < equal.optimum_s
    monkeypatch.setattr(choices, "MAX_MOVES", 0)
    found = best_of(request, *world)
    assert found.bound_s <= whole.optimum_s < found.optimum_s == pytest.approx(equal.optimum_s)
    assert (found.bound_s > whole.optimum_s / 10) != spans, "nothing is known of stages that span types"
    told = prediction_of_searched(found, request, [GIB] * len(found.chosen.plan.stages), {})
    assert told.proof.gap > 0
    ways = "2 to 4 stages can be placed on the nodes in more ways than a search tries, which leaves the gap"
    assert f"in {6 if spans else 5} cases, {ways}" in told.warnings[0]


def test_widths_that_no_placement_has_are_not_priced():
    """Two stages on a node of each type are these nodes: a profile need not know so many samples on one rank."""
    model, cluster = make_model(3), make_mixed_cluster(a=(1, 4, GIB), b=(1, 4, GIB))
    profiles = profiles_of(model, cluster, {"a": 1e9, "b": 1e9}, tp_sizes=(1,), micro_batch_sizes=(2,))
    request = make_request(global_batch_size=8, num_microbatches=[1], pp_sizes=[2], stage_widths="any", tp_sizes=[1])
    instance = space_of(request, model, cluster, profiles, FILE).instance
    (target,) = SearchSpace(instance, FILE).targets
    assert instance.choices.ways(target.configuration).widths_of_types == {"a": {4}, "b": {4}}
    assert 0 < FirstBounds(instance).bound_ps(target.configuration) < np.inf


def test_what_has_no_place_at_all_is_not_left_open(monkeypatch):
    """Three stages of at most 1 rank each, for 6."""
    monkeypatch.setattr(choices, "MAX_MOVES", 0)
    request, *world = wide_world()
    asked = replace(request, num_microbatches=(16,), tp_sizes=(1,), data_parallel=(DataParallel.DDP,))
    assert space_of(asked, *world, FILE).unlisted is None


def test_memory_that_lacks_is_told_of_equal_widths_alone(monkeypatch):
    request, *world = wide_world()
    lean = replace(request, memory_gib=1e-3)
    whole = best_of(lean, *world)
    monkeypatch.setattr(choices, "MAX_MOVES", 0)
    found = best_of(lean, *world)
    assert whole.min_bytes < found.min_bytes
    assert "even the leanest (" in whole.reason and "the leanest of equal widths (" in found.reason


def test_what_cannot_be_better_than_the_plan_that_is_found_leaves_no_gap(monkeypatch):
    monkeypatch.setattr(choices, "MAX_MOVES", 0)
    request, *world = wide_world()
    left = space_of(request, *world, FILE).unlisted
    assert left is not None and left.below(left.bound) is None
    assert left.below(np.inf) == left and left.below(np.nextafter(left.bound, np.inf)) is not None


def test_a_front_tells_what_may_be_missing(monkeypatch):
    request, model, cluster, profiles = wide_world()
    priced = {name: replace(own, usd_per_hour=1.0) for name, own in cluster.node_types.items()}
    cluster = replace(cluster, node_types=priced)
    offered = sub_clusters(cluster, Offers(), FILE, FILE)
    whole = find_front(request, model, offered, profiles, FILE, lambda line: None)
    assert not any(answer.is_open for answer in whole.answers)
    monkeypatch.setattr(choices, "MAX_MOVES", 0)
    few = find_front(request, model, offered, profiles, FILE, lambda line: None)
    assert any(answer.is_open for answer in few.answers) and not few.stopped
    for one, other in zip(few.answers, whole.answers, strict=True):
        if one.is_open and other.best is not None:
            assert one.bound_s <= other.best.score * 1e-12 * (1 + 1e-12)
        elif not one.is_open and one.best is not None:
            assert other.best is not None and one.best.score == pytest.approx(other.best.score)


def test_nothing_is_certified_that_was_not_searched(monkeypatch):
    monkeypatch.setattr(choices, "MAX_MOVES", 0)
    space = space_of(*wide_world(), FILE)
    with pytest.raises(BadInput, match=r"no certificate: .*: limit pp_sizes, or list stage_widths"):
        next(problems_of(space, 8))


def test_where_nothing_is_listed_the_search_says_what_to_do(monkeypatch):
    monkeypatch.setattr(choices, "MAX_MOVES", 0)
    request, model, cluster, profiles = wide_world()
    with pytest.raises(BadInput, match="no plan was found: stage_widths any: in 2 cases, 4 stages can be placed"):
        best_of(replace(request, pp_sizes=(4,)), model, cluster, profiles)


@pytest.mark.parametrize("most", [choices.MAX_MOVES, 0])
def test_a_search_for_any_widths_that_is_stopped_at_once_answers_a_good_plan_of_equal_ones(monkeypatch, most):
    monkeypatch.setattr(choices, "MAX_MOVES", most)
    request, *world = wide_world()
    hasty = best_of(request, *world, time_limit_s=-1.0)
    equal = best_of(replace(request, stage_widths=StageWidths.EQUAL), *world)
    assert hasty.stopped and len({len(stage.ranks) for stage in hasty.chosen.plan.stages}) == 1
    assert hasty.optimum_s == pytest.approx(equal.optimum_s)
    told = prediction_of_searched(hasty, request, [GIB] * len(hasty.chosen.plan.stages), {})
    assert any("no bound is known; 0 of " in line for line in plan_summary(hasty.chosen.plan, told))
    assert told.proof.nearness == "not known to be near the optimum"


class Slow:
    """Bounding it takes longer than there is time."""

    relaxed_bound_ps = 1.0
    bounded = 0

    @property
    def lower_ps(self):
        Slow.bounded += 1
        while monotonic() < Slow.deadline:
            pass
        return 2.0


def test_a_search_whose_time_is_up_bounds_no_further_configuration():
    Slow.deadline = monotonic() + 0.2
    found = optimize([Target(n, 0.0, 1.0) for n in range(3)], lambda _: Slow(), deadline=Slow.deadline)
    assert found.stopped and found.best is None and Slow.bounded == 1
