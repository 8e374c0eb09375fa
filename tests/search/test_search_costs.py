"""Cost terms against numbers worked out by hand."""

from types import SimpleNamespace

import pytest

from shardwright_formats.errors import BadInput
from shardwright_formats.hardware_profile import Collective
from shardwright_formats.placement import Layout
from shardwright_formats.plan import Precision
from shardwright_formats.strategy import DataParallel, LayerStrategy, Strategy
from shardwright_search.costs import memory
from shardwright_search.costs.compute import layer_cost, optimizer_time_s
from shardwright_search.costs.table import Setting, element_cost, redistribution_cost, send_cost
from shardwright_search.costs.traffic import Duration, collective_time
from shardwright_search.profiles import LayerKey

BLOCK = LayerKey("block", 1, "none", "none", 32)
MIXED = Precision(parameters="float32", compute="bfloat16", reduce="float32")


def spread(kind: str, tp_size: int = 1, dp_size: int = 4) -> Strategy:
    return Strategy(tp_size=tp_size, dp_size=dp_size, data_parallel=DataParallel(kind))


@pytest.mark.parametrize(
    ("kind", "microbatches", "held", "moment"),
    [
        # 16384 parameters over 4 ranks: stored, gathered for compute, gradients, two moments; and while they last
        ("ddp", 1, (65536, 32768, 65536, 131072), (0, 0)),
        ("ddp", 2, (65536, 32768, 65536, 131072), (0, 0)),
        ("zero2", 1, (16384, 32768, 16384, 32768), (0, 65536)),
        ("zero2", 2, (16384, 32768, 65536, 32768), (0, 16384)),
        ("zero3", 1, (16384, 0, 16384, 32768), (32768, 65536)),
        ("zero3", 2, (16384, 0, 65536, 32768), (32768, 16384)),
    ],
)
def test_memory_terms_by_kind_of_data_parallelism(make, kind, microbatches, held, moment):
    block, strategy = make.model().types["block"], spread(kind)
    assert held == (
        memory.parameters_bytes(block, strategy, MIXED),
        memory.gathered_parameters_bytes(block, strategy, MIXED),
        memory.gradients_bytes(block, strategy, MIXED, microbatches),
        memory.optimizer_bytes(block, strategy, MIXED),
    )
    assert moment == (
        memory.transient_gather_bytes(block, strategy, MIXED),
        memory.transient_gradients_bytes(block, strategy, MIXED, microbatches),
    )


def test_replicated_layers_are_computed_as_they_are_stored_where_all_is_in_one_format(make):
    block = make.model().types["block"]
    assert memory.gathered_parameters_bytes(block, spread("ddp"), Precision()) == 0
    assert memory.gathered_parameters_bytes(block, spread("zero2"), Precision()) == 65536
    assert memory.gathered_parameters_bytes(block, spread("zero2", dp_size=1), Precision()) == 0


def test_a_shard_is_rounded_up_to_whole_rows(make):
    # 256 rows over 3 ranks: 86 rows of 64
    assert memory.parameters_bytes(make.model().types["block"], spread("zero3", dp_size=3), MIXED) == 4 * 86 * 64
    # tensor parallelism halves the rows first: 128 over 3 ranks are 43
    assert memory.parameters_bytes(make.model().types["block"], spread("zero3", 2, 3), MIXED) == 4 * 43 * 64


def test_largest_transient_counts_once_and_activations_for_each_microbatch_in_flight():
    assert memory.stage_memory_bytes(1000, [10, 20], [3, 4], 5, [7, 9, 2]) == 1000 + 30 + 35 + 9


def test_layer_time_is_interpolated_between_measured_samples(make):
    profiles = make.profiles(make.model(), make.cluster())
    exact, between = layer_cost(profiles, BLOCK, 4), layer_cost(profiles, BLOCK, 6)
    assert exact.forward_s == pytest.approx(4.2e-4) and exact.backward_s == pytest.approx(8.4e-4)
    assert between.forward_s == pytest.approx(6.2e-4) and between.warning is None
    assert between.activation_bytes == 120 * 6 * 32 * 64


def test_layer_time_outside_the_measured_range_is_extrapolated_with_a_warning(make):
    profiles = make.profiles(make.model(), make.cluster(), micro_batch_sizes=(2, 4))
    above, below = layer_cost(profiles, BLOCK, 8), layer_cost(profiles, BLOCK, 1)
    assert above.forward_s == pytest.approx(8.2e-4) and below.forward_s == pytest.approx(1.2e-4)
    assert above.warning is not None and "micro_batch_size 8, measured 2 to 4" in above.warning
    assert below.warning is not None


def test_one_measured_size_alone_cannot_be_extended(make):
    profiles = make.profiles(make.model(), make.cluster(), micro_batch_sizes=(2,))
    with pytest.raises(BadInput, match=r"^m\.h5: block .* micro_batch_size 4 cannot be extrapolated from \[2\]: add"):
        layer_cost(profiles, BLOCK, 4)


def test_a_missing_combination_is_named_with_its_remedy(make):
    profiles = make.profiles(make.model(), make.cluster(), tp_sizes=(1,))
    with pytest.raises(BadInput, match=r"^m\.h5: no point for block tp_size 2 sequence_parallel none .* probes again$"):
        layer_cost(profiles, BLOCK._replace(tp_size=2), 4)
    with pytest.raises(BadInput, match=r"^m\.h5: no states for block tp_size 2"):
        optimizer_time_s(profiles, "block", 2, 1)


def test_message_time_follows_the_measured_curve(make):
    profiles = make.profiles(make.model(), make.cluster())

    def taken(message_bytes: int) -> Duration:
        return collective_time(profiles, Collective.ALL_REDUCE, [(0, 1)], (0, 0), message_bytes)

    assert taken(1).time_s == pytest.approx(20e-6 + 1024e-9)  # constant below the smallest size
    assert taken(65536).time_s == pytest.approx(20e-6 + 65536e-9)
    assert taken(65536).warning is None
    assert taken(4 << 20).time_s == pytest.approx(20e-6 + (4 << 20) * 1e-9)  # bandwidth of the last segment
    assert "measured up to 1048576" in str(taken(4 << 20).warning)
    assert collective_time(profiles, Collective.ALL_REDUCE, [(0,), (1,)], (0, 0), 1 << 20).time_s == 0


def test_the_slowest_group_counts_and_a_group_may_cross_nodes(make):
    profiles = make.profiles(make.model(), make.cluster(4, nodes=2))
    nodes = (0, 0, 1, 1)
    inside = collective_time(profiles, Collective.ALL_GATHER, [(0, 1), (2, 3)], nodes, 1024)
    across = collective_time(profiles, Collective.ALL_GATHER, [(0, 2), (1, 3)], nodes, 1024)
    assert inside.time_s == pytest.approx(20e-6 + 512e-9)
    assert across.time_s == pytest.approx(40e-6 + 512e-9)


def test_a_group_that_was_not_measured_is_named(make):
    profiles = make.profiles(make.model(), make.cluster(2))
    with pytest.raises(BadInput, match=r"^h\.h5: no all_gather among 3 neighbouring ranks inside a node: measure"):
        collective_time(profiles, Collective.ALL_GATHER, [(0, 1, 2)], (0, 0, 0), 1024)


def setting(make: SimpleNamespace, devices: int = 2, microbatches: int = 1, samples: int = 2) -> Setting:
    model, cluster = make.model(), make.cluster(devices)
    return Setting(model, cluster, make.profiles(model, cluster), Precision(), samples, microbatches)


def test_what_a_profiled_reduction_took_beyond_its_message_comes_on_top_of_every_reduction(make):
    """A profiled reduction of 300 us whose all_reduce of 65536 bytes takes 20 + 65.536 us waited 214.464 us."""
    plain = setting(make)
    waited = plain._replace(
        profiles=make.profiles(plain.model, plain.cluster, reduction_s_per_parameter=300e-6 / 16384)
    )

    def sync_ps(which: Setting, ranks: tuple[int, ...], kind: str) -> int:
        strategy = LayerStrategy(tp_size=1, dp_size=len(ranks), data_parallel=DataParallel(kind), type="block")
        return element_cost(which, "block", strategy, ranks).gradient_sync_ps

    for kind in ("ddp", "zero2", "zero3"):
        assert sync_ps(waited, (0, 1), kind) - sync_ps(plain, (0, 1), kind) == pytest.approx(214_464_000)
    assert sync_ps(waited, (0,), "ddp") == 0, "one rank waits for none"


def test_data_parallel_traffic_by_kind(make):
    """65536 bytes of a block over 2 ranks: 20 us, and 1 ns a byte for all_reduce, half for the others."""
    costs = {
        kind: element_cost(
            setting(make),
            "block",
            LayerStrategy(tp_size=1, dp_size=2, data_parallel=DataParallel(kind), type="block"),
            (0, 1),
        )
        for kind in ("ddp", "zero2", "zero3")
    }
    one_way_ps = 20_000_000 + 32_768_000
    assert (costs["ddp"].gather_ps, costs["ddp"].gradient_sync_ps) == (0, 20_000_000 + 65_536_000)
    assert (costs["zero2"].gather_ps, costs["zero2"].gradient_sync_ps) == (0, 2 * one_way_ps)
    assert (costs["zero3"].gather_ps, costs["zero3"].gradient_sync_ps) == (one_way_ps, one_way_ps)
    assert costs["zero3"].microbatch_ps == 120_000_000 + 240_000_000 + 2 * one_way_ps
    assert costs["zero2"].optimizer_ps == 49_152_000 // 2 == costs["ddp"].optimizer_ps // 2


def test_redistribution_moves_only_what_a_rank_lacks(make):
    """From a sample each to copies of both: 8192 bytes are sent, half of a full all_to_all of 16384; back is free."""
    split, whole = Layout(2, 1, True, False), Layout(2, 2, True, False)
    there = redistribution_cost(setting(make), "block", split, whole, (0, 1))
    back = redistribution_cost(setting(make), "block", whole, split, (0, 1))
    assert (there.time_ps, back.time_ps) == (20_000_000 + 8_192_000, 0)
    assert redistribution_cost(setting(make), "block", split, split, (0, 1)).time_ps == 0


def test_a_stage_sends_its_ranks_own_rectangles(make):
    """One sample of 32 positions, 64 features, 4 bytes; half a nanosecond a byte."""
    layout = Layout(2, 1, True, False)
    assert send_cost(setting(make, 4), "block", layout, (0, 1), (2, 3)).time_ps == 20_000_000 + 4_096_000
    copies = Layout(2, 2, True, False)
    assert send_cost(setting(make, 4), "block", copies, (0, 1), (2, 3)).time_ps == 20_000_000 + 8_192_000
