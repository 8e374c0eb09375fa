"""Plans whose ranks shard experts are priced as two parts; what cannot express them says so in one line."""

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from shardwright.devices.table import read_devices
from shardwright.display.plan_words import strategy_words
from shardwright.estimate.machines import Efficiencies, rates_of
from shardwright.estimate.profile import hardware_profile, model_profile
from shardwright.estimate.settings import ProfileSettings
from shardwright.io import BadInput, write_document
from shardwright.models.description import model_of_config
from shardwright.plan.communication import Cause, region_messages
from shardwright.plan.schedules.passes import Pass
from shardwright.types import (
    Cluster,
    DataParallel,
    ExpertLoad,
    ExpertStrategy,
    LayerLoad,
    LayerStrategy,
    NodeGroup,
    NodeType,
    PipelineStage,
    Plan,
    Recompute,
    Schedule,
    SequenceParallel,
    Strategy,
)
from shardwright.types.hardware_profile import Collective, GroupKind, HardwareProfile
from shardwright_search.cost_model.collectives import collective_time, stage_topology
from shardwright_search.cost_model.compute import expert_cost
from shardwright_search.cost_model.expert_load import LoadFile, StatedLoad, read_load
from shardwright_search.cost_model.experts import even_load
from shardwright_search.cost_model.layer import LayerCost
from shardwright_search.cost_model.plan import cost_model_of, evaluate
from shardwright_search.cost_model.profiles import Profiles, index_profiles
from shardwright_search.options import UniformRequest
from shardwright_search.systems.registry import SYSTEMS
from shardwright_search.uniform_plan import uniform_plan

CONFIG = {
    "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 4,
}  # fmt: skip
EXPERTS = ExpertStrategy(ep_size=2, data_parallel=DataParallel.ZERO3)


NODE = NodeType(device="NVIDIA H100 80GB HBM3", devices_per_node=4, memory_bytes=1 << 34)
CLUSTER = Cluster(name="c", nodes=(NodeGroup(node_type="n", count=1),), node_types={"n": NODE})
MODEL = model_of_config(CONFIG, "m", 16, "config.json")
SETTINGS = ProfileSettings(
    tp_sizes=(1, 2), sequence_parallel=tuple(SequenceParallel), recompute=tuple(Recompute), micro_batch_sizes=(1, 2, 4)
)
GRIDS = [(1, SequenceParallel.NONE), (2, SequenceParallel.MEGATRON), (2, SequenceParallel.ULYSSES)]


def plan_of(
    experts: ExpertStrategy | UnsetType, tp_size: int = 1, split: SequenceParallel = SequenceParallel.NONE, **layer: Any
) -> Plan:
    """Two layers on four ranks, whose ranks shard experts or not."""
    sharding: dict[str, Any] = {"tp_size": tp_size, "dp_size": 4 // tp_size, "sequence_parallel": split}
    sharding |= {"data_parallel": DataParallel.ZERO2}
    block = LayerStrategy(type="sparse", **sharding, experts=experts, **layer)
    outer = Strategy(**sharding)
    return Plan(
        name="p", model=MODEL, cluster=CLUSTER, global_batch_size=8, num_microbatches=1, schedule=Schedule.ONE_F_ONE_B,
        stages=(PipelineStage(ranks=(0, 1, 2, 3), layers=((0, 2),)),), embedding=outer, head=outer,
        layers=(block, block),
    )  # fmt: skip


@pytest.fixture
def plan() -> Plan:
    """Two layers on four ranks, of which the second has its experts shared out by twos."""
    shared = plan_of(EXPERTS)
    return msgspec.structs.replace(shared, layers=(plan_of(UNSET).layers[0], shared.layers[1]))


@pytest.fixture(scope="module")
def profiles() -> Profiles:
    table = read_devices()
    rates = rates_of(table, NODE.device)
    made = model_profile([(Path("m"), MODEL)], SETTINGS, rates, Efficiencies(), table.revised).profile
    hardware = hardware_profile(CLUSTER, [rates], Efficiencies(), None, table.revised)
    return index_profiles(hardware, Path("h.h5"), made, Path("m.h5"))


@pytest.fixture(scope="module")
def without_host(profiles: Profiles) -> Profiles:
    """A host that takes no time: layers are so small that all of them would wait for it."""
    return profiles._replace(host={})


def layer_of(plan: Plan, profiles: Profiles) -> LayerCost:
    costs, layer = cost_model_of(plan, profiles), plan.layers[0]
    return costs.layer("sparse", layer, stage_topology(CLUSTER, (0, 1, 2, 3)), plan.microbatch_samples, True)


def test_a_profile_without_experts_by_themselves_does_not_price_their_sharing(plan: Plan, profiles: Profiles) -> None:
    message = r"m.h5: does not say what experts of sparse cost by themselves: profile the model again"
    with pytest.raises(BadInput, match=message):
        evaluate(plan, profiles._replace(experts={}))
    assert evaluate(plan_of(UNSET), profiles._replace(experts={}, rests={})).objective_ps > 0


@pytest.mark.parametrize("recompute", Recompute)
def test_experts_and_the_rest_add_up_to_the_layer(recompute: Recompute, profiles: Profiles) -> None:
    """One rank that has all experts computes, keeps and stores what it does without a grid for them."""
    alone = ExpertStrategy(ep_size=1, data_parallel=DataParallel.ZERO2)
    whole, shared = (layer_of(plan_of(given, recompute=recompute), profiles) for given in (UNSET, alone))
    for name in ("forward_ps", "backward_ps", "activation_bytes"):
        assert getattr(shared, name) == pytest.approx(getattr(whole, name), rel=1e-6)
    assert shared.memory.optimizer == whole.memory.optimizer
    assert shared.optimizer_ps == pytest.approx(whole.optimizer_ps, rel=0.02)


@pytest.mark.parametrize(("tp_size", "split"), GRIDS)
def test_each_group_of_parameters_is_shared_out_by_its_strategy(
    tp_size: int, split: SequenceParallel, profiles: Profiles
) -> None:
    matrices, outer = 4 * 3 * 24 * 32, MODEL.types["sparse"].parameter_count(1) - 4 * 3 * 24 * 32
    for parts, kind, held in (
        ((1, 1), DataParallel.DDP, 1),
        ((2, 1), DataParallel.DDP, 2),
        ((2, 2), DataParallel.DDP, 4),
        ((1, 2), DataParallel.ZERO2, 4),
        ((1, 1), DataParallel.ZERO3, 4),
    ):
        experts = ExpertStrategy(ep_size=parts[0], etp_size=parts[1], data_parallel=kind)
        shared = plan_of(experts, tp_size, split)
        cost = layer_of(shared, profiles)
        assert cost.memory.optimizer - 2 * 4 * matrices // held == pytest.approx(2 * 4 * outer / 4, rel=0.07)
        assert bool(cost.gather.alone_ps) is (kind is DataParallel.ZERO3)
    # Where each expert has one rank, its gradients are summed with nobody's.
    one, two = (layer_of(plan_of(ExpertStrategy(ep_size=n), tp_size, split), profiles) for n in (4, 2))
    assert one.reduction_ps < two.reduction_ps


@pytest.mark.parametrize(("tp_size", "split"), GRIDS)
def test_rows_take_as_long_as_their_messages_on_the_way(
    tp_size: int, split: SequenceParallel, without_host: Profiles
) -> None:
    """Two ranks exchange what they have; of four neighbours under tp 2 the same ranks lie as near."""
    for recompute, etp_size in product((Recompute.NONE, Recompute.FULL), (1, 2)):
        experts = ExpertStrategy(ep_size=2 // etp_size, etp_size=etp_size)
        shared = plan_of(experts, tp_size, split, recompute=recompute)
        no_messages = without_host._replace(hardware=faster(without_host.hardware))
        cost, alone = (layer_of(shared, given) for given in (without_host, no_messages))
        sent = region_messages(MODEL, "sparse", shared.layers[0], 8, 4, 1)
        time_s = {during: 0.0 for during in Pass}
        for m in sent:
            if m.cause is Cause.EXPERTS and m.collective is not Collective.ALL_REDUCE:
                kind = GroupKind(2, 2, True)
                time_s[m.during] += m.times * collective_time(without_host, m.collective, [kind], m.bytes).time_s
        assert cost.forward_ps - alone.forward_ps == pytest.approx(1e12 * time_s[Pass.FORWARD], rel=1e-3)
        assert cost.backward_ps - alone.backward_ps == pytest.approx(1e12 * time_s[Pass.BACKWARD], rel=1e-3)


def faster(hardware: HardwareProfile) -> HardwareProfile:
    """The same machine, on which messages take next to no time."""
    return dataclasses.replace(hardware, repeats=hardware.repeats.replace(time_s=1e-9 * hardware.repeats["time_s"]))


def test_experts_that_are_computed_again_lie_beside_what_comes_before_them(profiles: Profiles) -> None:
    costs = {kind: layer_of(plan_of(ExpertStrategy(ep_size=2), recompute=kind), profiles) for kind in Recompute}
    kept = {kind: cost.activation_bytes for kind, cost in costs.items()}
    workspace = {kind: cost.workspace_bytes for kind, cost in costs.items()}
    assert kept[Recompute.FULL] < min(kept[Recompute.MLP], kept[Recompute.SELECTIVE]) < kept[Recompute.NONE]
    more = workspace[Recompute.FULL] - workspace[Recompute.NONE]
    assert more == pytest.approx(kept[Recompute.NONE] - kept[Recompute.FULL], rel=0.1)


def loaded(profiles: Profiles, *shares: float) -> Profiles:
    """Profiles with a load in which the experts of both layers have these shares."""
    layers = tuple(LayerLoad(layer=number, shares=shares) for number in range(2))
    return profiles._replace(
        load=LoadFile(Path("load.json"), ExpertLoad(model="m", first_step=1, last_step=9, layers=layers))
    )


def test_ranks_wait_for_the_group_that_gets_most_positions(without_host: Profiles) -> None:
    uneven = loaded(without_host, 0.5, 1 / 6, 1 / 6, 1 / 6)
    for ep_size, fullest in ((1, 1.0), (2, 4 / 3), (4, 2.0)):
        shared = plan_of(ExpertStrategy(ep_size=ep_size))
        key, rows = even_load(MODEL, "sparse", shared.layers[0], 8)
        given, even = (layer_of(shared, each) for each in (uneven, without_host))
        more = expert_cost(without_host, key, fullest * rows).figures, expert_cost(without_host, key, rows).figures
        assert given.activation_bytes - even.activation_bytes == pytest.approx(
            more[0].activation_bytes - more[1].activation_bytes, abs=2
        )
        assert (given.forward_ps > even.forward_ps) is (ep_size > 1)


def test_a_stated_load_is_that_of_the_fullest_rank_of_all_layers(plan: Plan, profiles: Profiles) -> None:
    """At most it gets all rows of its group, and a rank that has all experts gets what the others get."""
    stated = profiles._replace(load=StatedLoad(2.0))
    shares = {1: (0.25,) * 4, 2: (0.5, 0.5, 0, 0), 4: (0.5, 1 / 6, 1 / 6, 1 / 6)}
    for ep_size, logged in shares.items():
        shared = plan_of(ExpertStrategy(ep_size=ep_size))
        assert layer_of(shared, stated) == layer_of(shared, loaded(profiles, *logged))
    all_on_one = profiles._replace(load=StatedLoad(9.0))
    assert layer_of(plan_of(ExpertStrategy(ep_size=2)), all_on_one) == layer_of(
        plan_of(ExpertStrategy(ep_size=2)), stated
    )
    warning = "assumed: the fullest rank's experts get up to 2 times the mean rank's positions"
    assert warning in evaluate(plan, stated).warnings


@pytest.mark.parametrize("text", ["0.5", "nan", "inf", "-1", "1e9"])
def test_a_ratio_below_1_or_beyond_all_ranks_is_refused(text: str) -> None:
    with pytest.raises(
        BadInput, match=r"^--imbalance: .* is not a ratio .*: give a ratio from 1 to 1048576, or the load"
    ):
        read_load(text)


def test_a_load_is_a_ratio_or_a_file(tmp_path: Path, profiles: Profiles) -> None:
    path = tmp_path / "load.json"
    given = loaded(profiles, 0.25, 0.25, 0.25, 0.25).load
    assert isinstance(given, LoadFile)
    write_document(path, given.load)
    assert (read_load("1"), read_load("1.5"), read_load(str(path))) == (
        StatedLoad(1.0), StatedLoad(1.5), given._replace(path=path),
    )  # fmt: skip
    with pytest.raises(BadInput, match=r"nowhere.json: does not exist|nowhere.json"):
        read_load("nowhere.json")


@pytest.mark.parametrize(
    ("asked", "experts"),
    [
        ({"ep_size": 2}, ExpertStrategy(ep_size=2)),
        ({"ep_size": 2, "etp_size": 2}, ExpertStrategy(ep_size=2, etp_size=2)),
        ({"etp_size": 4}, ExpertStrategy(ep_size=1, etp_size=4)),
        ({"etp_size": 2, "tp_size": 2}, UNSET),
    ],
)
def test_a_uniform_plan_shares_experts_out_where_asked(
    asked: dict[str, int], experts: ExpertStrategy | UnsetType
) -> None:
    plan = uniform_plan("u", UniformRequest(global_batch_size=8, **asked), MODEL, CLUSTER)
    assert {layer.experts for layer in plan.layers} == {experts}


def test_an_even_load_is_said_to_be_assumed(plan: Plan, profiles: Profiles) -> None:
    warning = "assumed: all experts get as many positions: imbalance takes the load of a run"
    assert warning in evaluate(plan, profiles).warnings
    assert warning not in evaluate(plan, loaded(profiles, 0.25, 0.25, 0.25, 0.25)).warnings
    assert warning not in evaluate(plan_of(ExpertStrategy(ep_size=1)), profiles).warnings


def test_a_load_of_other_experts_is_refused(plan: Plan, profiles: Profiles) -> None:
    with pytest.raises(BadInput, match=r"load.json: does not fit: layer 0 of m has 4 experts, not 2"):
        evaluate(plan, loaded(profiles, 0.5, 0.5))


@pytest.mark.parametrize("target", sorted(SYSTEMS))
def test_no_system_is_told_of_experts_that_ranks_share_out(plan: Plan, target: str) -> None:
    with pytest.raises(BadInput, match=r"cannot express (layers\[1\](, whose|: experts)|a mixtral model)"):
        SYSTEMS[target].export(plan, "plan.json")


def test_a_sharing_of_experts_is_told_in_words(plan: Plan) -> None:
    assert strategy_words(plan.layers[1]) == "tp1 x dp4 zero2 experts ep2 zero3"
    both = replace(plan.layers[1], experts=replace(EXPERTS, etp_size=2))
    assert strategy_words(both) == "tp1 x dp4 zero2 experts ep2 etp2"
