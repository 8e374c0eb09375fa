"""From profiles to plans: the closed form by hand, the search against every plan, and what it tells beside the plan."""

from collections.abc import Iterator
from pathlib import Path
from time import process_time

import numpy as np
import pytest
from msgspec.structs import replace
from plans_by_hand import plans_on
from rest_long import rest_long

from shardwright.display.plan_words import layer_runs
from shardwright.io import BadInput
from shardwright.types import GIB, Cluster, DataParallel, Model, Plan, Recompute
from shardwright_search.commands.prediction import prediction_of_searched
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.first_plans import first_plans
from shardwright_search.search import NEAR, Infeasible, SearchAnswer, StoppedEarly, find_best
from shardwright_search.solver.stopping import GRACE_S, CpuSeconds
from shardwright_search.solver.targets import guess
from shardwright_search.space.configurations import configurations, narrowed
from shardwright_search.space.request import SearchRequest
from shardwright_search.space.search_space import SearchSpace, space_of
from shardwright_search.space.uniform import even_cuts

FILE = Path("s.json")


def ask(request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles) -> SearchAnswer | Infeasible:
    return find_best(request, model, cluster, profiles, FILE, lambda line: None)


def search(request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles) -> SearchAnswer:
    """The answer to a request that some plan fits."""
    found = ask(request, model, cluster, profiles)
    assert isinstance(found, SearchAnswer)
    return found


def optimum_ps(found: SearchAnswer) -> float:
    """The least closed form, as a step of the chosen batch size."""
    return found.optimum_s * 1e12


def every_plan(request: SearchRequest, model: Model, cluster: Cluster) -> Iterator[Plan]:
    """All plans of a request with a fixed batch size, put together without the solver."""
    request = narrowed(request, cluster)
    for configuration in configurations(request, model, cluster, FILE):
        width = cluster.num_devices // configuration.pp_size
        ranks = [tuple(range(i * width, (i + 1) * width)) for i in range(configuration.pp_size)]
        yield from plans_on(ranks, configuration, request, model, cluster)


def test_closed_form_of_one_stage_by_hand(make):
    """In us: microbatch 648 (1 sample: 12 + 120 + 84, and twice that back), three all_reduce of 85.536, optimizer
    3 x 49.152, overhead 50.
    """
    model, cluster = make.model(1), make.cluster()
    request = make.request(
        global_batch_size=2, num_microbatches=[1], pp_sizes=[1], tp_sizes=[1], data_parallel=["ddp"],
        recompute=["none"],
    )  # fmt: skip
    found = search(request, model, cluster, make.profiles(model, cluster))
    estimate = found.chosen.evaluation.estimate
    assert found.chosen.evaluation.objective_ps == 648_000_000 + 256_608_000 + 147_456_000 + 50_000_000
    assert estimate.simulated_step_time_s == estimate.simulated_lower_bound_s == estimate.objective_s == 1102.064e-6
    # process; parameters and two moments of three elements; the most of a microbatch, in the head's backward pass: all
    # activations and the head's gradients, or in the block's: without the head's, with its moment and both gradients
    block = (4 + 120 + 24) * 2048 + 2 * 65536
    assert estimate.memory_bytes == (1 << 20) + 3 * 3 * 65536 + max(block, 4 * 2048 + 1638 + 3 * 65536)
    assert estimate.samples_per_s == pytest.approx(2 / 1102.064e-6)
    assert estimate.usd_per_step == pytest.approx(1102.064e-9)


def test_closed_form_of_two_stages_by_hand(make):
    """In us: A' 396 and 612, with a send of 24.096 each; two microbatches; optimizer 2 x 49.152; overhead 50."""
    model, cluster = make.model(2), make.cluster()
    request = make.request(global_batch_size=2, num_microbatches=[2], pp_sizes=[2], recompute=["none"])
    profiles = make.profiles(model, cluster)
    found = search(request, model, cluster, profiles)
    assert round(optimum_ps(found)) == 420_096_000 + 636_096_000 * 2 + 98_304_000 + 50_000_000
    instance, best = space_of(request, model, cluster, profiles, FILE).instance, found.best
    estimate = evaluate(instance.plan(best.target.configuration, best.priced.solution), profiles).estimate
    first, last = estimate.stages
    assert (first.time_s, last.time_s) == (420.096e-6, 636.096e-6)
    assert first.time_terms_s["sends"] == last.time_terms_s["sends"] == 24.096e-6
    assert estimate.simulated_step_time_s == pytest.approx(1816.496e-6)
    assert found.chosen.evaluation.estimate.simulated_step_time_s < estimate.simulated_step_time_s
    # 1F1B holds two microbatches in the first stage and one in the last, with what it received of it
    assert first.memory_terms_bytes["activations"] == 2 * 124 * 2048
    assert last.memory_terms_bytes["activations"] == (4 + 144) * 2048
    # in the block's first backward pass: one microbatch, the other with the block's moment and gradients, one message
    assert first.memory_bytes == (1 << 20) + 6 * 65536 + (124 + 124 + 24 + 32 + 4) * 2048
    # in the head: a microbatch as received and as it was kept, the head's moment, all gradients, one message;
    # and the next microbatch, on its way
    assert last.memory_bytes == (1 << 20) + 6 * 65536 + (4 + 144 + 2 * 32 + 4 + 4) * 2048 + 9830
    for stage in (first, last):
        assert sum(stage.memory_terms_bytes.values()) == stage.memory_bytes


@pytest.mark.parametrize("seed", rest_long(5, range(12)))
def test_searched_plan_is_the_best_of_all_plans_that_fit(make, seed):
    rng = np.random.default_rng(seed)
    model, cluster = make.model(2, tied=bool(seed % 2)), make.cluster()
    request = make.request(
        global_batch_size=4,
        num_microbatches=[int(rng.choice([1, 2, 4]))],
        schedules=[str(rng.choice(["1f1b", "gpipe"]))],
        data_parallel=[str(name) for name in rng.choice(["ddp", "zero2", "zero3"], 2, replace=False)],
        recompute=["none", "full"],
        sequence_parallel=[str(rng.choice(["none", "megatron", "ulysses"]))],
    )
    profiles = make.profiles(model, cluster, slow=float(rng.choice([0.01, 1.0])))
    prices = [
        (found.objective_ps, found.estimate.memory_bytes)
        for found in (evaluate(plan, profiles) for plan in every_plan(request, model, cluster))
    ]
    needs = sorted(need for _, need in prices)
    budget = needs[int(len(needs) * rng.choice([0, 0.1, 0.5, 0.99]))]
    found = search(replace(request, memory_gib=budget / GIB), model, cluster, profiles)
    best = min(time for time, need in prices if need <= budget)
    assert optimum_ps(found) == pytest.approx(best, rel=1e-12)
    assert found.bound_s == found.optimum_s and not found.stopped
    assert found.chosen.evaluation.estimate.memory_bytes <= budget
    again = evaluate(found.chosen.plan, profiles)
    assert again == found.chosen.evaluation and again.objective_ps <= best * (1 + NEAR)


def test_least_bytes_of_an_infeasible_request_are_exact(make):
    model, cluster = make.model(3), make.cluster(4)
    profiles = make.profiles(model, cluster)
    tight = make.request(memory_gib=2**20 / GIB)
    found = ask(tight, model, cluster, profiles)
    assert isinstance(found, Infeasible)
    assert found.missing_bytes == found.min_bytes - 2**20
    enough, short = (replace(tight, memory_gib=size / GIB) for size in (found.min_bytes, found.min_bytes - 1))
    fits = search(enough, model, cluster, profiles)
    assert fits.chosen.evaluation.estimate.memory_bytes == found.min_bytes
    missing = ask(short, model, cluster, profiles)
    assert isinstance(missing, Infeasible) and missing.missing_bytes == 1
    named = float(found.reason.rsplit(" ", 1)[1])
    search(replace(tight, memory_gib=named), model, cluster, profiles)


def test_recompute_trades_memory_for_time(make):
    model, cluster = make.model(4), make.cluster()
    profiles = make.profiles(model, cluster)
    request = make.request(num_microbatches=[2], pp_sizes=[1], tp_sizes=[1])
    ample = search(request, model, cluster, profiles)
    budget = ample.chosen.evaluation.estimate.memory_bytes
    tight = search(replace(request, memory_gib=0.8 * budget / GIB), model, cluster, profiles)
    assert not any(layer.recompute is Recompute.FULL for layer in ample.chosen.plan.layers)
    recomputed = [layer for layer in tight.chosen.plan.layers if layer.recompute is Recompute.FULL]
    assert 0 < len(recomputed)
    assert tight.optimum_s > ample.optimum_s
    assert tight.chosen.evaluation.estimate.memory_bytes < budget


def test_selective_recomputation_is_searched_where_a_request_names_it(make):
    model, cluster = make.model(4), make.cluster()
    profiles = make.profiles(model, cluster)
    request = make.request(num_microbatches=[2], pp_sizes=[1], tp_sizes=[1])
    ample = search(request, model, cluster, profiles).chosen.evaluation.estimate
    tight = replace(request, memory_gib=0.8 * ample.memory_bytes / GIB)
    wider = replace(tight, recompute=(*request.recompute, Recompute.SELECTIVE))
    without, named = (search(each, model, cluster, profiles) for each in (tight, wider))
    assert Recompute.SELECTIVE in {layer.recompute for layer in named.chosen.plan.layers}
    assert named.optimum_s < without.optimum_s


def test_a_wider_space_is_never_slower(make):
    model, cluster = make.model(3), make.cluster(4)
    profiles = make.profiles(model, cluster)
    narrow = {"tp_sizes": [1], "data_parallel": ["ddp"], "pp_sizes": [1], "recompute": ["none"]}
    times = []
    for field in ("", "recompute", "data_parallel", "tp_sizes", "pp_sizes"):
        narrow.pop(field, None)
        times.append(search(make.request(**narrow), model, cluster, profiles).optimum_s)
    assert times == sorted(times, reverse=True) and times[-1] < times[0]


def test_more_memory_is_never_slower(make):
    model, cluster = make.model(3), make.cluster(4)
    profiles = make.profiles(model, cluster)
    least = ask(make.request(memory_gib=2**20 / GIB), model, cluster, profiles).min_bytes
    requests = [make.request(memory_gib=least * more / GIB) for more in (1, 1.05, 1.2, 1.5, 2, 4)]
    times = [search(request, model, cluster, profiles).optimum_s for request in requests]
    assert times == sorted(times, reverse=True) and times[-1] < times[0]


def test_runners_up_are_different_and_none_beats_the_proof(make):
    model, cluster = make.model(4), make.cluster(4)
    request = make.request(schedules=["1f1b", "gpipe"])
    found = search(request, model, cluster, make.profiles(model, cluster))
    objectives = [c.evaluation.objective_ps for c in found.runners_up]
    assert 3 <= len(objectives) <= 5 and objectives == sorted(objectives)
    assert min(objectives) >= optimum_ps(found) * (1 - 1e-12)
    everything = [c.plan for c in (found.chosen, *found.runners_up)]
    decisions = {
        # one microbatch makes the same actions under every schedule
        (p.stages, p.embedding, p.layers, p.head, p.num_microbatches, p.num_microbatches > 1 and p.schedule)
        for p in everything
    }
    assert len(decisions) == len(everything)
    assert len({len(plan.stages) for plan in everything}) > 1, "other pipeline degrees are among them"


def test_a_degree_has_a_runner_up_though_no_plan_of_its_first_configuration_is_guessed(make, monkeypatch):
    asked = set[int]()

    def from_the_second_on(target, bound, solvable):
        is_first = target.configuration.pp_size not in asked
        asked.add(target.configuration.pp_size)
        return None if is_first else guess(target, bound, solvable)

    monkeypatch.setattr("shardwright_search.candidates.guess", from_the_second_on)
    monkeypatch.setattr("shardwright_search.candidates._MAX_LABELS", 0)
    model, cluster = make.model(4), make.cluster(4)
    found = search(make.request(num_microbatches=[2, 4]), model, cluster, make.profiles(model, cluster))
    assert {len(own.plan.stages) for own in found.runners_up} >= asked - {len(found.chosen.plan.stages)} != set()


def test_prediction_says_what_was_proven(make):
    model, cluster = make.model(3), make.cluster()
    request = make.request()
    found = search(request, model, cluster, make.profiles(model, cluster))
    prediction = prediction_of_searched(found, request, [123] * len(found.chosen.plan.stages), {})
    proof = prediction.proof
    assert proof is not None and proof.objective == "closed form / batch size"
    assert proof.objective_s == proof.objective_bound_s == found.optimum_s and proof.gap == 0
    assert proof.examined == 8 and 1 <= proof.solved <= 8
    assert prediction.plan_sha256 == found.chosen.plan.sha256
    assert "pp_sizes every divisor" in proof.scope and "data_parallel ddp, zero2, zero3" in proof.scope


def test_a_search_that_is_stopped_names_a_plan_and_its_gap(make):
    model, cluster, lines = make.model(3), make.cluster(), list[str]()
    profiles = make.profiles(model, cluster)
    ample = find_best(make.request(), model, cluster, profiles, FILE, lines.append, time_limit_s=600.0)
    assert isinstance(ample, SearchAnswer) and not ample.stopped
    assert any("configurations left" in line for line in lines)
    hasty = find_best(make.request(), model, cluster, profiles, FILE, lines.append, time_limit_s=-1.0)
    assert isinstance(hasty, SearchAnswer) and hasty.stopped
    batch = hasty.chosen.plan.global_batch_size / ample.chosen.plan.global_batch_size
    assert hasty.bound_s <= ample.optimum_s * batch <= hasty.optimum_s * (1 + 1e-12)
    assert hasty.chosen.evaluation == evaluate(hasty.chosen.plan, profiles)


@pytest.mark.parametrize("limit_s", [CpuSeconds(0.05), -1.0])
def test_the_first_plan_of_all_may_be_a_little_late(make, monkeypatch, limit_s):
    def late(space):
        began_s = process_time()
        while process_time() - began_s < 2 * GRACE_S:
            pass
        yield from first_plans(space)

    monkeypatch.setattr("shardwright_search.search.first_plans", late)
    monkeypatch.setattr(SearchSpace, "plain", lambda *_: None)
    model, cluster = make.model(3), make.cluster()
    given = make.request(), model, cluster, make.profiles(model, cluster), FILE, lambda line: None
    found = find_best(*given, time_limit_s=limit_s)
    assert isinstance(found, SearchAnswer) and found.stopped
    monkeypatch.setattr("shardwright_search.search.first_plans", lambda space: iter(()))
    with pytest.raises(StoppedEarly, match="no plan was found before the search was stopped"):
        find_best(*given, time_limit_s=-1.0)


def test_layers_are_cut_evenly_with_the_rest_in_the_middle_then_last():
    assert even_cuts(8, 2) == (0, 4, 8)
    assert even_cuts(7, 2) == (0, 3, 7)
    assert even_cuts(9, 4) == (0, 2, 4, 7, 9)
    assert even_cuts(10, 4) == (0, 2, 5, 8, 10)
    assert even_cuts(11, 4) == (0, 2, 5, 8, 11)


def test_layers_of_one_strategy_are_told_together(make):
    model, cluster = make.model(3), make.cluster()
    only = {"num_microbatches": [1], "tp_sizes": [1], "pp_sizes": [1], "data_parallel": ["zero3"]}
    request = make.request(recompute=["full"], **only)
    plan = search(request, model, cluster, make.profiles(model, cluster)).chosen.plan
    assert layer_runs(plan, 0, 3) == ("layers 0-2: tp1 x dp2 zero3 recompute full",)
    assert layer_runs(plan, 1, 2) == ("layer 1: tp1 x dp2 zero3 recompute full",)
    # Neighbours of two types are told apart, unless the types alternate.
    for kinds, runs in ((("block", "block", "other"), 2), (("block", "other", "block"), 1)):
        types = plan.model.types | {"other": plan.model.types["block"]}
        layers = tuple(replace(layer, type=kind) for layer, kind in zip(plan.layers, kinds, strict=True))
        two = replace(plan, model=replace(plan.model, layers=kinds, types=types), layers=layers)
        assert len(layer_runs(two, 0, 3)) == runs
    # Each strategy is told once, however often it returns.
    plain = replace(plan.layers[0], recompute=Recompute.NONE)
    mixed = replace(plan, layers=(plan.layers[0], plain, plan.layers[2]))
    assert layer_runs(mixed, 0, 3) == (
        "layers 0, 2: tp1 x dp2 zero3 recompute full",
        "layer 1: tp1 x dp2 zero3",
    )


def test_profiles_of_another_model_device_or_precision_are_refused(make):
    model, cluster, request = make.model(), make.cluster(), make.request()
    cases_ = [
        (make.profiles(make.model(hidden=32), cluster), request, cluster, "m.h5: profiled layers of"),
        (make.profiles(model, cluster), request, make.cluster(device="A100"), "m.h5: profiled on 'cpu'"),
        (
            make.profiles(model, cluster, precision="float32/bfloat16/float32"),
            request,
            cluster,
            "m.h5: profiled in float32/bfloat16/float32, not float32/float32/float32",
        ),
    ]
    for profiles, asked, machines, message in cases_:
        with pytest.raises(BadInput) as caught:
            search(asked, model, machines, profiles)
        assert str(caught.value).startswith(message)
        found = search(asked, model, cluster, make.profiles(model, cluster))
        with pytest.raises(BadInput):
            evaluate(replace(found.chosen.plan, cluster=machines), profiles)


def test_the_chosen_plan_shards_nothing_where_one_rank_has_all(make):
    model, cluster = make.model(4), make.cluster()
    request = make.request(pp_sizes=[2], data_parallel=["zero2", "zero3"])
    plan = search(request, model, cluster, make.profiles(model, cluster)).chosen.plan
    assert {layer.data_parallel for layer in plan.layers} == {DataParallel.DDP}
