"""Plans that a request allows: spaces, options, batches and schedules."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from made_up import make_cluster, make_mixed_cluster, make_model, make_profiles, make_request
from mixed_worlds import profiles_of
from msgspec.structs import replace
from random_requests import random_model

from shardwright.io import BadInput
from shardwright.types import GIB
from shardwright.types.plan import Plan, Schedule
from shardwright.types.strategy import DataParallel, Recompute, SequenceParallel
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.search import Infeasible, SearchAnswer, find_best
from shardwright_search.space.choices import shardings
from shardwright_search.space.configurations import configurations, narrowed
from shardwright_search.space.request import SearchRequest, batch_sizes

FILE = Path("s.json")


@pytest.fixture
def planned(searched):
    """The plan chosen under these options."""

    def plan(devices: int = 4, **options: object) -> Plan:
        found = searched(devices, **options)
        assert isinstance(found, SearchAnswer), found
        return found.chosen.plan

    return plan


def shape(plan: Plan) -> tuple[set[int], set[int], int]:
    """Tensor- and data-parallel degrees, and the pipeline degree."""
    every = (plan.embedding, *plan.layers, plan.head)
    return {s.tp_size for s in every}, {s.dp_size for s in every}, len(plan.stages)


@pytest.mark.parametrize(
    ("space", "expected"),
    [("dp", ({1}, {4}, 1)), ("zero", ({1}, {4}, 1)), ("tp", ({4}, {1}, 1)), ("pp", ({1}, {1}, 4))],
)
def test_a_named_space_holds_one_kind_of_parallelism(planned, space, expected):
    plan = planned(space=space)
    assert shape(plan) == expected
    kinds = {layer.data_parallel for layer in plan.layers}
    assert kinds <= ({DataParallel.ZERO2, DataParallel.ZERO3} if space == "zero" else {DataParallel.DDP})
    if space != "zero":
        assert {layer.recompute for layer in plan.layers} == {Recompute.NONE}


def test_the_space_fasop_has_one_strategy_for_all_layers_on_several_node_types(make):
    """Plain data parallelism, tensor parallelism up to 4, nothing recomputed; on 8 devices of a node, too."""
    model, cluster = make.model(6), make_mixed_cluster(a=(1, 8, GIB), b=(1, 8, GIB))
    profiles = profiles_of(model, cluster, {"a": 4e9, "b": 1e9}, tp_sizes=(1, 2, 4, 8))
    found = find_best(make_request(space="fasop", global_batch_size=16), model, cluster, profiles, FILE, lambda _: None)
    plan = found.chosen.plan
    assert len({(s.tp_size, s.data_parallel, s.recompute, s.sequence_parallel) for s in plan.layers}) == 1
    assert (plan.layers[0].data_parallel, plan.layers[0].recompute) == ("ddp", "none")
    sizes = [narrowed(make_request(space="fasop", max_tp_size=most), cluster).max_tp_size for most in (8, 2)]
    assert sizes == [4, 2] and plan.layers[0].tp_size <= 4


@pytest.mark.parametrize("space", ["dp+tp", "dp+pp", "3d", "full"])
def test_wider_named_spaces_hold_the_narrow_ones(searched, space):
    """None is slower than a space that it holds."""
    narrow = {"dp+tp": ("dp", "tp"), "dp+pp": ("dp", "pp"), "3d": ("dp", "tp", "pp"), "full": ("3d", "zero")}[space]
    wide = searched(space=space)
    plan = wide.chosen.plan
    if space == "dp+tp":
        assert len(plan.stages) == 1
    if space == "dp+pp":
        assert shape(plan)[0] == {1}
    if space == "3d":
        assert len(set(plan.layers)) == 1
    for name in narrow:
        assert wide.optimum_s <= searched(space=name).optimum_s


def test_options_narrow_a_named_space_further():
    def spoken(**options: object) -> SearchRequest:
        return narrowed(make_request(**options), make_cluster(8))

    assert spoken(space="zero", data_parallel=["zero3"]).data_parallel == (DataParallel.ZERO3,)
    assert spoken(space="dp+tp", tp_sizes=[2, 4]).tp_sizes == (2, 4)
    assert spoken(space="3d", pp_sizes=[2]).pp_sizes == (2,)
    assert spoken(space="full", disable=["zero"], data_parallel=["ddp", "zero3"]).data_parallel == (DataParallel.DDP,)
    assert spoken(disable=["recompute"], recompute=["full", "none"]).recompute == (Recompute.NONE,)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"space": "dp", "tp_sizes": [2]}, "tp_sizes"),
        ({"disable": ["zero"], "data_parallel": ["zero3"]}, "data_parallel"),
        ({"disable": ["recompute"], "recompute": ["full"]}, "recompute"),
        ({"space": "tp", "pp_sizes": [2]}, "pp_sizes"),
    ],
)
def test_options_that_leave_nothing_of_a_space_are_refused(searched, options, field):
    with pytest.raises(BadInput, match=rf"^search search: {field}: .*leave"):
        searched(**options)


@pytest.mark.parametrize(
    ("dimension", "holds"),
    [
        ("data_parallel", lambda plan: shape(plan)[1] == {1}),
        ("zero", lambda plan: {s.data_parallel for s in plan.layers} == {DataParallel.DDP}),
        ("tensor_parallel", lambda plan: shape(plan)[0] == {1}),
        ("sequence_parallel", lambda plan: {s.sequence_parallel for s in plan.layers} == {SequenceParallel.NONE}),
        ("pipeline_parallel", lambda plan: len(plan.stages) == 1),
        ("recompute", lambda plan: {s.recompute for s in plan.layers} == {Recompute.NONE}),
    ],
)
def test_a_disabled_dimension_is_left_out(planned, searched, dimension, holds):
    """Under a budget in which the best plan uses it, or may."""
    tight = searched(memory_gib=2**20 / GIB).min_bytes * 1.6 / GIB
    assert holds(planned(memory_gib=tight, disable=[dimension]))


def test_degrees_stay_below_their_maxima(planned, searched):
    assert max(shape(planned(max_tp_size=1))[0]) == 1
    assert max(shape(planned(max_dp_size=2))[1]) <= 2
    assert shape(planned(max_pp_size=1))[2] == 1
    assert shape(planned(max_pp_size=2, pp_sizes=[2, 4]))[2] == 2
    with pytest.raises(BadInput, match="no strategy divides"):
        searched(max_tp_size=1, max_dp_size=1, max_pp_size=1)


def test_one_strategy_for_all_layers_where_that_is_asked(searched):
    budget = searched(memory_gib=2**20 / GIB).min_bytes * 1.2 / GIB
    fine, coarse = (searched(memory_gib=budget, fine_grained=fine) for fine in (True, False))
    assert len(set(fine.chosen.plan.layers)) > 1
    assert len(set(coarse.chosen.plan.layers)) == 1
    assert fine.optimum_s <= coarse.optimum_s


def test_embedding_and_head_have_spaces_of_their_own(planned):
    plan = planned(
        pp_sizes=[1], tp_sizes=[1], embedding={"tp_sizes": [2], "data_parallel": ["zero3"]}, head={"tp_sizes": [4]}
    )
    assert {layer.tp_size for layer in plan.layers} == {1}
    assert (plan.embedding.tp_size, plan.embedding.data_parallel) == (2, DataParallel.ZERO3)
    assert plan.head.tp_size == 4


def test_strided_groups_are_taken_where_only_they_are_allowed(planned):
    plan = planned(pp_sizes=[1], tp_sizes=[2], tp_consecutive=[False])
    assert {layer.tp_consecutive for layer in plan.layers} == {False}


def test_states_are_shared_out_in_groups_only_where_these_are_listed(planned, searched):
    asked = {"pp_sizes": [1], "tp_sizes": [1], "data_parallel": ["zero3"], "num_microbatches": [2]}
    assert {layer.shard_size for layer in planned(**asked).layers} == {0}
    plan = planned(**asked, shard_sizes=[1, 2, 4])
    assert {layer.shard_size for layer in plan.layers} == {2}, "gathers among two ranks are faster than among four"
    tight = searched(**asked, memory_gib=2**20 / GIB).min_bytes / GIB
    plan = planned(**asked, shard_sizes=[1, 2, 4], memory_gib=tight)
    assert {layer.shard_size for layer in (*plan.layers, plan.embedding, plan.head)} == {0}, "but hold more"
    with pytest.raises(BadInput, match="shard_sizes: 3 does not divide the number of devices, 4"):
        searched(shard_sizes=[3])


def test_with_shard_groups_the_answer_is_the_best_of_all_plans(make):
    """Every plan of two layers on two nodes of two devices, under budgets that keep more and more of them out."""
    model, cluster = make.model(2), make.cluster(4, nodes=2)
    profiles = make.profiles(model, cluster)
    asked = {"pp_sizes": [1], "tp_sizes": [1], "num_microbatches": [2], "recompute": ["none"], "shard_sizes": [2]}
    request = make.request(**asked)
    best = find_best(request, model, cluster, profiles, FILE, lambda line: None).chosen.plan
    choices = [shardings(request, model, name, 4) for name in ("embedding", "block", "block", "head")]
    assert {len(own) for own in choices} == {5}, "ddp, and zero2 and zero3 among two and among all"
    every = [
        evaluate(replace(best, embedding=first, layers=tuple(layers), head=last), profiles, timeline=False)
        for first, *layers, last in product(*choices)
    ]
    held = sorted(one.estimate.memory_bytes for one in every)
    chosen = []
    for budget in (held[len(held) * share // 100] for share in (0, 2, 5, 10, 20, 40)):
        found = find_best(replace(request, memory_gib=budget / GIB), model, cluster, profiles, FILE, lambda line: None)
        fitting = [one.objective_ps for one in every if one.estimate.memory_bytes <= budget]
        assert found.optimum_s == pytest.approx(min(fitting) / 1e12, rel=1e-12)
        chosen += found.chosen.plan.layers
    assert {layer.shard_size for layer in chosen} == {0, 2}


def test_interleaved_schedules_cut_layers_into_equal_chunks(planned):
    plan = planned(2, pp_sizes=[2], schedules=["interleaved_1f1b"], chunks_per_stage=[2])
    assert plan.schedule is Schedule.INTERLEAVED_1F1B
    assert [stage.layers for stage in plan.stages] == [((0, 1), (2, 3)), ((1, 2), (3, 4))]


@pytest.mark.parametrize("layers", [2, 3, 5, 6, 7])
def test_the_first_and_the_last_chunk_lack_the_layers_that_there_are_not(planned, layers):
    """Of 4 chunks."""
    whole = -(-layers // 4)
    plan = planned(2, model=make_model(layers), pp_sizes=[2], schedules=["interleaved_1f1b"], chunks_per_stage=[2])
    sizes = [high - low for chunk in range(2) for low, high in (stage.layers[chunk] for stage in plan.stages)]
    assert sizes[1:-1] == [whole, whole] and max(sizes) <= whole and sum(sizes) == layers


def test_the_layers_of_llama_3_405b_are_cut_into_chunks_as_meta_did():
    """126 layers on 16 stages of 8 chunks: the embedding and the head are alone in theirs (Llama Team 2024)."""
    model, cluster = make_model(126), make_cluster(16)
    request = make_request(
        global_batch_size=32, pp_sizes=[16], schedules=["interleaved_1f1b"], chunks_per_stage=[8], num_microbatches=[32]
    )
    answer = find_best(request, model, cluster, make_profiles(model, cluster), FILE, lambda line: None)
    stages = answer.chosen.plan.stages
    assert stages[0].layers[0] == (0, 0) and stages[-1].layers[-1] == (126, 126)
    assert [sum(high - low for low, high in stage.layers) for stage in stages] == [7, *[8] * 14, 7]
    assert answer.bound_s == answer.optimum_s


def test_chunks_of_unlike_types_are_refused_at_once(searched):
    """The last block is of another type."""
    model = random_model(np.random.default_rng(3), 4, tied=False)
    model = replace(model, layers=("block", "block", "block", "other"))
    with pytest.raises(BadInput) as caught:
        searched(model=model, pp_sizes=[2], schedules=["interleaved_1f1b"])
    assert str(caught.value).startswith("s.json: interleaved_1f1b: no pp_size and chunks_per_stage give all chunks")


def test_what_chunks_lack_is_never_less_than_nothing(searched):
    """Of one chunk a stage a plan would fit; the need of several is found to the byte."""
    single = searched(memory_gib=2**20 / GIB, pp_sizes=[2], schedules=["1f1b"])
    chunks = {"pp_sizes": [2], "schedules": ["interleaved_1f1b"]}
    answer = searched(memory_gib=single.min_bytes / GIB, **chunks)
    assert isinstance(answer, Infeasible) and answer.missing_bytes > 0 and answer.exact
    budget = single.min_bytes + answer.missing_bytes - 1
    assert isinstance(searched(memory_gib=budget / GIB, **chunks), Infeasible)
    assert not isinstance(searched(memory_gib=(budget + 1) / GIB, **chunks), Infeasible)


def test_a_range_of_batches_is_searched_for_the_most_samples_a_second(searched):
    found = searched(global_batch_size={"min": 4, "max": 17, "step": 4})
    assert [*batch_sizes(make_request(global_batch_size={"min": 4, "max": 17, "step": 4}))] == [4, 8, 12, 16]
    each = {size: searched(global_batch_size=size).optimum_s / size for size in (4, 8, 12, 16)}
    batch = found.chosen.plan.global_batch_size
    assert found.optimum_s / batch == pytest.approx(min(each.values()), rel=1e-12)
    assert each[batch] <= min(each.values()) * 1.01


@pytest.mark.parametrize("objective", ["samples_per_s", "step_time", "usd_per_sample"])
def test_at_one_batch_size_all_objectives_want_the_same(searched, objective):
    assert searched(objective=objective).optimum_s == pytest.approx(searched().optimum_s, rel=1e-12)


def test_uneven_divisions_are_left_out_of_the_space_not_rounded(make, searched):
    # 5 ranks would split 8 heads unevenly
    assert {s.tp_size for s in shardings(make.request(), make.model(), "block", 5)} == {1}
    # 7 samples a microbatch on 8 ranks: only one data-parallel rank divides them
    found = searched(8, global_batch_size=56, num_microbatches=[8], pp_sizes=[1])
    assert shape(found.chosen.plan)[1] == {1}
    found = searched(8, global_batch_size=48, num_microbatches=[8], pp_sizes=[1])
    assert shape(found.chosen.plan)[1] <= {1, 2}


def test_each_strategy_is_spelled_once(make):
    found = shardings(make.request(), make.model(), "block", 4)
    # tp 1: 3 kinds x 2; tp 2: 3 kinds x 2 splits x 2; tp 4: 2 splits x 2
    assert len(set(found)) == len(found) == 6 + 12 + 4
    assert all(s.sequence_parallel == "none" for s in found if s.tp_size == 1)
    assert all(s.data_parallel is DataParallel.DDP for s in found if s.dp_size == 1)
    ulysses = shardings(make.request(sequence_parallel=["ulysses"], tp_sizes=[4]), make.model(), "block", 4)
    assert {s.data_parallel for s in ulysses} == set(DataParallel), "all ranks share its parameters"


def test_every_case_is_there_once(make):
    model, cluster = make.model(4), make.cluster(4)
    request = narrowed(make.request(global_batch_size=4, schedules=["1f1b", "gpipe", "1f1b"]), make_cluster(4))
    found = configurations(request, model, cluster, FILE)
    assert len(set(found)) == len(found) == 3 * 3 * 2 and list(found) == sorted(found)


def test_compiled_layers_are_planned_on_a_profile_of_compiled_layers_alone(make):
    model, cluster = make.model(), make.cluster()
    compiled = make.profiles(model, cluster, precision="float32/float32/float32 compiled")
    for profiles, wanted, other in ((compiled, True, False), (make.profiles(model, cluster), False, True)):
        found = find_best(make.request(compile=wanted), model, cluster, profiles, FILE, lambda line: None)
        assert found.chosen.plan.compile is wanted
        with pytest.raises(BadInput, match=r"m\.h5: profiled in .*, not float32/float32/float32"):
            find_best(make.request(compile=other), model, cluster, profiles, FILE, lambda line: None)
        with pytest.raises(BadInput, match="profile that precision"):
            evaluate(replace(found.chosen.plan, compile=other), profiles)


def test_a_thousand_layers_are_searched_and_more_are_refused(make):
    cluster = make.cluster()
    request = make.request(num_microbatches=[2], pp_sizes=[1], tp_sizes=[1], recompute=["none"], data_parallel=["ddp"])
    for layers in (1000, 1001):
        profiles = make.profiles(model := make.model(layers), cluster)
        if layers == 1000:
            found = find_best(request, model, cluster, profiles, FILE, lambda line: None)
            assert isinstance(found, SearchAnswer | Infeasible)
            continue
        with pytest.raises(BadInput, match=r"s\.json: a model of 1001 layers: time and memory of a search grow"):
            find_best(request, model, cluster, profiles, FILE, lambda line: None)
