"""From profiles to plans: the closed form by hand, the search against every plan, and what it tells beside the plan."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shardwright_formats.cluster import Cluster
from shardwright_formats.errors import BadInput
from shardwright_formats.model import EMBEDDING, HEAD, Model
from shardwright_formats.plan import PipelineStage, Plan, Schedule
from shardwright_formats.strategy import DataParallel, LayerStrategy, Recompute
from shardwright_search.case import plan_of, priced_case
from shardwright_search.evaluate import evaluate
from shardwright_search.explain import layer_runs
from shardwright_search.optimal import Found, Infeasible, find_best, memory_budget_bytes
from shardwright_search.predict import prediction_of_searched
from shardwright_search.profiles import Profiles
from shardwright_search.request import SearchRequest
from shardwright_search.solver.problem import Solution
from shardwright_search.space import Case, cases, strategies
from shardwright_search.uniform import even_cuts

FILE = Path("s.json")
GIB = 2**30


def ask(request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles) -> Found | Infeasible:
    return find_best(request, model, cluster, profiles, FILE, lambda line: None)


def search(request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles) -> Found:
    """The answer to a request that some plan fits."""
    found = ask(request, model, cluster, profiles)
    assert isinstance(found, Found)
    return found


def every_plan(request: SearchRequest, model: Model, cluster: Cluster) -> Iterator[Plan]:
    """All plans of a request, put together without the solver."""
    for case in cases(request, model, cluster, FILE):
        width, samples = cluster.num_devices // case.pp_size, request.global_batch_size // case.num_microbatches
        spaces = [strategies(request, model, name, width, samples) for name in (EMBEDDING, *model.layers, HEAD)]
        layers = len(model.layers)
        for cut in range(1, layers) if case.pp_size == 2 else (layers,):
            bounds = ((0, cut), (cut, layers))[: case.pp_size]
            for embedding, *blocks, head in product(*spaces):
                yield Plan(
                    name=request.name,
                    model=model,
                    cluster=cluster,
                    global_batch_size=request.global_batch_size,
                    num_microbatches=case.num_microbatches,
                    schedule=case.schedule,
                    stages=tuple(
                        PipelineStage(ranks=tuple(range(i * width, (i + 1) * width)), layers=(bound,))
                        for i, bound in enumerate(bounds)
                    ),
                    embedding=embedding,
                    head=head,
                    layers=tuple(block for block in blocks if isinstance(block, LayerStrategy)),
                )


def test_closed_form_of_one_stage_by_hand(make):
    """In us: microbatch 648 (1 sample: 12 + 120 + 84, and twice that back), three all_reduce of 85.536, optimizer
    3 x 49.152, overhead 50.
    """
    model, cluster = make.model(1), make.cluster()
    request = make.request(global_batch_size=2, num_microbatches=[1], pp_sizes=[1], tp_sizes=[1])
    plain = make.request(data_parallel=["ddp"], recompute=["none"], **_fields(request))
    found = search(plain, model, cluster, make.profiles(model, cluster))
    estimate = found.chosen.evaluation.estimate
    assert found.chosen.evaluation.objective_ps == 648_000_000 + 256_608_000 + 147_456_000 + 50_000_000
    assert estimate.simulated_step_time_s == estimate.simulated_lower_bound_s == estimate.objective_s == 1102.064e-6
    # process; four times 65536 bytes of three elements (no copies for compute); activations; the block's transient
    assert estimate.memory_bytes == (1 << 20) + 3 * 4 * 65536 + (4 + 120 + 24) * 2048 + 24 * 2048
    assert estimate.samples_per_s == pytest.approx(2 / 1102.064e-6)
    assert estimate.usd_per_step == pytest.approx(1102.064e-9)


def test_closed_form_of_two_stages_by_hand(make):
    """In us: A' 396 and 612, with a send of 24.096 each; two microbatches; optimizer 2 x 49.152; overhead 50."""
    model, cluster = make.model(2), make.cluster()
    request = make.request(global_batch_size=2, num_microbatches=[2], pp_sizes=[2], recompute=["none"])
    found = search(request, model, cluster, make.profiles(model, cluster))
    assert found.chosen.evaluation.objective_ps == 420_096_000 + 636_096_000 * 2 + 98_304_000 + 50_000_000
    first, last = found.chosen.evaluation.estimate.stages
    assert (first.time_s, last.time_s) == (420.096e-6, 636.096e-6)
    assert first.time_terms_s["sends"] == last.time_terms_s["sends"] == 24.096e-6
    assert found.chosen.evaluation.estimate.simulated_step_time_s == pytest.approx(1816.496e-6)
    # 1F1B holds two microbatches in the first stage and one in the last
    assert first.memory_terms_bytes["activations"] == 2 * 124 * 2048
    assert last.memory_terms_bytes["activations"] == 144 * 2048
    for stage in (first, last):
        assert sum(stage.memory_terms_bytes.values()) == stage.memory_bytes


def _fields(request: SearchRequest) -> dict[str, object]:
    keep = ("global_batch_size", "num_microbatches", "pp_sizes", "tp_sizes")
    return {name: getattr(request, name) for name in keep}


@pytest.mark.parametrize("seed", range(12))
def test_searched_plan_is_the_best_of_all_plans_that_fit(make, seed):
    rng = np.random.default_rng(seed)
    model, cluster = make.model(2), make.cluster()
    request = make.request(
        global_batch_size=4,
        num_microbatches=[int(rng.choice([1, 2, 4]))],
        schedules=[str(rng.choice(["1f1b", "gpipe"]))],
        data_parallel=[str(name) for name in rng.choice(["ddp", "zero2", "zero3"], 2, replace=False)],
        recompute=["none", "full"],
        sequence_parallel=[str(rng.choice(["none", "megatron"]))],
    )
    profiles = make.profiles(model, cluster, slow=float(rng.choice([0.01, 1.0])))
    prices = [
        (found.objective_ps, found.estimate.memory_bytes)
        for found in (evaluate(plan, profiles) for plan in every_plan(request, model, cluster))
    ]
    needs = sorted(need for _, need in prices)
    budget = needs[int(len(needs) * rng.choice([0, 0.1, 0.5, 0.99]))]
    found = search(msgspec.structs.replace(request, memory_gib=budget / GIB), model, cluster, profiles)
    best = min(time for time, need in prices if need <= budget)
    assert round(found.optimum_s * 1e12) == best
    assert found.chosen.evaluation.estimate.memory_bytes <= budget
    again = evaluate(found.chosen.plan, profiles)
    assert again == found.chosen.evaluation and again.objective_ps <= best * 1.01


@pytest.mark.parametrize(
    ("devices", "case"),
    [
        (4, Case(1, 2, Schedule.GPIPE)),
        (4, Case(2, 4, Schedule.ONE_F_ONE_B)),
        # two nodes of three devices: only the second of the three stages crosses them
        (6, Case(3, 4, Schedule.ONE_F_ONE_B)),
    ],
)
def test_solver_and_evaluate_count_alike_whatever_the_plan(make, price, devices, case):
    """Random plans, most of them with a change of layout at each layer, on two nodes."""
    rng = np.random.default_rng(0)
    model, cluster, request = make.model(4), make.cluster(devices, nodes=2), make.request()
    profiles = make.profiles(model, cluster)
    priced = priced_case(request, model, cluster, profiles, case, 0)
    assert priced is not None
    overhead_ps = 50_000_000
    for _ in range(40):
        options = tuple(int(rng.integers(len(priced.strategies[kind]))) for kind in priced.problem.elements)
        cuts = sorted(rng.choice([2, 3, 4], case.pp_size - 1, replace=False).tolist())
        ends = (*cuts, 6)
        stage_of = [sum(element >= end for end in ends) for element in range(6)]
        objective_ps, memory_bytes = price(priced.problem, stage_of, options)
        plan = plan_of(request, model, cluster, priced, Solution(objective_ps, ends, options, memory_bytes))
        found = evaluate(plan, profiles)
        assert found.objective_ps == objective_ps + overhead_ps
        assert found.estimate.memory_bytes == memory_bytes + profiles.process_bytes


def test_least_bytes_of_an_infeasible_request_are_exact(make):
    model, cluster = make.model(3), make.cluster(4)
    profiles = make.profiles(model, cluster)
    tight = make.request(memory_gib=2**20 / GIB)
    found = ask(tight, model, cluster, profiles)
    assert isinstance(found, Infeasible)
    assert found.missing_bytes == found.least_bytes - 2**20
    enough = msgspec.structs.replace(tight, memory_gib=found.least_bytes / GIB)
    short = msgspec.structs.replace(tight, memory_gib=(found.least_bytes - 1) / GIB)
    assert memory_budget_bytes(enough, cluster, FILE) == found.least_bytes
    fits = search(enough, model, cluster, profiles)
    assert fits.chosen.evaluation.estimate.memory_bytes == found.least_bytes
    assert isinstance(ask(short, model, cluster, profiles), Infeasible)
    named = float(found.reason.rsplit(" ", 1)[1])
    search(msgspec.structs.replace(tight, memory_gib=named), model, cluster, profiles)


def test_recompute_trades_memory_for_time(make):
    model, cluster = make.model(4), make.cluster()
    profiles = make.profiles(model, cluster)
    request = make.request(num_microbatches=[2], pp_sizes=[1], tp_sizes=[1])
    ample = search(request, model, cluster, profiles)
    budget = ample.chosen.evaluation.estimate.memory_bytes
    tight = search(msgspec.structs.replace(request, memory_gib=0.8 * budget / GIB), model, cluster, profiles)
    assert not any(layer.recompute is Recompute.FULL for layer in ample.chosen.plan.layers)
    recomputed = [layer for layer in tight.chosen.plan.layers if layer.recompute is Recompute.FULL]
    assert 0 < len(recomputed)
    assert tight.optimum_s > ample.optimum_s
    assert tight.chosen.evaluation.estimate.memory_bytes < budget


def test_a_wider_space_is_never_slower(make):
    model, cluster = make.model(3), make.cluster(4)
    profiles = make.profiles(model, cluster)
    narrow = {"tp_sizes": [1], "data_parallel": ["ddp"], "pp_sizes": [1], "recompute": ["none"]}
    times = []
    for field in ("", "recompute", "data_parallel", "tp_sizes", "pp_sizes"):
        narrow.pop(field, None)
        times.append(search(make.request(**narrow), model, cluster, profiles).optimum_s)
    assert times == sorted(times, reverse=True) and times[-1] < times[0]


def test_runners_up_are_different_and_none_beats_the_proof(make):
    model, cluster = make.model(4), make.cluster(4)
    request = make.request(schedules=["1f1b", "gpipe"])
    found = search(request, model, cluster, make.profiles(model, cluster))
    objectives = [c.evaluation.objective_ps for c in found.runners_up]
    assert 3 <= len(objectives) <= 5 and objectives == sorted(objectives)
    assert min(objectives) >= round(found.optimum_s * 1e12)
    everything = [c.plan for c in (found.chosen, *found.runners_up)]
    decisions = {
        # one microbatch makes the same actions under every schedule
        (p.stages, p.embedding, p.layers, p.head, p.num_microbatches, p.num_microbatches > 1 and p.schedule)
        for p in everything
    }
    assert len(decisions) == len(everything)
    assert {1, 2, 4} == {len(c.plan.stages) for c in (found.chosen, *found.runners_up)}
    plain = [
        c.plan
        for c in (found.chosen, *found.runners_up)
        if len(set(c.plan.layers)) == 1
        and c.plan.layers[0].data_parallel is DataParallel.DDP
        and c.plan.layers[0].recompute is Recompute.NONE
    ]
    assert plain


def test_prediction_says_what_was_proven(make):
    model, cluster = make.model(3), make.cluster()
    request = make.request()
    found = search(request, model, cluster, make.profiles(model, cluster))
    prediction = prediction_of_searched(found, request, 123, {})
    proof = prediction.proof
    assert proof is not None and proof.objective == "closed form"
    assert proof.objective_bound_s == found.optimum_s and proof.gap == proof.objective_s / found.optimum_s - 1 <= 0.01
    assert (proof.examined, proof.solved) == (8, 8)
    assert prediction.plan_sha256 == found.chosen.plan.sha256
    assert "pp_sizes every divisor" in proof.scope and "data_parallel ddp, zero2, zero3" in proof.scope


def test_uneven_divisions_are_left_out_of_the_space_not_rounded(make):
    model = make.model()
    request = make.request(global_batch_size=56)
    # 7 samples a microbatch over 8 ranks: no dp_size but 1; 6 samples: 4 does not divide them
    assert {s.dp_size for s in strategies(request, model, "block", 8, 7)} == {1}
    assert {s.dp_size for s in strategies(request, model, "block", 8, 6)} == {1, 2}
    # 5 ranks would split 8 heads unevenly
    assert {s.tp_size for s in strategies(request, model, "block", 5, 5)} == {1}


def test_each_strategy_is_spelled_once(make):
    found = strategies(make.request(), make.model(), "block", 4, 8)
    assert len(set(found)) == len(found) == 6 + 12 + 4
    assert all(s.sequence_parallel == "none" for s in found if s.tp_size == 1)
    assert all(s.data_parallel is DataParallel.DDP for s in found if s.dp_size == 1)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_parallel": ["ulysses"]}, "sequence_parallel ulysses is not planned yet"),
        ({"recompute": ["attention"]}, "recompute attention is not planned yet"),
        ({"schedules": ["interleaved_1f1b"]}, "schedules interleaved_1f1b is not planned yet"),
        ({"gradient_reduction": "every_microbatch"}, "gradient_reduction every_microbatch is not planned yet"),
        ({"num_microbatches": [3]}, "num_microbatches: 3 does not divide global_batch_size, 8"),
        ({"pp_sizes": [3]}, "pp_sizes: 3 does not divide the number of devices, 2"),
        ({"tp_sizes": [4]}, "tp_sizes: 4 does not divide the number of devices, 2"),
        ({"memory_gib": 2.0}, "memory_gib 2 is more than a device has, 1"),
        ({"global_batch_size": 1, "tp_sizes": [1], "pp_sizes": [1]}, "no strategy divides"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_in_one_line(make, changes, message):
    model, cluster = make.model(4), make.cluster()
    with pytest.raises(BadInput) as caught:
        search(make.request(**changes), model, cluster, make.profiles(model, cluster))
    assert str(caught.value).startswith(f"s.json: {message}") and "\n" not in str(caught.value)


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
            evaluate(msgspec.structs.replace(found.chosen.plan, cluster=machines), profiles)
