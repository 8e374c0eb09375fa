"""What data parallelism moves and what it adds to a step: numbers worked out by hand.

A block has 16384 parameters. On two neighbouring ranks an all_reduce takes 20 us and 1 ns a byte, any other collective
half as long a byte: 85.536 us and 52.768 us for its 65536 bytes. A sample takes 120 us forward and 240 us backward.
"""

import pytest
from msgspec.structs import replace

from shardwright.estimate.held import Held
from shardwright.types.hardware_profile import Collective
from shardwright.types.model import Parameter
from shardwright.types.plan import GradientReduction, Precision
from shardwright.types.strategy import DataParallel, LayerStrategy, SequenceParallel
from shardwright_search.cost_model.collectives import StageTopology
from shardwright_search.cost_model.layer import CostModel, LayerCost

EVERY = GradientReduction.EVERY_MICROBATCH
ALL_REDUCE, ONE_WAY = 85_536_000, 52_768_000
OVERLAP = [
    (Collective.ALL_REDUCE, 2, 1.25, 1.5),
    (Collective.ALL_GATHER, 2, 1.25, 2.0),
    (Collective.REDUCE_SCATTER, 2, 1.5, 1.0),
]


def layer(kind: str, tp_size: int = 1, dp_size: int = 2, split: str = "none", shard_size: int = 0) -> LayerStrategy:
    return LayerStrategy(
        shard_size=shard_size,
        tp_size=tp_size,
        dp_size=dp_size,
        data_parallel=DataParallel(kind),
        sequence_parallel=SequenceParallel(split),
        type="block",
    )


@pytest.fixture
def cost(make):
    """A block's costs with a sample on each rank of a stage."""

    def of(
        strategy: LayerStrategy,
        overlap=(),
        reduction=GradientReduction.DEFERRED,
        microbatches=2,
        parameters=(),
        nodes=1,
        **changes,
    ) -> LayerCost:
        model, cluster = make.model(), make.cluster(4)
        if parameters:
            block = model.types["block"]
            block = replace(block, parameters=(*block.parameters, *parameters))
            model = replace(model, types=model.types | {"block": block})
        profiles = make.profiles(model, cluster, make.hardware(cluster, overlap=overlap), **changes)
        costs = CostModel(model, cluster, profiles, Precision(), reduction)
        size = strategy.tp_size * strategy.dp_size
        return costs.layer(
            "block", strategy, StageTopology("n", (size // nodes,) * nodes), strategy.dp_size, microbatches == 1
        )

    return of


def test_data_parallel_traffic_by_kind(cost):
    ddp, zero2, zero3 = (cost(layer(kind)) for kind in ("ddp", "zero2", "zero3"))
    assert (ddp.gather_forward_ps, ddp.gather_backward_ps, ddp.sync_ps) == (0, 0, ALL_REDUCE)
    assert (zero2.gather_forward_ps, zero2.gather_backward_ps) == (0, 0)
    assert zero2.sync_ps == 2 * ONE_WAY, "gathered once a step, and reduced"
    assert (zero3.gather_forward_ps, zero3.gather_backward_ps, zero3.sync_ps) == (ONE_WAY, ONE_WAY, ONE_WAY)
    assert zero3.microbatch_ps == 120_000_000 + 240_000_000 + 2 * ONE_WAY
    assert (ddp.optimizer_ps, zero2.optimizer_ps) == (49_152_000, 49_152_000 // 2)
    assert cost(layer("ddp", dp_size=1)).sync_ps == 0, "one rank reduces nothing"


def test_gathers_and_reductions_go_on_beside_the_passes_where_that_was_measured(cost):
    """A gather takes 2 x 52.768 us beside a pass, which a fifth of it is lost to; a reduce_scatter a third of 52.768.

    A reduction of 85.536 us takes 128.304 beside the backward pass, which a fifth of it is lost to.
    """
    ddp, zero2, zero3 = (cost(layer(kind), OVERLAP) for kind in ("ddp", "zero2", "zero3"))
    assert ddp.sync_ps == ddp.overlapped_ps == 25_660_800 and ddp.reduction_ps == ALL_REDUCE
    gather, reduce = 21_107_200, 17_589_333
    assert (zero3.gather_forward_ps, zero3.gather_backward_ps) == (gather, gather)
    assert (zero3.sync_ps, zero3.overlapped_ps, zero3.reduction_ps) == (reduce, reduce, ONE_WAY)
    assert zero2.sync_ps == gather + reduce and zero2.overlapped_ps == reduce


def test_a_gather_that_is_longer_than_its_pass_goes_on_alone(cost):
    """Over a forward pass of 12 us: 15 us of both, in which 7.5 us of the gather are done, then 45.268 us alone."""
    zero3 = cost(layer("zero3"), OVERLAP, slow=0.1)
    assert zero3.forward_ps == 12_000_000
    assert zero3.gather_forward_ps == 15_000_000 + 45_268_000 - 12_000_000


def test_what_the_profiled_reduction_took_more_than_its_message_comes_on_top_of_what_overlaps(cost):
    """300 us over two ranks, whose all_reduce takes 85.536 us alone: 214.464 us more, whatever it overlaps with."""
    rate = 300e-6 / 16384
    ddp = cost(layer("ddp"), OVERLAP, reduction_s_per_parameter=rate)
    assert (ddp.sync_ps, ddp.overlapped_ps, ddp.reduction_ps) == (25_660_800 + 214_464_000, 25_660_800, ALL_REDUCE)
    four = cost(layer("ddp", dp_size=4), reduction_s_per_parameter=rate)
    assert four.sync_ps == pytest.approx((20 + 65.536 * 1.5) * 1e6 + 214_464_000)
    assert cost(layer("ddp", dp_size=1), reduction_s_per_parameter=rate).sync_ps == 0


def test_collectives_of_zero_have_their_own_overhead_and_none_of_another_format(cost):
    """An all_reduce in the format of gradients says nothing of a gather in the format of the computation.

    Under ZeRO the probe's reduction took 163.84 us, 111.072 more than a reduce_scatter; its gather 81.92, 29.152 more.
    """
    kinds = ("zero2", "zero3")
    lone = [cost(layer(kind), OVERLAP) for kind in kinds]
    assert [cost(layer(kind), OVERLAP, reduction_s_per_parameter=1e-8) for kind in kinds] == lone
    zero2, zero3 = (cost(layer(kind), OVERLAP, zero_s_per_parameter=(1e-8, 5e-9)) for kind in kinds)
    assert zero3.gather_forward_ps == zero3.gather_backward_ps == 21_107_200 + 29_152_000
    assert (zero3.sync_ps, zero3.overlapped_ps, zero3.reduction_ps) == (17_589_333 + 111_072_000, 17_589_333, ONE_WAY)
    assert zero2.sync_ps == zero3.sync_ps + zero3.gather_forward_ps, "gathered once a step"
    assert cost(layer("ddp"), OVERLAP, zero_s_per_parameter=(1e-8, 5e-9)) == cost(layer("ddp"), OVERLAP)


def test_a_gather_that_is_longer_than_its_pass_is_not_made_short_by_a_probe_that_overlapped(cost):
    """A probe in which gathers and reductions went on beside longer passes, and so added next to nothing."""
    hidden = {"reduction_s_per_parameter": 1e-12, "zero_s_per_parameter": (1e-12, 1e-12)}
    zero3 = cost(layer("zero3"), OVERLAP, slow=0.1, **hidden)
    assert zero3.gather_forward_ps == 15_000_000 + 45_268_000 - 12_000_000
    assert zero3 == cost(layer("zero3"), OVERLAP, slow=0.1)


def test_replicas_of_shards_have_their_part_of_an_all_reduces_overhead(cost):
    """Two nodes of two ranks: half of the gradients are summed across nodes, with half of the 214.464 us."""
    strategy = layer("zero3", dp_size=4, shard_size=2)
    added = cost(strategy, nodes=2, reduction_s_per_parameter=300e-6 / 16384).sync_ps - cost(strategy, nodes=2).sync_ps
    assert added == 107_232_000


def test_reductions_after_every_microbatch_are_part_of_each(cost):
    for overlap, ddp, scatter in (((), ALL_REDUCE, ONE_WAY), (OVERLAP, 25_660_800, 17_589_333)):
        found = cost(layer("ddp"), overlap, EVERY)
        assert (found.sync_every_ps, found.sync_ps, found.reduction_ps, found.overlapped_ps) == (ddp, 0, 0, 0)
        zero2 = cost(layer("zero2"), overlap, EVERY)
        assert zero2.sync_every_ps == scatter and zero2.sync_ps > 0, "its gather is still once a step"
    assert cost(layer("ddp"), (), EVERY).microbatch_ps == 360_000_000 + ALL_REDUCE


def test_gradients_that_are_reduced_after_every_microbatch_are_held_in_shards(cost):
    assert cost(layer("zero2")).memory.gradients == 65536
    assert cost(layer("zero2"), (), EVERY).memory.gradients == 32768
    assert cost(layer("zero2"), microbatches=1).memory.gradients == 32768


def test_ulysses_reduces_over_all_ranks_of_the_stage(cost):
    """Four ranks, two by two: an all_reduce of 65536 bytes over four takes 20 + 1.5 x 65.536 us."""
    found = cost(layer("ddp", 2, 2, "ulysses"))
    assert found.sync_ps == 20_000_000 + 98_304_000
    assert cost(layer("ddp", 2, 2, "megatron")).sync_ps == 20_000_000 + 32_768_000
    assert cost(layer("zero3", 2, 2, "ulysses")).optimizer_ps == 49_152_000 // 4


def test_shard_groups_use_the_links_inside_a_node_and_their_replicas_those_between_nodes(cost):
    """Two nodes of two ranks: gathers as among two neighbours, then half of the gradients over 40 + 32.768 us."""
    zero3 = cost(layer("zero3", dp_size=4, shard_size=2), nodes=2)
    assert (zero3.gather_forward_ps, zero3.gather_backward_ps) == (ONE_WAY, ONE_WAY)
    assert zero3.sync_ps == ONE_WAY + 72_768_000
    assert cost(layer("zero3", dp_size=4), nodes=2).gather_forward_ps == 40_000_000 + 49_152_000, "over both nodes"
    assert (zero3.memory.parameters, zero3.optimizer_ps) == (65536 // 2, 49_152_000 // 2)
    zero2 = cost(layer("zero2", dp_size=4, shard_size=2), nodes=2)
    assert zero2.sync_ps == ONE_WAY + zero3.sync_ps, "gathered once a step"


def test_both_sums_of_replicated_shards_go_on_beside_the_backward_pass(cost):
    """Alone 52.768 + 72.768 us; the larger slowdowns of both: 125.536 us take 188.304, of which a third is lost."""
    zero3 = cost(layer("zero3", dp_size=4, shard_size=2), OVERLAP, nodes=2)
    assert zero3.reduction_ps == ONE_WAY + 72_768_000
    assert zero3.sync_ps == zero3.overlapped_ps == 62_768_000


def test_gradients_of_whole_parameters_are_summed_over_the_group_once_a_step(cost):
    """Four blocks' norms of 8192 bytes in one message of 20 us + 32.768 us, a quarter each.

    Where Megatron splits the sequence that is every whole parameter, elsewhere those inside a region.
    """
    norm, inner = Parameter(name="norm", shape=(2048,)), Parameter(name="inner", shape=(2048,), inside=True)
    share = 13_192_000

    def added(split: str, *parameters: Parameter) -> int:
        return cost(layer("ddp", 2, 1, split), parameters=parameters).sync_ps

    assert added("megatron") == 0
    assert added("megatron", norm) == added("megatron", inner) == added("none", inner) == share
    assert added("none", norm) == 0


def test_one_stage_holds_what_embedding_and_head_tie_once_where_the_runtime_does(make):
    """The head of a made-up model has the table of 256 x 64 parameters alone."""
    cluster = make.cluster(4)

    def head(tied: bool, held: Held, stages: int) -> LayerCost:
        model = make.model(tied=tied)
        costs = CostModel(model, cluster, make.profiles(model, cluster)._replace(held=held), Precision())
        turns = costs.turns(stages, 2, 1)
        return costs.layer("head", layer("ddp", tp_size=2, dp_size=1), StageTopology("n", (2,)), 1, False, turns)

    once = head(True, Held(ties=True), 1)
    assert once.state_bytes == once.optimizer_ps == once.memory.gradients == 0
    others = [head(True, Held(), 1), head(False, Held(ties=True), 1), head(True, Held(ties=True), 2)]
    assert {one.memory.parameters for one in others} == {4 * 256 * 64 // 2}
    assert once.forward_ps == others[0].forward_ps and once.activation_bytes == others[0].activation_bytes


def test_a_gather_that_ends_the_optimizer_s_step_overlaps_with_nothing(make):
    """Beside a forward pass a gather of 52.768 us adds 21.1072 to it."""
    model, cluster = make.model(), make.cluster(4)
    profiles = make.profiles(model, cluster, make.hardware(cluster, overlap=OVERLAP))

    def block(kind: str, alone: bool) -> LayerCost:
        costs = CostModel(model, cluster, profiles._replace(gathers_alone=alone), Precision())
        return costs.layer("block", layer(kind), StageTopology("n", (2,)), 2, False)

    assert block("zero2", True).sync_ps - block("zero2", False).sync_ps == ONE_WAY - 21_107_200
    assert block("zero3", True) == block("zero3", False) and block("ddp", True) == block("ddp", False)


@pytest.mark.parametrize(
    ("kind", "compute", "in_mxfp8", "itemsize"),
    [
        *(("zero2", "fp8", False, 1), ("zero2", "fp8", True, 2), ("zero3", "fp8", False, 1), ("zero3", "fp8", True, 1)),
        *(("zero2", "nvfp4", True, 9 / 16), ("zero3", "nvfp4", True, 9 / 16)),
    ],
)
def test_parameters_in_few_bits_are_gathered_in_them(make, kind, compute, in_mxfp8, itemsize):
    """But in MXFP8, whose two orders ZeRO-2 needs at once; norms, embedding and head stay in 16 bits."""
    model, cluster = make.model(), make.cluster(4)
    block, matrices = model.types["block"], model.types["block"].parameter_count(1)
    assert all(len(p.shape) > 1 for p in block.parameters)
    block = replace(block, parameters=(*block.parameters, Parameter(name="norm", shape=(64,))))
    model = replace(model, types=model.types | {"block": block})
    profiles = make.profiles(model, cluster)

    def costs(name: str, precision: str = compute, narrow_parameters: bool = True) -> LayerCost:
        given = profiles._replace(held=Held(narrow_parameters=narrow_parameters), in_mxfp8=in_mxfp8)
        model_costs = CostModel(model, cluster, given, Precision(compute=precision))
        return model_costs.layer(name, layer(kind), StageTopology("n", (2,)), 2, False)

    sixteen, few = costs("block", narrow_parameters=False), costs("block")
    spared_ps = (2 - itemsize) * matrices * 500
    gathered_ps = [one.sync_ps if kind == "zero2" else one.gather_forward_ps for one in (sixteen, few)]
    assert gathered_ps[0] - gathered_ps[1] == spared_ps
    assert few.memory == sixteen.memory
    assert costs("block", "bfloat16") == sixteen
    assert costs("head") == costs("head", narrow_parameters=False)


@pytest.mark.parametrize(("compute", "itemsize"), [("fp8", 1), ("nvfp4", 9 / 16)])
def test_replicas_in_few_bits_hold_both_orders_of_matrices_beside_16_bits(make, compute, itemsize):
    model, cluster = make.model(), make.cluster(4)
    profiles, matrices = make.profiles(model, cluster), model.types["block"].parameter_count(1)

    def held(name: str, narrow_parameters: bool, dp_size: int = 2) -> int:
        given = profiles._replace(held=Held(narrow_parameters=narrow_parameters))
        costs = CostModel(model, cluster, given, Precision(compute=compute))
        return costs.layer(
            name, layer("ddp", dp_size=dp_size), StageTopology("n", (dp_size,)), dp_size, False
        ).state_bytes

    assert held("block", True) - held("block", False) == 2 * itemsize * matrices
    assert held("block", True, dp_size=1) == held("block", False, dp_size=1)
    assert held("embedding", True) == held("embedding", False)
