"""A search for several optimizers has the best of their plans; each costs what its entry says."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from shardwright.io import BadInput, read_document
from shardwright.optimizers.registry import ADAMW, OPTIMIZERS, Optimizer, Shard, shards_of
from shardwright.plan.process_groups import communicators
from shardwright.types import GIB, LayerStrategy, Parameter, Precision
from shardwright_search.commands.verify import check_certifiable, outside
from shardwright_search.cost_model.collectives import StageTopology
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.space.budget import Infeasible
from shardwright_search.space.request import SearchRequest, of_each_optimizer
from shardwright_search.space.search_space import space_of

FILE = Path("s.json")


def _found(given, **changes):
    request, *others = given
    return find_best(replace(request, **changes), *others, FILE, lambda _: None)


@pytest.fixture
def given(make):
    model, cluster = make.model(), make.cluster(4)
    return make.request(), model, cluster, make.profiles(model, cluster)


def _scarce(given):
    """A request within which AdamW's states do not fit, and those of 8 bits do."""
    request, model, cluster, profiles = given
    lean, full = (_found(given, memory_gib=1e-6, optimizer=name).min_bytes for name in ("adamw-8bit", "adamw"))
    assert lean < full
    return replace(request, memory_gib=(lean + full) / 2 / GIB), model, cluster, profiles


def test_the_best_of_several_optimizers_is_the_best_of_each(given):
    *_, profiles = given
    each = {name: _found(given, optimizer=name).chosen for name in OPTIMIZERS}
    answer = _found(given, optimizer="any")
    best = min(each.values(), key=lambda chosen: chosen.sample_s)
    assert answer.chosen.plan == best.plan
    assert answer.bound_s <= answer.chosen.evaluation.estimate.objective_s
    assert {plan.optimizer for plan in (other.plan for other in answer.runners_up)} > {best.plan.optimizer}
    assert each["lion"].plan.optimizer == "lion"
    assert _found(given, optimizer=("lion", "adamw")).chosen.sample_s == min(
        each[name].sample_s for name in ("lion", "adamw")
    )
    price = evaluate(each["lion"].plan, profiles)
    assert any(line.startswith("assumed: the step of lion") for line in price.warnings)
    assert price.objective_ps == each["lion"].evaluation.objective_ps


def test_what_does_not_fit_with_one_optimizer_fits_with_another(given):
    scarce = _scarce(given)
    assert isinstance(_found(scarce), Infeasible)
    answer = _found(scarce, optimizer=("adamw", "adamw-8bit"))
    assert isinstance(answer, SearchAnswer)
    assert answer.chosen.plan.optimizer == "adamw-8bit"
    lacking = _found(given, memory_gib=1e-6, optimizer=("adamw", "adamw-8bit"))
    assert lacking.missing_bytes == _found(given, memory_gib=1e-6, optimizer="adamw-8bit").missing_bytes


@pytest.mark.parametrize("tp_dim", [0, 1])
def test_a_step_costs_what_the_optimizers_move_and_agree_on(make, monkeypatch, tp_dim):
    """Of AdamW's profiled time the share of bytes; ranks that cut rows in columns agree on scales besides."""
    model, cluster, request = make.model(), make.cluster(4), make.request()
    block = model.types["block"]
    cut = tuple(replace(parameter, tp_dim=tp_dim) for parameter in block.parameters)
    model = replace(model, types=model.types | {"block": replace(block, parameters=cut)})
    others = model, cluster, make.profiles(model, cluster)
    asked = "block", LayerStrategy(type="block", tp_size=2, dp_size=1), StageTopology("n", (2,)), 2, True

    def step_ps(name):
        return space_of(replace(request, optimizer=name), *others, FILE).instance.costs.layer(*asked).optimizer_ps

    kind = model.types["block"]
    shares = {name: each.share_of_adamw(shards_of(kind, 2), Precision()) for name, each in OPTIMIZERS.items()}
    assert step_ps("sgd") == pytest.approx(shares["sgd"] * step_ps("adamw"), abs=2)
    together = step_ps("adamw-8bit")
    monkeypatch.setattr(Optimizer, "agreed_bytes", lambda *_: 0)
    alone = step_ps("adamw-8bit")
    assert alone == pytest.approx(shares["adamw-8bit"] * step_ps("adamw"), abs=2)
    assert (together > alone) == (tp_dim == 1)


def test_muon_costs_products_messages_and_a_group_of_each_stage(make):
    """A block of 256 x 64, of which two tensor-parallel ranks update half each, and a largest matrix on top."""
    model, cluster, request = make.model(), make.cluster(4), make.request()
    others = model, cluster, make.profiles(model, cluster)
    instances = [space_of(replace(request, optimizer=name), *others, FILE).instance for name in ("adamw", "muon")]
    strategy, topology = LayerStrategy(type="block", tp_size=2, dp_size=2), StageTopology("n", (4,))
    adamw, muon = (each.costs.layer("block", strategy, topology, 2, True) for each in instances)
    operations = 5 * (4 * 64**2 * 256 + 2 * 64**3)
    points = {key: each for key, each in others[-1].layers.items() if key.type == "block"}
    per_sample = [key.tp_size * (p.values[:, 0] / p.micro_batch_sizes).min() for key, p in points.items()]
    update_s = operations * min(per_sample) / model.types["block"].forward_flops_per_sample
    sent_s = sum(20e-6 + size * 3 / 4 / 1e9 for size in (256 * 64 // 2, 256 * 64))
    share = OPTIMIZERS["muon"].share_of_adamw(shards_of(model.types["block"], 2), Precision())
    expected = share * adamw.optimizer_ps + (update_s / 4 + sent_s) * 1e12
    assert muon.optimizer_ps == pytest.approx(expected, rel=1e-6)
    assert muon.memory.optimizer == adamw.memory.optimizer // 2
    assert muon.memory.buffers == 2 * (2 * 2 + 2) * (256 * 64 + 64 * 64)
    ends = [each.costs.layer("head", strategy, topology, 2, True) for each in instances]
    assert ends[0] == ends[1]
    overheads = [each.costs.step_overhead_s for each in instances]
    assert overheads[1] - overheads[0] == pytest.approx(update_s)
    plan = _found((request, *others), optimizer="adamw").chosen.plan
    for stage in plan.stages:
        for rank in stage.ranks:
            counted = [communicators(replace(plan, optimizer=name))[rank].total() for name in ("adamw", "muon")]
            assert counted[1] - counted[0] == (len(stage.ranks) > 1)


def test_a_plan_with_another_optimizer_is_outside_the_space(given):
    request, *others = given
    plan = _found(given, optimizer="sgd").chosen.plan
    space = space_of(replace(request, optimizer="sgd"), *others, FILE)
    assert outside(space, plan) is None
    assert outside(space, replace(plan, optimizer="lion")) == "another optimizer than the search file's"


def test_what_is_of_one_optimizer_refuses_several_by_name(given):
    request, *others = given
    several = replace(request, optimizer=("adamw", "sgd"))
    assert [one.optimizer for one in of_each_optimizer(several)] == ["adamw", "sgd"]
    with pytest.raises(BadInput, match="optimizer: adamw, sgd are several: name one here"):
        space_of(several, *others, FILE)
    with pytest.raises(BadInput, match="optimizer: a certificate covers only one, not 2"):
        check_certifiable(several, FILE)


@pytest.mark.parametrize("asked", ['"adafactor"', '["adamw", "adam"]', "[]"])
def test_an_optimizer_that_there_is_not_is_refused(asked, tmp_path):
    (tmp_path / "search.json").write_text(
        json.dumps({"format": "shardwright.search", "version": SearchRequest.VERSION, "name": "x"})[:-1]
        + f', "global_batch_size": 8, "optimizer": {asked}}}'
    )
    with pytest.raises(BadInput, match="optimizer"):
        read_document(tmp_path / "search.json", SearchRequest)


def test_bytes_of_states_follow_from_the_entry():
    """A matrix of 6 rows of 700: two tensor-parallel parts of its columns cut blocks of 256, which share scales."""
    parameter = Parameter(name="w", shape=(6, 700), tp_dim=1)
    whole, half = Shard.of(parameter, 1, 1), Shard.of(parameter, 2, 1)
    bits = OPTIMIZERS["adamw-8bit"]
    assert bits.held_bytes([whole], "float32") == 2 * (4200 + 4 * 6 * 3)
    assert bits.held_bytes([half], "float32") == 2 * (2100 + 4 * 6 * 3)
    assert (bits.agreed_bytes(whole), bits.agreed_bytes(half)) == (0, 2 * 4 * 6 * 3)
    assert bits.held_bytes([Shard.of(Parameter(name="b", shape=(700,)), 1, 1)], "float32") == 2 * 4 * 700
    assert OPTIMIZERS["adamw-bf16"].held_bytes([whole], "float32") == 2 * 2 * 4200
    assert OPTIMIZERS["lion"].held_bytes([whole], "bfloat16") == 2 * 4200
    moved = [each.step_bytes([whole], Precision()) for each in (OPTIMIZERS["sgd"], ADAMW)]
    assert moved == [4200 * 4 * (2 * 2 + 1 + 3), 4200 * 4 * (2 * 3 + 1 + 3)]
    assert OPTIMIZERS["sgd"].share_of_adamw([whole], Precision()) == 0.8
