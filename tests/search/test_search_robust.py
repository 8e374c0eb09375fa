"""Robust searches: the scenarios, the regrets in them, and the plan that is chosen for them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_up import make_cluster, make_curve, make_hardware, make_model, make_profiles, make_request
from rest_long import rest_long

from shardwright_formats.key import LayerKey, rows_by_key
from shardwright_formats.types import Cluster, Schedule, Strategy
from shardwright_formats.types.hardware_profile import Collective, CollectiveKey, HardwareProfile
from shardwright_formats.types.model_profile import ModelProfile, Quantity
from shardwright_search import robust as module
from shardwright_search import search as optimal
from shardwright_search.commands.prediction import prediction_of_searched
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import Profiles, index_profiles
from shardwright_search.robust import NOMINAL, longer, scenarios
from shardwright_search.search import find_best
from shardwright_search.solver.partition import PricedSolution
from shardwright_search.solver.problem import Solution
from shardwright_search.solver.targets import Best, Target
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.request import Robust, SearchRequest

FILE = Path("s.json")
MODEL = make_model(4)
TWO_NODES = make_cluster(2, nodes=2)


def search(
    request: SearchRequest, cluster: Cluster, profiles: Profiles, report: Callable[[str], None] = lambda line: None
) -> optimal.SearchAnswer:
    found = find_best(request, MODEL, cluster, profiles, FILE, report)
    assert isinstance(found, optimal.SearchAnswer)
    return found


def doubtful(cluster: Cluster, error: float = 0.0, interval: float = 0.0, **changes: object) -> Profiles:
    """Profiles whose layers have a standard error of that share, and whose messages an interval of that share."""
    hardware = make_hardware(cluster)
    points = hardware.points.replace(interval=np.full(len(hardware.points), interval))
    profiles = make_profiles(MODEL, cluster, replace(hardware, points=points), **changes)
    layers = {
        key: points._replace(errors=np.full_like(points.errors, error)) for key, points in profiles.layers.items()
    }
    return profiles._replace(layers=layers)


def torn(slow_link: float, **changes: object) -> SearchRequest:
    """Two devices on two nodes: sends many times a step, or a large sum once."""
    kinds = {"recompute": ["none"], "data_parallel": ["ddp"], "sequence_parallel": ["none"]}
    return make_request(**{"global_batch_size": 4, "robust": {"slow_link": slow_link}} | kinds | changes)


def test_a_robust_plan_differs_from_the_nominal_one_and_regrets_less():
    """The nominal plan sends between its stages; where sends are slow it is a fifth slower than need be."""
    profiles = make_profiles(MODEL, TWO_NODES, slow=0.3)
    found, nominal = search(torn(3.0), TWO_NODES, profiles), search(torn(1.0), TWO_NODES, profiles)
    assert len(nominal.chosen.plan.stages) == 2 and len(found.chosen.plan.stages) == 1
    assert [one.scenario for one in found.regrets] == [
        NOMINAL,
        "sends across nodes 3 times as slow",
        "collectives across nodes 3 times as slow",
    ]
    worst, avoided = max(o.regret for o in found.regrets), max(o.nominal_regret for o in found.regrets)
    assert worst < 0.05 < 0.2 < avoided
    assert found.regrets[0].regret == pytest.approx(
        found.chosen.evaluation.objective_ps / nominal.chosen.evaluation.objective_ps - 1
    )
    assert found.optimum_s == nominal.optimum_s == found.bound_s, "the proof is that of the profile as it is"


def test_regrets_are_against_the_best_plan_of_each_scenario_searched_on_its_own():
    profiles = doubtful(TWO_NODES, error=0.05, interval=0.3, slow=0.3)
    request = torn(3.0)
    found, nominal = search(request, TWO_NODES, profiles), search(torn(1.0, robust=None), TWO_NODES, profiles)
    every = scenarios(profiles, TWO_NODES, request.robust)
    assert len(every) == len(found.regrets) == 4
    for scenario, told in zip(every, found.regrets, strict=True):
        best_ps = search(torn(1.0, robust=None), TWO_NODES, scenario.profiles).optimum_s * 1e12
        for plan, regret in ((found.chosen.plan, told.regret), (nominal.chosen.plan, told.nominal_regret)):
            assert regret == pytest.approx(evaluate(plan, scenario.profiles).objective_ps / best_ps - 1, abs=1e-9)


def test_no_plan_near_any_optimum_has_a_smaller_largest_regret():
    """Of all plans priced in all scenarios."""
    found: list[module.Regrets] = []
    least = module.Regrets.least

    def kept(self: module.Regrets, near: float) -> object:
        found.append(self)
        return least(self, near)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Regrets, "least", kept)
        chosen = search(torn(3.0), TWO_NODES, make_profiles(MODEL, TWO_NODES, slow=0.3))
    (every,) = found
    worst = max(one.regret for one in chosen.regrets)
    assert (1 + worst) <= (1 + every.shares.max(0).min()) * 1.01
    assert len(every.plans) > 2 and (every.shares.min(1) == 0).all()


def test_the_largest_regret_decides_and_what_is_near_it_is_kept_by_score():
    """One plan is the best in most scenarios, two others are never far from it."""
    shares = np.array([[0.0, 0.205, 0.1], [0.0, 0.2, 0.2], [0.4, 0.0, 0.2]])
    target = Target(Configuration(8, 1, 1, Schedule.ONE_F_ONE_B), 0.0, 1.0)
    plans = tuple(
        Best(target, PricedSolution(score, Solution((3,), (0, i, 0), (0,))), score) for i, score in enumerate((1, 3, 2))
    )
    regrets = module.Regrets(("a", "b", "c"), plans, shares)
    assert regrets.least(0.0) == (plans[2],) and regrets.least(0.01) == (plans[2], plans[1])
    assert [(o.scenario, o.regret, o.nominal_regret) for o in regrets.reported(plans[2], plans[0])] == [
        ("a", 0.1, 0.0),
        ("b", 0.2, 0.0),
        ("c", 0.2, 0.4),
    ]


@pytest.mark.parametrize("seed", rest_long(2, range(4)))
def test_without_spread_and_slow_links_the_robust_plan_is_the_nominal_one(seed):
    rng = np.random.default_rng(seed)
    cluster = make_cluster(4, nodes=int(rng.choice([1, 2])))
    profiles = doubtful(cluster, 0.1, 0.1, slow=float(rng.choice([0.05, 0.3, 1.0])))
    nothing = {"spreads": 0, "slow_link": 1}
    found = search(make_request(robust=nothing), cluster, profiles)
    nominal = search(make_request(), cluster, profiles)
    assert found.chosen == nominal.chosen
    # The nominal search also looks at plans further from its optimum.
    known = [each.plan for each in nominal.runners_up]
    assert found.runners_up and all(each.plan in known for each in found.runners_up)
    assert [(one.scenario, one.regret == one.nominal_regret) for one in found.regrets] == [(NOMINAL, True)]
    assert nominal.regrets == ()


def test_layers_are_longer_by_their_own_errors_and_messages_by_their_intervals():
    profiles = doubtful(make_cluster(2), error=0.05, interval=0.196)
    key = LayerKey.from_strategy("block", Strategy(tp_size=1, dp_size=1), sequence_length=32)
    errors = profiles.layers[key].errors.copy()
    errors[0] = (0.2, 0.3)
    profiles.layers[key] = profiles.layers[key]._replace(errors=errors)
    slower, was = longer(profiles, 2.0), profiles.layers[key].values
    values = slower.layers[key].values
    assert values[0, :2] == pytest.approx(was[0, :2] * [1.4, 1.6]) and values[1, :2] == pytest.approx(was[1, :2] * 1.1)
    assert (values[:, 2:] == was[:, 2:]).all()
    assert _message_s(slower.hardware, False) == pytest.approx(1.2 * _message_s(profiles.hardware, False))


def test_curves_are_longer_by_the_median_share_of_their_points():
    profiles = doubtful(make_cluster(2), error=0.05)
    curves = [make_curve(1.0, 2.0, 0.0, quantity=kind) for kind in (Quantity.FORWARD_S, Quantity.ACTIVATION_BYTES)]
    slower = longer(profiles._replace(fits=rows_by_key(curves, "sequence_length")), 2.0)
    ((time, memory),) = slower.fits.values()
    assert (time.constant, time.linear, time.quadratic) == pytest.approx((1.1, 2.2, 0.0))
    assert memory == curves[1]


def test_errors_of_a_profile_are_read_as_shares_of_its_times(make):
    profile = make.profile(MODEL)
    layers = profile.layers.replace(backward_error_s=0.25 * profile.layers["backward_s"])
    indexed = indexed_of(replace(profile, layers=layers))
    assert all(points.errors == pytest.approx(np.array([[0.0, 0.25]] * 4)) for points in indexed.layers.values())


def indexed_of(profile: ModelProfile) -> Profiles:
    return index_profiles(make_hardware(TWO_NODES), Path("h.h5"), profile, Path("m.h5"))


def _message_s(hardware: HardwareProfile, across: bool, collective: Collective = Collective.P2P) -> float:
    return float(hardware.curves[CollectiveKey(collective, 2, 1 if across else 2, True)][1][0])


@pytest.mark.parametrize(
    ("devices", "nodes", "links"),
    [
        (1, 1, []),
        (2, 1, ["sends inside a node"]),
        (2, 2, ["sends across nodes", "collectives across nodes"]),
        (4, 2, ["sends inside a node", "sends across nodes", "collectives across nodes"]),
    ],
)
def test_each_kind_of_link_that_a_cluster_has_is_slow_in_a_scenario_of_its_own(devices, nodes, links):
    cluster = make_cluster(devices, nodes=nodes)
    profiles = make_profiles(MODEL, cluster, make_hardware(make_cluster(4)))
    found = scenarios(profiles, cluster, Robust(slow_link=2.5))
    assert [name for name, _ in found] == [NOMINAL, *(f"{link} 2.5 times as slow" for link in links)]
    for name, slower in found[1:]:
        for across in (False, True):
            for collective in (Collective.P2P, Collective.ALL_REDUCE):
                kind = "sends" if collective is Collective.P2P else "collectives"
                where = "across nodes" if across else "inside a node"
                factor = 2.5 if name.startswith(f"{kind} {where}") else 1.0
                was = _message_s(profiles.hardware, across, collective)
                assert _message_s(slower.hardware, across, collective) == pytest.approx(factor * was), name


def test_a_prediction_tells_regrets_and_progress_names_the_scenario():
    said: list[str] = []
    request = torn(3.0)
    found = search(request, TWO_NODES, make_profiles(MODEL, TWO_NODES, slow=0.3), said.append)
    prediction = prediction_of_searched(found, request, [1 << 30] * len(found.chosen.plan.stages), {})
    assert prediction.robust == found.regrets
    assert "of the least largest regret over all scenarios" in prediction.proof.scope
    assert "scenario: sends across nodes 3 times as slow" in said


def test_ctrl_c_in_a_scenario_leaves_the_best_plan_of_the_profile_as_it_is_and_says_so():
    """A scenario of which the best plan is not known has no regrets."""

    def interrupted(line: str) -> None:
        if interrupted.armed and "configurations left" in line:
            interrupted.armed = False
            raise KeyboardInterrupt
        interrupted.armed = interrupted.armed or line.startswith("scenario:")

    interrupted.armed = False
    profiles = make_profiles(MODEL, TWO_NODES, slow=0.3)
    found = search(torn(3.0), TWO_NODES, profiles, interrupted)
    nominal = search(torn(3.0, robust=None), TWO_NODES, profiles)
    assert found.stopped and found.regrets == () and found.optimum_s == nominal.optimum_s
    assert found.chosen.evaluation.estimate.objective_s == nominal.optimum_s
