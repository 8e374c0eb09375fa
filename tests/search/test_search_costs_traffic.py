"""What moves between layers and stages, beside what the runtime's own redistribution plan says of the whole stage."""

from math import ceil

import numpy as np
import pytest
from msgspec.structs import replace
from random_requests import HIDDEN, LENGTH, random_model

from shardwright.key import LayerKey
from shardwright.plan.axes import Layout, layout_of
from shardwright.plan.layout import closed_groups, sent_numel
from shardwright.plan.tied_weights import pieces_from_owners, pieces_to_owners, tied_parameters
from shardwright.types.hardware_profile import Collective
from shardwright.types.model import BoundaryTensor
from shardwright.types.plan import PipelineStage, Plan, Precision, Schedule
from shardwright.types.strategy import DataParallel, LayerStrategy, Recompute, SequenceParallel, Strategy
from shardwright_search.cost_model.collectives import (
    StageTopology,
    collective_time,
    kinds_of,
    redistribution_time,
    stage_topology,
)
from shardwright_search.cost_model.layer import CostModel, Link
from shardwright_search.cost_model.stage_costs import shared_cost_ps, tied_cost_ps
from shardwright_search.space.configurations import divisors


def model_of(make, devices: int = 2, nodes: int = 1, **changes: object) -> CostModel:
    model, cluster = make.model(**changes), make.cluster(devices, nodes)
    return CostModel(model, cluster, make.profiles(model, cluster), Precision())


def layouts(size: int) -> list[Layout]:
    strategies = [
        Strategy(tp_size=tp, dp_size=size // tp, tp_consecutive=near, sequence_parallel=split)
        for tp in divisors(size)
        for near in (True, False)
        for split in (SequenceParallel.NONE, SequenceParallel.MEGATRON)
    ]
    return sorted({layout_of(strategy) for strategy in strategies})


def test_redistribution_moves_only_what_a_rank_lacks(make):
    """From a sample each to copies of both: 8192 bytes are sent, half of a full all_to_all of 16384; back is free."""
    split, whole = Layout(2, 1, True, 1), Layout(2, 2, True, 1)
    costs, topology = model_of(make), StageTopology("n", (2,))
    there = costs.redistribution("block", split, whole, topology, 2)
    back = costs.redistribution("block", whole, split, topology, 2)
    assert (there.time_ps, back.time_ps) == (20_000_000 + 8_192_000, 0)
    assert costs.redistribution("block", split, split, topology, 2).time_ps == 0


@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (4, 1), (4, 2), (6, 1), (6, 2), (8, 1), (8, 2)])
def test_redistribution_is_that_of_the_plans_over_the_whole_stage(make, size, nodes):
    costs = model_of(make, size, nodes)
    topology = stage_topology(costs.cluster, range(size))
    outputs = (
        BoundaryTensor(name="hidden", sequence_length=48, features=64),
        BoundaryTensor(name="memory", sequence_length=24, features=8),
    )
    samples = 48
    for source in layouts(size):
        for target in layouts(size):
            expected = sum(slowest_exchange_s(costs, topology, source, target, samples, tensor) for tensor in outputs)
            found = redistribution_time(costs.profiles, topology, source, target, samples, outputs, 4)
            assert found.time_s == pytest.approx(expected, rel=1e-6), (source, target)


def slowest_exchange_s(
    costs: CostModel, topology: StageTopology, source: Layout, target: Layout, samples: int, tensor: BoundaryTensor
) -> float:
    """Every closed group on its own: a rank that sends x bytes waits as for an all_to_all of x n/(n-1)."""
    sent = sent_numel(source, target, samples, tensor.sequence_length, tensor.features)
    slowest = 0.0
    for group in closed_groups(source, target, samples, tensor.sequence_length):
        most, ranks = max(sent[rank] for rank in group) * 4, len(group)
        if most:
            full = ceil(most * ranks / (ranks - 1))
            taken = collective_time(costs.profiles, Collective.ALL_TO_ALL, kinds_of(topology, [group]), full)
            slowest = max(slowest, taken.time_s)
    return slowest


def test_a_stage_sends_its_ranks_own_rectangles(make):
    """One sample of 32 positions, 64 features, 4 bytes; half a nanosecond a byte."""
    costs = model_of(make, 4)
    link = costs.link((0, 1), (2, 3))
    assert link == (False, False, ("n",))
    assert costs.send("block", Layout(2, 1, True, 1), link, 2).time_ps == 20_000_000 + 4_096_000
    assert costs.send("block", Layout(2, 2, True, 1), link, 2).time_ps == 20_000_000 + 8_192_000
    assert costs.send("block", Layout(2, 2, True, 2), link, 2).time_ps == 20_000_000 + 4_096_000
    assert costs.send("head", Layout(2, 1, True, 1), link, 2).time_ps == 0
    across = model_of(make, 4, 2)
    assert across.link((0, 1), (2, 3))[:2] == (False, True) and across.link((1,), (2,))[:2] == (True, True)
    link = Link(False, True, ("n",))
    assert across.send("block", Layout(2, 1, True, 1), link, 2).time_ps == 40_000_000 + 4_096_000


def test_tensor_parallel_groups_that_lie_apart_take_longer_than_those_that_were_profiled(make):
    """Strided pairs on two nodes: each message waits 20 us more. Two regions sum forward and backward: 4 messages.

    With full recomputation the sum inside is repeated: 5.
    """
    model, cluster = random_model(np.random.default_rng(0), 4, False), make.cluster(4, 2)
    costs = CostModel(model, cluster, make.profiles(model, cluster), Precision())

    def passes(consecutive: bool, **changes: object) -> int:
        strategy = LayerStrategy(type="block", tp_size=2, dp_size=2, tp_consecutive=consecutive, **changes)
        found = costs.layer("block", strategy, StageTopology("n", (2, 2)), 2, False)
        return found.forward_ps + found.backward_ps

    assert passes(False) - passes(True) == 4 * 20_000_000
    assert passes(False, recompute=Recompute.FULL) - passes(True, recompute=Recompute.FULL) == 5 * 20_000_000
    # a gather and a scatter for each of them, and each of two regions gathers again
    megatron = {"sequence_parallel": SequenceParallel.MEGATRON}
    assert passes(False, **megatron) - passes(True, **megatron) == 10 * 20_000_000


def test_tensor_parallelism_over_two_nodes_takes_longer_than_where_the_node_had_all_ranks(make):
    """Four ranks, two on a node: each of 4 all-reduces takes 40 us and 2 * 3/4 of its bytes, not 20 and 2 * 1/2."""
    model = random_model(np.random.default_rng(0), 4, False)

    def passes(devices: int, nodes: int) -> int:
        cluster, strategy = make.cluster(devices, nodes), LayerStrategy(type="block", tp_size=4, dp_size=1)
        costs = CostModel(model, cluster, make.profiles(model, cluster), Precision())
        found = costs.layer("block", strategy, stage_topology(cluster, range(4)), 2, False)
        return found.forward_ps + found.backward_ps

    of_a_message = 20_000_000 + 500 * 2 * LENGTH * HIDDEN * 4
    assert passes(4, 2) - passes(8, 2) == pytest.approx(4 * of_a_message)


@pytest.mark.parametrize("measured", [(1, 2), (1, 2, 3)])
def test_tensor_parallelism_that_no_node_can_measure_is_rounded_up_to_what_it_can(make, measured):
    """Six ranks on two nodes of 3: a layer's times are those of the largest profiled degree t, 2 or 3.

    Each of 4 all-reduces takes 40 us and 2 * 5/6 of its bytes, of which 20 us and 2 * (t-1)/t are in those times.
    Bytes of the states are those of six ranks; the step of the optimizer is that of t.
    """
    model, cluster = random_model(np.random.default_rng(0), 4, False), make.cluster(6, 2)
    profile = make.profile(model, tp_sizes=measured)
    costs = CostModel(model, cluster, make.index(make.hardware(cluster), profile), Precision())
    strategy = LayerStrategy(type="block", tp_size=6, dp_size=1)
    found = costs.layer("block", strategy, stage_topology(cluster, range(6)), 2, False)
    t = measured[-1]
    key = LayerKey.from_strategy("block", Strategy(tp_size=t, dp_size=1), micro_batch_size=2, sequence_length=LENGTH)
    (row,) = (row for row in profile.layers.rows if row.key == key)
    message = 1000 * LENGTH * HIDDEN * 4 * 2
    longer = 4 * (20_000_000 + message * 2 * (5 / 6 - (t - 1) / t))
    assert found.forward_ps + found.backward_ps == pytest.approx((row.forward_s + row.backward_s) * 1e12 + longer)
    assert found.activation_bytes == row.activation_bytes
    assert found.optimizer_ps == pytest.approx(
        costs.profiles.states[LayerKey(type="block", tp_size=t)].optimizer_s * 1e12
    )
    assert found.memory.parameters == 4 * model.types["block"].parameter_count(6)
    assert found.warnings == (f"rounded up: block tp_size 6: as profiled with tp_size {t}",)


def test_traffic_of_groups_that_lie_apart_is_marked_where_the_model_does_not_tell_it(make):
    costs = model_of(make, 4, 2)
    strategy = LayerStrategy(type="block", tp_size=2, dp_size=2, tp_consecutive=False)
    (warning,) = costs.layer("block", strategy, StageTopology("n", (2, 2)), 2, False).warnings
    assert warning == "absent: what block sends among ranks that lie apart: counted as among neighbours"


def tied_plan(costs: CostModel, embedding: Strategy, head: Strategy) -> Plan:
    half = costs.cluster.num_devices // 2
    model = costs.model
    return Plan(
        name="tied",
        model=model,
        cluster=costs.cluster,
        global_batch_size=half,
        num_microbatches=1,
        schedule=Schedule.ONE_F_ONE_B,
        stages=(
            PipelineStage(ranks=tuple(range(half)), layers=((0, 2),)),
            PipelineStage(ranks=tuple(range(half, 2 * half)), layers=((2, 4),)),
        ),
        embedding=embedding,
        head=head,
        layers=tuple(LayerStrategy(type="block", tp_size=1, dp_size=half) for _ in range(4)),
    )


@pytest.mark.parametrize("kind", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("other", ["ddp", "zero3"])
def test_tied_parameters_move_between_stages_as_the_runtime_moves_them(make, kind, other):
    """A byte takes half a nanosecond, and every rank sends as much."""
    costs = model_of(make, 8, tied=True)
    ranks = tuple(range(4)), tuple(range(4, 8))
    for tp, tp_other in ((1, 1), (1, 2), (2, 4), (4, 1), (2, 2)):
        embedding = Strategy(tp_size=tp, dp_size=4 // tp, data_parallel=DataParallel(kind))
        head = Strategy(tp_size=tp_other, dp_size=4 // tp_other, data_parallel=DataParallel(other))
        tied = tied_parameters(tied_plan(costs, embedding, head))
        taken = 0
        for pieces, own in ((pieces_to_owners(tied), ranks[1]), (pieces_from_owners(tied), ranks[0])):
            sent = [sum(piece.numel for piece in pieces if piece.source == rank) for rank in own]
            taken += 20_000_000 + max(sent) * 4 * 500
        assert tied_cost_ps(costs, embedding, head, *ranks) == taken, (tp, tp_other)


def test_tied_parameters_that_lie_alike_on_one_stage_move_nothing(make):
    costs, ranks = model_of(make, 4, tied=True), tuple(range(4))
    zero2, zero3, ddp = (
        Strategy(tp_size=2, dp_size=2, data_parallel=DataParallel(k)) for k in ("zero2", "zero3", "ddp")
    )
    assert tied_cost_ps(costs, zero2, zero3, ranks, ranks) == 0
    assert tied_cost_ps(costs, ddp, zero3, ranks, ranks) > 0
    assert tied_cost_ps(model_of(make, 4), ddp, zero3, ranks, ranks) == 0, "not tied"


def test_a_parameter_that_layers_share_is_summed_and_brought_back_once_a_step(make):
    """Three copies of 30 x 24 elements beside the owner's: 8640 bytes, there and back, half a nanosecond a byte."""
    model = random_model(np.random.default_rng(5), 4, False)
    cluster = make.cluster(2)
    model = replace(model, layers=("other",) * 4)
    costs = CostModel(model, cluster, make.profiles(model, cluster), Precision())
    assert shared_cost_ps(costs, ((0,), (1,))) == 2 * (20_000_000 + 8640 * 500)
    assert shared_cost_ps(costs, ((0, 1),)) == 2 * (20_000_000 + 8640 * 500)
    assert shared_cost_ps(model_of(make), ((0,), (1,))) == 0
