"""The best plan of each neighbouring kind, and what more means would bring, each against a search of its own."""

from math import inf
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console

from shardwright.io import BadInput
from shardwright.types import GIB, ContextParallel, DataParallel, Recompute
from shardwright.types.hardware_profile import Collective
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.explain import what_if
from shardwright_search.explain.tables import answers_shown
from shardwright_search.explain.what_if import (
    WhatIf,
    answer,
    better_batches,
    faster_links,
    more_memory,
    more_nodes,
    neighbours,
    outlook,
)
from shardwright_search.search import find_best
from shardwright_search.space.budget import Infeasible, budgets_of
from shardwright_search.space.request import OuterSpace

FILE = Path("s.json")


def quiet(_: str) -> None:
    pass


def best(request, model, cluster, profiles):
    return find_best(request, model, cluster, profiles, FILE, quiet)


@pytest.fixture
def world(make):
    """A budget that holds some kinds of plans: the chosen one recomputes two layers."""
    model, cluster = make.model(4), make.cluster(4)
    profiles = make.profiles(model, cluster)
    return make.request(memory_gib=2.2 / 1024), model, cluster, profiles


def answers(plan, questions):
    return {question.difference: answer(question).result for question in questions}


def test_where_states_may_be_shared_out_in_groups_one_kind_has_none(world, make):
    request, *_, profiles = world
    kinds = neighbours(best(*world).chosen.plan, replace(request, shard_sizes=(2,)), profiles, FILE)
    (question,) = [own for own in kinds if own.difference == "states sharded over all ranks"]
    assert question.request.shard_sizes is None


def test_where_positions_may_be_shared_out_one_kind_shares_none_and_others_are_of_one_way_each(world, make):
    request, *_, profiles = world
    plan, asked = best(*world).chosen.plan, replace(request, cp_sizes=(1, 2), head=OuterSpace(cp_sizes=(2,)))
    kinds = {each.difference: each.request for each in neighbours(plan, asked, profiles, FILE)}
    whole = kinds["no context parallelism"]
    assert (whole.cp_sizes, whole.head.cp_sizes) == ((1,), None)
    assert [kinds[f"context {kind} alone"].context for kind in ContextParallel] == [(kind,) for kind in ContextParallel]
    one_way = replace(asked, context=(ContextParallel.RING,))
    assert not any("context ring" in each.difference for each in neighbours(plan, one_way, profiles, FILE))


def test_a_batch_size_nearby_that_all_devices_divide_is_named_where_it_is_much_faster(make):
    model, cluster = make.model(12), make.cluster(13)
    profiles = make.profiles(model, cluster)

    def named(size, **more):
        request = make.request(global_batch_size=size, **more)
        found = best(request, model, cluster, profiles)
        question = WhatIf("", request, model, cluster, profiles, FILE)
        return found.chosen.sample_s, [
            (each.plan.global_batch_size, each.sample_s) for each in better_batches(question, found, inf)
        ]

    asked_s, others = named(32)
    assert others == [(size, named(size)[0]) for size in (26, 39)]
    assert all(other_s * 1.1 < asked_s for _, other_s in others)
    assert [size for size, _ in named(33)[1]] == [26, 39] and [size for size, _ in named(19)[1]] == []
    assert named(26)[1] == [] and named(32, pp_sizes=[13])[1] == [], "it is divided; it gains little"


@pytest.mark.parametrize("where", ["space_of", "find_best"])
def test_ctrl_c_ends_the_search_for_better_batch_sizes(make, monkeypatch, where):
    """While a size is bounded, and while it is searched."""
    model, cluster, sizes = make.model(12), make.cluster(13), []
    question = WhatIf("", make.request(global_batch_size=32), model, cluster, make.profiles(model, cluster), FILE)
    found, whole = best(*question[1:5]), getattr(what_if, where)

    def interrupted(request, *more):
        sizes.append(request.global_batch_size)
        if where == "space_of":
            raise KeyboardInterrupt
        return replace(whole(request, *more), stopped=True)

    monkeypatch.setattr(what_if, where, interrupted)
    named = [each.plan.global_batch_size for each in better_batches(question, found, inf)]
    assert sizes == [26] and named == ([] if where == "space_of" else [26])


def test_each_kind_is_the_best_plan_of_the_search_that_asks_for_it(world, make):
    request, model, cluster, profiles = world
    chosen = best(*world)
    plan = chosen.chosen.plan
    found = answers(plan, neighbours(plan, request, profiles, FILE))
    asked = {
        "no recomputation": {"recompute": ["none"]},
        "one strategy for all layers": {"fine_grained": False},
        "data parallelism only": {"space": "dp"},
        "ZeRO only": {"space": "zero"},
        **{f"pp_size {n}": {"pp_sizes": [n]} for n in {1, 2, 4} - {len(plan.stages)}},
        **{f"{n} microbatch(es)": {"num_microbatches": [n]} for n in {1, 2, 4, 8} - {plan.num_microbatches}},
    }
    assert set(found) == set(asked) and len(found) == 9
    for what, changes in asked.items():
        own = best(make.request(memory_gib=request.memory_gib, **changes), model, cluster, profiles)
        if isinstance(own, Infeasible):
            assert found[what] == own
        else:
            assert found[what].optimum_s == own.optimum_s >= chosen.optimum_s
            assert found[what].chosen == own.chosen
    assert {isinstance(each, Infeasible) for each in found.values()} == {True, False}


def test_each_kind_is_what_its_name_says(world):
    request, _, _, profiles = world
    plan = best(*world).chosen.plan
    found = answers(plan, neighbours(plan, replace(request, memory_gib=None), profiles, FILE))
    plans = {what: each.chosen.plan for what, each in found.items()}
    assert all(layer.recompute is Recompute.NONE for layer in plans["no recomputation"].layers)
    assert len(set(plans["one strategy for all layers"].layers)) == 1
    alone = plans["data parallelism only"]
    for what, kinds in (
        ("data parallelism only", {DataParallel.DDP}),
        ("ZeRO only", {DataParallel.ZERO2, DataParallel.ZERO3}),
    ):
        alone = plans[what]
        elements = (alone.embedding, *alone.layers, alone.head)
        assert len(alone.stages) == 1
        assert all((s.tp_size, s.dp_size) == (1, 4) and s.data_parallel in kinds for s in elements)
    for what, each in plans.items():
        number = what.split()[1 if what.startswith("pp_size") else 0]
        if what.startswith("pp_size"):
            assert len(each.stages) == int(number)
        elif "microbatch" in what:
            assert each.num_microbatches == int(number)


def test_degrees_and_counts_stay_in_the_asked_space_and_counts_with_the_batch_of_the_plan(make):
    model, cluster = make.model(4), make.cluster(4)
    profiles = make.profiles(model, cluster)
    batch = {"min": 4, "max": 8, "step": 4}
    request = make.request(global_batch_size=batch, pp_sizes=[1, 2], num_microbatches=[1, 2, 8])
    plan = best(request, model, cluster, profiles).chosen.plan
    small = replace(plan, global_batch_size=4, num_microbatches=2)
    questions = {q.difference: q.request for q in neighbours(small, request, profiles, FILE)}
    assert [what for what in questions if "microbatch" in what] == ["1 microbatch(es)"]
    assert questions["1 microbatch(es)"].global_batch_size == 4
    (other,) = [what for what in questions if "pp_size" in what]
    assert (
        other == f"pp_size {3 - len(plan.stages)}" and questions[other].global_batch_size == request.global_batch_size
    )


def test_what_a_kind_lacks_is_what_makes_it_feasible(world):
    request, _, _, profiles = world
    plan = best(*world).chosen.plan
    lacking = 0
    for question in neighbours(plan, request, profiles, FILE):
        found = answer(question).result
        if isinstance(found, Infeasible):
            enough = int(request.memory_gib * GIB) + found.missing_bytes
            for budget, fits in ((enough, True), (enough - 1, False)):
                again = answer(question._replace(request=replace(question.request, memory_gib=budget / GIB))).result
                assert isinstance(again, Infeasible) is not fits
            lacking += 1
    assert lacking > 0


def test_the_table_says_time_and_memory_against_the_plan(world):
    request, _, _, profiles = world
    found = best(*world).chosen
    kinds = [answer(question) for question in neighbours(found.plan, request, profiles, FILE)]
    missing = BadInput("h.h5", "no all_reduce among 3 neighbouring ranks", "measure it")
    console = Console(width=200)
    with console.capture() as captured:
        shown = [*kinds, kinds[0]._replace(difference="other", result=missing)]
        console.print(answers_shown("kinds", found.plan, found.evaluation.estimate, shown))
    lines = captured.get().splitlines()
    mine = found.evaluation.estimate
    for what, other in kinds:
        row = next(line for line in lines if line.startswith(f"│ {what} "))
        cells = [cell.strip() for cell in row.split("│")[2:-1]]
        if isinstance(other, Infeasible):
            assert cells == ["-"] * 5
            assert any(what in line and f"exceeds the budget by {other.missing_bytes} bytes" in line for line in lines)
            continue
        theirs = other.chosen.evaluation.estimate
        assert cells == [
            f"{theirs.simulated_step_time_s * 1e3:.3f}",
            f"{theirs.samples_per_s:.6g}",
            f"{theirs.simulated_step_time_s / mine.simulated_step_time_s - 1:+.1%}",
            f"{theirs.memory_bytes / 2**20:.1f}",
            f"{theirs.memory_bytes / mine.memory_bytes - 1:+.1%}",
        ]
    assert any("other: no plan: h.h5: no all_reduce among 3" in line for line in lines)


def test_more_memory_is_a_tenth_more_of_the_budget_even_above_the_device(make):
    cluster = make.cluster(memory_bytes=1 << 30)
    for asked, before in ((0.5, 2**29), (1.0, 2**30), (None, 2**30), ({"n": 0.5}, 2**29)):
        request, larger = more_memory(make.request(memory_gib=asked), cluster, 1.1)
        assert budgets_of(request, larger, FILE)["n"] == pytest.approx(1.1 * before, abs=2)


def test_faster_links_halve_messages_and_nothing_else(make):
    model, cluster = make.model(4), make.cluster(4, nodes=2)
    for measured in (0.0, 2e-9):
        profiles = make.profiles(model, cluster, reduction_s_per_parameter=measured)
        request = make.request(pp_sizes=[2], tp_sizes=[1], num_microbatches=[2], data_parallel=["ddp"])
        plan = best(request, model, cluster, profiles).chosen.plan
        slow = evaluate(plan, profiles).estimate.stages
        fast = evaluate(plan, faster_links(profiles, 2.0)).estimate.stages
        for before, after in zip(slow, fast, strict=True):
            for term, time_s in before.time_terms_s.items():
                share = 0.5 if term in ("sends", "gradient_sync") else 1
                assert after.time_terms_s[term] == pytest.approx(share * time_s, rel=1e-6), (term, measured)
            assert before.time_terms_s["sends"] > 0 and before.time_terms_s["gradient_sync"] > 0
            assert after.memory_terms_bytes == before.memory_terms_bytes
        assert np.array_equal(profiles.hardware.repeats["time_s"], make.hardware(cluster).repeats["time_s"])


def test_the_outlook_is_the_best_plan_of_a_search_with_more(make):
    model, cluster = make.model(4), make.cluster(2)
    wide = make.cluster(4, nodes=2)
    profiles = make.profiles(model, cluster, make.hardware(wide))
    request = make.request(memory_gib=2.2 / 1024)
    plan = best(request, model, cluster, profiles).chosen.plan
    found = answers(plan, outlook(plan, request, profiles, FILE))
    assert list(found) == ["10% more memory", "links 2 times as fast", "one more n node"]
    roomy = best(make.request(memory_gib=2.42 / 1024), model, cluster, profiles)
    assert found["10% more memory"].optimum_s == roomy.optimum_s
    doubled = best(request, model, cluster, make.profiles(model, cluster, make.hardware(wide, 10e-6, 2e9)))
    assert found["links 2 times as fast"].optimum_s == pytest.approx(doubled.optimum_s)
    assert found["one more n node"].chosen == best(request, model, wide, profiles).chosen
    assert more_nodes(cluster, 0, 1) == wide


def test_a_node_that_the_profile_or_the_degrees_do_not_cover_is_told_in_one_line(make):
    model, cluster = make.model(4), make.cluster(2)
    for request, profiles, words in (
        (make.request(), make.profiles(model, cluster), "h.h5: no "),
        (
            make.request(tp_sizes=[1, 2], pp_sizes=[3]),
            make.profiles(model, cluster, make.hardware(make.cluster(4, nodes=2))),
            "pp_sizes: 3 does not divide the number of devices, 4",
        ),
    ):
        plan = best(replace(request, pp_sizes=None), model, cluster, profiles).chosen.plan
        found = answers(plan, outlook(plan, request, profiles, FILE))["one more n node"]
        assert isinstance(found, BadInput)
        assert words in str(found) and "\n" not in str(found)


def test_an_answer_that_was_stopped_says_so(world):
    request, _, _, profiles = world
    found = best(*world).chosen
    kind, *_ = neighbours(found.plan, replace(request, memory_gib=None), profiles, FILE)
    stopped = answer(kind)
    stopped = stopped._replace(result=replace(stopped.result, stopped=True))
    console = Console(width=200)
    with console.capture() as captured:
        console.print(answers_shown("kinds", found.plan, found.evaluation.estimate, [stopped]))
    assert "no recomputation: (the best so far) " in captured.get()


def test_no_collective_is_forgotten_by_faster_links(make):
    profiles = make.profiles(make.model(), make.cluster(2))
    before, after = profiles.hardware.curves, faster_links(profiles, 2.0).hardware.curves
    assert {key.collective for key in before} == set(Collective) and set(before) == set(after)
    for key, (sizes, times_s) in before.items():
        assert np.array_equal(after[key][0], sizes) and np.allclose(after[key][1] * 2, times_s)
