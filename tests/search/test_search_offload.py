"""Optimizer states in host memory: priced, searched within the host's budget, proven, or refused by name."""

from dataclasses import replace as with_fields
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from brute_force import mistakes
from certificate_attacks import one_way
from command_calls import call
from interleaved_problems import mistakes as interleaved_mistakes
from msgspec import UNSET
from msgspec.structs import replace
from offload_problems import random_interleaved_with_offload, random_with_offload
from random_problems import best_of

from shardwright.io import BadInput, read_document
from shardwright.io.table import Table
from shardwright.types import (
    GIB,
    DataParallel,
    ExpertStrategy,
    GradientReduction,
    LayerStrategy,
    NodeType,
    Offload,
    Plan,
    Precision,
    Recompute,
    Schedule,
    SequenceParallel,
)
from shardwright.types.hardware_profile import HOST_COPIES, RateRow
from shardwright_search.advise.choices import reading_of
from shardwright_search.advise.question import question_of
from shardwright_search.certificate.check import confirms
from shardwright_search.certificate.make import certified
from shardwright_search.cli import APP
from shardwright_search.cost_model.collectives import StageTopology
from shardwright_search.cost_model.layer import CostModel
from shardwright_search.cost_model.layer_cost import parts_of
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions, System
from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.space.budget import Infeasible
from shardwright_search.space.request import SearchRequest
from shardwright_search.systems.registry import SYSTEMS

FILE = Path("s.json")
RATE = 1e9
BOTH = (Offload.NONE, Offload.OPTIMIZER)
STREAMED = tuple(kind for kind in Offload if kind is not Offload.UPDATE)
MOVED = Offload.ACTIVATIONS, Offload.BOTH
UNBOUND = 2.0**52


@pytest.fixture
def given(make):
    """A request, a model, a cluster whose nodes say what their hosts have, and profiles."""
    model, cluster = make.model(4), make.cluster(4)
    return make.request(recompute=["none"]), model, _with_host(cluster, 1.0), make.profiles(model, cluster)


def _with_host(cluster, gib):
    types = {
        name: replace(each, host_memory_gib=gib, host_bytes_per_s=RATE) for name, each in cluster.node_types.items()
    }
    return replace(cluster, node_types=types)


def _found(given, **changes):
    request, *others = given
    return find_best(replace(request, **changes), *others, FILE, lambda _: None)


def _offloaded(plan: Plan) -> int:
    return sum(layer.offloads_optimizer for layer in plan.layers)


@pytest.mark.parametrize("data_parallel", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_states_move_to_the_host_and_a_forward_pass_hides_their_copies_both_ways(
    given, monkeypatch, data_parallel, on_cpu
):
    monkeypatch.setattr(NodeType, "on_cpu", on_cpu)
    for rate in (1e6, 1e8, RATE, 1e12):
        _check_copies_of_states(given, data_parallel, rate, on_cpu)


def _check_copies_of_states(given, data_parallel, rate, on_cpu):
    request, model, cluster, profiles = given
    node = replace(cluster.node_types["n"], host_bytes_per_s=rate)
    cluster = replace(cluster, node_types={"n": node})
    costs = CostModel(model, cluster, profiles, request.precision)
    plain = LayerStrategy(type="block", tp_size=1, dp_size=4, data_parallel=data_parallel)
    strategies = plain, replace(plain, offload=Offload.OPTIMIZER)
    asked = StageTopology("n", (4,)), 4, False
    here, there = (costs.layer("block", each, *asked) for each in strategies)
    states = here.memory.optimizer
    assert (there.memory.optimizer, there.memory.host, here.memory.host) == (0, states, 0)
    assert there.state_bytes == here.state_bytes - states
    copied_ps = 2 * states / rate * 1e12
    late_ps = copied_ps if on_cpu else max(0.0, copied_ps - here.forward_ps)
    assert there.optimizer_ps - here.optimizer_ps == pytest.approx(late_ps, abs=2)
    # Where activations go, too, the link is free for the rest of the pass.
    moved, both = (costs.layer("block", replace(plain, offload=kind), *asked) for kind in MOVED)
    free_ps = moved.forward_ps - moved.host_activation_bytes / rate * 1e12
    late_ps = copied_ps if on_cpu else max(0.0, copied_ps - free_ps)
    assert both.optimizer_ps - here.optimizer_ps == pytest.approx(late_ps, abs=2)
    assert (there.forward_ps, there.backward_ps, there.sync_ps) == (here.forward_ps, here.backward_ps, here.sync_ps)
    # The block has one parameter, of whose states three buffers may hold what is there at once.
    assert there.memory.buffers == max(here.memory.buffers, 3 * states)
    columns = costs.layers("block", parts_of(strategies), *asked)
    for column, cost in zip(columns.T, (here, there), strict=True):
        numbers = cost.microbatch_ps, cost.exposed_ps, cost.state_bytes, cost.memory.gradients
        assert tuple(column[:4]) == numbers
        assert tuple(column[6:]) == (cost.workspace_bytes, cost.memory.host, cost.host_activation_bytes)


def test_measured_rates_of_the_host_stand_in_for_those_that_a_cluster_does_not_give(given):
    request, model, cluster, profiles = given
    apart = replace(cluster.node_types["n"], host_bytes_per_s=UNSET)
    lacking = replace(cluster, node_types={"n": apart})
    rows = [
        RateRow(name=name, value=value, source="measured")
        for name, value in zip(HOST_COPIES, (3 * RATE, RATE), strict=True)
    ]
    hardware = with_fields(profiles.hardware, rates=Table.from_rows(RateRow, rows))
    asked = replace(request, offload=BOTH)
    with pytest.raises(BadInput, match=r"s\.json: offload: node type n of cluster some has no host_bytes_per_s"):
        find_best(asked, model, lacking, profiles, FILE, lambda _: None)
    measured = profiles._replace(hardware=hardware)
    assert find_best(asked, model, lacking, measured, FILE, lambda _: None)
    plan = _found(given).chosen.plan
    layers = tuple(replace(layer, offload=Offload.OPTIMIZER) for layer in plan.layers)
    told = [evaluate(replace(plan, layers=layers, cluster=on), measured) for on in (cluster, lacking)]
    assert told[0].objective_ps == told[1].objective_ps
    for whose, each in zip(("the cluster's", "the measured"), told, strict=True):
        assert any(f"offloaded states are copied at {whose} host_bytes_per_s" in line for line in each.warnings)
    assert hardware.host_rate("host_updates_per_s") is None


def test_layers_are_offloaded_where_nothing_else_fits_and_no_more_than_must_be(given):
    whole = _found(given)
    assert _found(given, offload=BOTH).chosen.plan == whole.chosen.plan, "what fits without takes longer with it"
    least, leaner = (_found(given, memory_gib=1e-6, offload=kinds).min_bytes for kinds in ((Offload.NONE,), BOTH))
    assert leaner < least
    for share in (0.2, 0.6):
        gib = (leaner + (least - leaner) * share) / GIB
        assert isinstance(_found(given, memory_gib=gib), Infeasible)
        answer = _found(given, memory_gib=gib, offload=BOTH)
        assert isinstance(answer, SearchAnswer) and _offloaded(answer.chosen.plan) > 0
        price = evaluate(answer.chosen.plan, given[-1])
        assert price.objective_ps == answer.chosen.evaluation.objective_ps
        assert any(line.startswith("assumed: offloaded states are copied") for line in price.warnings)
        assert max(stage.memory_bytes for stage in price.estimate.stages) <= gib * GIB
        assert sum(stage.host_bytes or 0 for stage in price.estimate.stages) > 0


def test_the_host_s_update_takes_its_rate_and_the_copies_of_gradients_and_parameters(given):
    request, model, cluster, profiles = given
    node = replace(cluster.node_types["n"], host_updates_per_s=1e8)
    costs = CostModel(model, replace(cluster, node_types={"n": node}), profiles, request.precision)
    plain = LayerStrategy(type="block", tp_size=1, dp_size=4, data_parallel="zero2")
    asked = StageTopology("n", (4,)), 4, False
    here, there = (costs.layer("block", each, *asked) for each in (plain, replace(plain, offload=Offload.UPDATE)))
    count = here.memory.optimizer // 8
    assert there.memory.host == 12 * count and there.memory.optimizer == 0
    assert there.memory.buffers == here.memory.buffers, "no states come to the device"
    assert there.optimizer_ps == pytest.approx((count / 1e8 + 12 * count / RATE) * 1e12, abs=2)
    with pytest.raises(BadInput, match=r"s\.json: offload: node type n of cluster some has no host_updates_per_s"):
        _found(given, offload=(Offload.NONE, Offload.UPDATE))


def test_a_choice_beside_the_answer_may_offload_what_its_layers_and_hosts_allow():
    def choice(gpus, text, offload="any"):
        question = question_of(AdviseOptions(model="llama-3-8b", gpus=gpus, batch=64, offload=offload))
        return reading_of(text, question.setting).plan

    for kind in ("optimizer", "update"):
        layers = choice("1x8:H100-SXM", f"tp=2,zero=3,offload={kind}").layers
        assert {layer.offload for layer in layers} == {Offload(kind)}
    assert choice("1x8:H100-SXM", "tp=2,recompute=full,offload=both").layers[0].offloads_activations
    with pytest.raises(BadInput, match="offload both of layers that gather positions: add recompute=full"):
        choice("1x8:H100-SXM", "tp=2,offload=both")
    with pytest.raises(BadInput, match="offload update: nobody knows how fast these hosts update"):
        choice("1x8:A100-80", "tp=2,offload=update")
    with pytest.raises(BadInput, match="offload: nothing is known of the hosts: give --offload any"):
        choice("1x8:H100-SXM", "tp=2,offload=optimizer", "none")


def test_quarters_on_the_host_take_as_long_as_nvidia_measured_and_free_as_much():
    """Qwen3-30B-A3B with tp 2, pp 2 and ep 4 on 16 H100: 47.2 to 32.0 GB at 996 to 4,189 ms.

    The rate is fitted to the ends; the quarters between them, and all memory, are not.
    """
    options = AdviseOptions(
        model="qwen3-30b-a3b", gpus="2x8:H100-SXM", batch=16, seq=4096, offload="update", runtime="megatron-core"
    )
    question = question_of(options)
    experts = ExpertStrategy(ep_size=4, etp_size=1, data_parallel=DataParallel.ZERO2)
    choice = question.setting.uniform(
        "q", 2, 1, GradientReduction.DEFERRED, tp_size=2, data_parallel=DataParallel.ZERO2,
        sequence_parallel=SequenceParallel.MEGATRON, experts=experts,
    )  # fmt: skip
    plan = question.setting.plan(choice, "q")
    steps_s, held_gb = [], []
    for quarters in range(5):
        layers = list(plan.layers)
        for low, high in (stage.layers[0] for stage in plan.stages):
            for i in range(low, low + (high - low) * quarters // 4):
                layers[i] = replace(layers[i], offload=Offload.UPDATE)
        estimate = evaluate(replace(plan, layers=tuple(layers)), question.profiles, timeline=False).estimate
        steps_s.append(estimate.simulated_step_time_s)
        held_gb.append(max(stage.memory_bytes for stage in estimate.stages) / 1e9)
    measured_s = 0.996, 1.871, 2.484, 3.187, 4.189
    pairs = zip(steps_s[1:], measured_s[1:], strict=True)
    longer = [(here - steps_s[0]) / (there - measured_s[0]) for here, there in pairs]
    assert all(0.8 < ratio < 1.25 for ratio in longer), longer
    freed = [before - after for before, after in pairwise(held_gb)]
    assert freed == pytest.approx([3.8] * 4, rel=0.15), freed


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_activations_move_to_the_host_and_are_copied_beside_a_gpu_s_passes(make, recompute, on_cpu):
    device = "cpu" if on_cpu else "gpu"
    model, cluster = make.model(4), _with_host(make.cluster(4, device=device), 1.0)
    profiles = make.profiles(model, cluster)
    profiles = profiles._replace(origin=replace(profiles.origin, device=device))
    costs = CostModel(model, cluster, profiles, Precision())
    plain = LayerStrategy(type="block", tp_size=1, dp_size=4, recompute=recompute)
    strategies = plain, replace(plain, offload=Offload.ACTIVATIONS), replace(plain, offload=Offload.BOTH)
    asked = StageTopology("n", (4,)), 4, False
    kept, moved, both = priced = [costs.layer("block", each, *asked) for each in strategies]
    held, copied_ps = kept.activation_bytes, kept.activation_bytes / RATE * 1e12
    assert (moved.activation_bytes, moved.host_activation_bytes, kept.host_activation_bytes) == (0, held, 0)
    assert moved.workspace_bytes == kept.workspace_bytes + 2 * held
    for before, after in ((kept.forward_ps, moved.forward_ps), (kept.backward_ps, moved.backward_ps)):
        assert after == pytest.approx(before + copied_ps if on_cpu else max(before, copied_ps), abs=1)
    assert (both.memory.host, moved.memory.host) == (kept.memory.optimizer, 0)
    assert (both.forward_ps, both.host_activation_bytes) == (moved.forward_ps, held)
    for column, cost in zip(costs.layers("block", parts_of(strategies), *asked).T, priced, strict=True):
        assert tuple(column[:4]) == (cost.microbatch_ps, cost.exposed_ps, cost.state_bytes, cost.memory.gradients)
        there = cost.memory.host, cost.host_activation_bytes
        assert tuple(column[5:]) == (cost.activation_bytes, cost.workspace_bytes, *there)


def test_activations_are_moved_where_nothing_else_fits_and_a_plan_says_how_much(given):
    kinds, only = STREAMED, (Offload.NONE, Offload.ACTIVATIONS)
    assert _found(given, offload=kinds).chosen.plan == _found(given).chosen.plan, "what fits without needs none"
    bounds = [_found(given, memory_gib=1e-6, offload=each).min_bytes for each in ((Offload.NONE,), only, kinds)]
    least, leaner, leanest = bounds
    assert leanest < leaner < least
    answer = _found(given, memory_gib=(leaner + least) / 2 / GIB, offload=only)
    plan = answer.chosen.plan
    assert any(layer.offloads_activations for layer in plan.layers) and not _offloaded(plan)
    price = evaluate(plan, given[-1])
    assert price.objective_ps == answer.chosen.evaluation.objective_ps
    assert any(line.startswith("assumed: offloaded activations are copied") for line in price.warnings)
    assert sum(stage.host_bytes or 0 for stage in price.estimate.stages) > 0


def test_interleaved_plans_keep_their_activations_on_the_device(given):
    answer = _found(given, schedules=(Schedule.INTERLEAVED_1F1B,), pp_sizes=(2,), offload=STREAMED)
    assert not any(layer.offloads_activations for layer in answer.chosen.plan.layers)


def test_a_host_that_is_full_takes_no_more(given):
    request, model, cluster, profiles = given
    least, leaner = (_found(given, memory_gib=1e-6, offload=kinds).min_bytes for kinds in ((Offload.NONE,), BOTH))
    asked = {"memory_gib": (leaner + least) / 2 / GIB, "offload": BOTH}
    answer = _found(given, **asked)
    held = max(stage.host_bytes or 0 for stage in answer.chosen.evaluation.estimate.stages)
    enough = _with_host(cluster, held * 4 / GIB)
    assert _found((request, model, enough, profiles), **asked).optimum_s == answer.optimum_s
    short = _found((request, model, _with_host(cluster, 1e-9), profiles), **asked)
    assert isinstance(short, Infeasible)
    fewer = _found((request, model, _with_host(cluster, (held - 1) * 4 / GIB), profiles), **asked)
    if isinstance(fewer, SearchAnswer):
        stages = fewer.chosen.evaluation.estimate.stages
        assert max(stage.host_bytes or 0 for stage in stages) < held and fewer.optimum_s >= answer.optimum_s


def test_the_solver_is_right_where_host_memory_binds():
    assert mistakes(range(40), random_with_offload) == {}
    assert interleaved_mistakes(range(8), random_interleaved_with_offload) == {}
    free = (replace(group, host_budget_bytes=UNBOUND) for group in random_with_offload(0).device_groups)
    assert replace(random_with_offload(0), device_groups=tuple(free)).device_groups[0].offloads
    assert sum(best_of(random_with_offload(seed)) > best_of(_unbound(seed)) for seed in range(40)) >= 3


def test_certificates_know_the_host_s_budget():
    """They confirm no more than the best of all plans that fit both memories, and more than without that budget."""
    binding = [
        seed
        for seed in range(60)
        if np.isfinite(best := best_of(random_with_offload(seed))) and best > best_of(_unbound(seed))
    ]
    above = 0
    for seed in binding[:4]:
        problem, best = random_with_offload(seed), best_of(random_with_offload(seed))
        bound, proofs = certified([one_way(problem)], best, lambda line: None)
        assert confirms(problem, proofs[0], bound) and not confirms(problem, proofs[0], best * (1 + 1e-6))
        assert not confirms(_unbound(seed), proofs[0], best_of(_unbound(seed)) * (1 + 1e-6))
        above += bound > best_of(_unbound(seed))
    assert binding and above


def _unbound(seed):
    problem = random_with_offload(seed)
    return replace(
        problem, device_groups=tuple(replace(each, host_budget_bytes=UNBOUND) for each in problem.device_groups)
    )


def test_any_optimizer_may_offload_but_muon_s_plans_do_not(given):
    assert _found(given, optimizer=("muon", "adamw"), offload=BOTH).chosen
    with pytest.raises(BadInput, match=r"s\.json: offload: muon updates whole matrices, of all layers at once"):
        _found(given, optimizer="muon", offload=BOTH)


def test_a_cluster_that_says_nothing_of_its_hosts_is_refused_by_name(given, make):
    request, model, _, profiles = given
    with pytest.raises(BadInput, match=r"s\.json: offload: node type n of cluster some has no host_memory_gib"):
        _found((request, model, make.cluster(4), profiles), offload=BOTH)
    with pytest.raises(ValueError, match="offload: 'none' is missing: list it"):
        SearchRequest(name="s", global_batch_size=8, offload=(Offload.OPTIMIZER,))


@pytest.mark.parametrize("system", System)
def test_other_systems_do_not_offload(system):
    assert system in SYSTEMS
    asked = AdviseOptions(model="gpt2-xl", gpus="1x8:H100-SXM", offload="optimizer", target=system)
    with pytest.raises(BadInput, match=f"--offload: plans for {system} have none"):
        question_of(asked)


def test_advice_names_what_it_assumes_of_hosts():
    question = question_of(AdviseOptions(model="gpt2-xl", gpus="1x8:A100-80", offload="any"))
    (node,) = question.cluster.node_types.values()
    assert (node.host_bytes_per_s, node.host_memory_gib) == (12e9, 2 * 8 * 80)
    assert any(line.startswith("offload: 12 GB/s each way, an estimate: 0.75 of") for line in question.assumed)
    assert question.request.offload == STREAMED
    known = question_of(AdviseOptions(model="gpt2-xl", gpus="1x8:H100-SXM", offload="any"))
    assert known.request.offload == tuple(Offload)
    with pytest.raises(BadInput, match="--offload: the table has no update rate for hosts of A100-80"):
        question_of(AdviseOptions(model="gpt2-xl", gpus="1x8:A100-80", offload="update"))
    asked = AdviseOptions(model="gpt2-xl", gpus="1x8:A100-80", offload="optimizer", host_memory_gib=512.0)
    assert question_of(asked).cluster.node_types["A100-80"].host_memory_gib == 512
    assert question_of(AdviseOptions(model="gpt2-xl", gpus="1x8:A100-80")).request.offload == (Offload.NONE,)


def test_a_searched_plan_with_offload_is_verified_from_files(given, make, files, tmp_path):
    request, model, cluster, _ = given
    least, leaner = (_found(given, memory_gib=1e-6, offload=kinds).min_bytes for kinds in ((Offload.NONE,), BOTH))
    asked = replace(request, memory_gib=(leaner + least) / 2 / GIB, offload=BOTH)
    paths = files(model, cluster, asked, make.profile(model))
    out = tmp_path / "a.json", tmp_path / "a.certificate.json"
    words = [word for role, path in paths.items() for word in (f"--{role}", path)]
    done = call(APP, "plan", *words, "--out", out[0], "--certificate", out[1])
    assert done.exit_code == 0 and _offloaded(read_document(out[0], Plan)) > 0, done.output
    assert "offload optimizer" in done.stdout
    verified = call(APP, "verify", *out, *words)
    assert verified.exit_code == 0 and verified.stdout.startswith("verified: no plan takes less than"), verified.stderr
