"""Prices of layers whose ranks share positions out, against the formulas, by hand."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from made_up import make_cluster, make_hardware
from msgspec.structs import replace

from shardwright.estimate.curves import fits_table
from shardwright.io import BadInput
from shardwright.io.hdf5 import Provenance
from shardwright.io.table import Source, Sourced
from shardwright.key import LayerKey
from shardwright.models.description import model_of_config
from shardwright.types import (
    Cluster,
    ContextParallel,
    DataParallel,
    LayerStrategy,
    Precision,
    Recompute,
    SequenceParallel,
)
from shardwright.types.hardware_profile import Collective
from shardwright.types.model_profile import ContextRow, LayerFigures, LayerRow, ModelProfile, ProfileOrigin
from shardwright_profile.importers.documents import profile_of, state_row
from shardwright_search.cost_model.collectives import exchange_time, send_kind_time, stage_topology
from shardwright_search.cost_model.layer import CostModel, LayerCost
from shardwright_search.cost_model.profiles import index_profiles
from shardwright_search.cost_model.time_model import TimeModel

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
LENGTH = 64
MODEL = model_of_config(CONFIG, "m", LENGTH, "config.json")
CONSTANT, LINEAR, QUADRATIC = 2e-3, 1e-4, 2e-6
"""Seconds of a forward pass: once, for a position, and for a pair of them; backward twice that, bytes a million."""
NUMEL = 2 * LENGTH * 4 * 4
"""Keys and values of a sample: 4 heads of 4 features."""
SUMS = 4 * LENGTH * 32 // 4
"""Bytes of the merged output of a rank of four, in float32."""
RING, GATHER = ContextParallel.RING, ContextParallel.GATHER


def seconds(samples: int, positions: float, pairs: float) -> float:
    return CONSTANT + samples * (LINEAR * positions + QUADRATIC * pairs)


def rows_of(lengths: Sequence[int], slow: float = 1.0, tp_sizes: Sequence[int] = (1,)) -> list[LayerRow]:
    """Points on the curve; those of shorter lengths than the model's take `slow` more for each position."""
    rows = []
    for length in lengths:
        for samples in (1, 2, 4):
            factor = slow if length < LENGTH else 1.0
            time_s = seconds(samples, factor * length, length**2)
            kept = 1e6 * seconds(samples, length, length**2)
            values = (time_s, 2 * time_s, kept, 100.0 * samples * length)
            figures = LayerFigures(*(Sourced(value, Source.MEASURED) for value in values))
            for tp_size in tp_sizes:
                for recompute in (Recompute.NONE, Recompute.FULL):
                    for split in (SequenceParallel.NONE,) if tp_size == 1 else SequenceParallel:
                        columns = {"tp_size": tp_size, "sequence_parallel": split, "recompute": recompute}
                        key = LayerKey(type="block", micro_batch_size=samples, sequence_length=length, **columns)
                        rows.append(LayerRow.from_figures(key, figures))
    return rows


def costs_of(
    rows: Sequence[LayerRow], cluster: Cluster, overlap: Sequence[tuple] = (), time_model: TimeModel | None = None
) -> CostModel:
    origin = ProfileOrigin(
        model="m", architecture_sha256="0", device="cpu", backend="gloo", precision="p", attention="a"
    )
    states = [state_row("block", tp_size, Sourced(4.0, Source.MEASURED)) for tp_size in (1, 2)]
    profile: ModelProfile = profile_of(origin, Provenance(date="", versions=""), rows, states)
    # Curves of the true coefficients, whatever single points are.
    exact = rows_of((LENGTH // 2, LENGTH, 2 * LENGTH), tp_sizes=(1, 2))
    profile = ModelProfile(
        origin=origin,
        provenance=profile.provenance,
        layers=profile.layers,
        states=profile.states,
        process=profile.process,
        fits=fits_table(exact) if {row.sequence_length for row in rows} != {LENGTH} else profile.fits,
    )
    hardware = make_hardware(cluster, overlap=overlap)
    profiles = index_profiles(hardware, Path("h.h5"), profile, Path("m.h5"))
    return CostModel(MODEL, cluster, profiles, Precision(), time_model=time_model or TimeModel.INTERPOLATE)


def layer_of(costs: CostModel, cp_size: int, samples: int = 2, **fields: object) -> LayerCost:
    """The cost of a block with samples on all ranks."""
    tp_size = int(fields.pop("tp_size", 1))  # type: ignore[call-overload]
    ranks = costs.cluster.num_devices
    strategy = LayerStrategy(
        type="block",
        tp_size=tp_size,
        cp_size=cp_size,
        dp_size=ranks // cp_size // tp_size,
        **fields,  # type: ignore[arg-type]
    )
    return costs.layer("block", strategy, stage_topology(costs.cluster, range(ranks)), samples, False)


def sent_s(num_bytes: float, ranks: int, across: bool = False) -> float:
    return 20e-6 * (1 + across) + num_bytes * (ranks - 1) / ranks / 1e9


GATHERED_S = (sent_s(2 * 4 * NUMEL, 4), 2 * sent_s(2 * 4 * NUMEL, 4))
"""Of two samples in float32: gathered once forward, and backward again, and gradients scattered."""


@pytest.mark.parametrize("time_model", [TimeModel.INTERPOLATE, TimeModel.SEQUENCE])
def test_without_points_of_a_share_the_curve_over_lengths_is_the_price(time_model: TimeModel) -> None:
    costs = costs_of(rows_of((LENGTH, 2 * LENGTH)), make_cluster(4), time_model=time_model)
    layer, time_s = layer_of(costs, 4), seconds(2, LENGTH / 4, LENGTH**2 / 4)
    assert layer.forward_ps * 1e-12 == pytest.approx(time_s + GATHERED_S[0])
    assert layer.backward_ps * 1e-12 == pytest.approx(2 * time_s + GATHERED_S[1])
    assert layer.activation_bytes == pytest.approx(1e6 * time_s, abs=2)
    assert "derived: block of cp_size 4: from the curve over lengths" in layer.warnings[0]


def test_points_of_a_share_say_what_all_but_attention_to_others_costs() -> None:
    costs = costs_of(rows_of((LENGTH // 4, LENGTH), slow=3.0), make_cluster(4))
    layer = layer_of(costs, 4)
    time_s = seconds(2, 3.0 * LENGTH / 4, LENGTH**2 / 4)
    assert layer.forward_ps * 1e-12 == pytest.approx(time_s + GATHERED_S[0])
    assert layer.warnings == ("derived: block of cp_size 4: from points of sequence_length 16",)


def context_row(cp_size: int, ratios: tuple[float, float], error: float = 0.0) -> ContextRow:
    """A probe of a share: so many times as long as derived."""
    return ContextRow(
        type="block", cp_size=cp_size, micro_batch_size=1, sequence_length=LENGTH, forward_s=1.0, forward_error_s=error,
        backward_s=1.0, backward_error_s=error, source=Source.MEASURED, forward_ratio=ratios[0],
        backward_ratio=ratios[1],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("probed", "factors"),
    [
        ([(4, (1.25, 1.5))], (1.25, 1.5)),
        ([(2, (1.25, 1.5))], (1.25, 1.5)),
        ([(2, (3.0, 3.0)), (8, (0.75, 1.1))], (3.0, 3.0)),
        ([(2, (3.0, 3.0)), (4, (1.25, 1.5)), (8, (5.0, 5.0))], (1.25, 1.5)),
        ([(4, (1.1, 1.5), 0.06)], (1.0, 1.5)),
    ],
)
def test_derived_times_are_corrected_by_the_probe_of_the_nearest_cp_size(
    probed: list[tuple], factors: tuple[float, float]
) -> None:
    """Of two as near the smaller; what two standard errors explain corrects nothing. Messages stay as they are."""
    costs = costs_of(rows_of((LENGTH, 2 * LENGTH)), make_cluster(4))
    rows = tuple(context_row(*each) for each in probed)
    costs = replace(costs, profiles=costs.profiles._replace(context=rows))
    layer, time_s = layer_of(costs, 4), seconds(2, LENGTH / 4, LENGTH**2 / 4)
    assert layer.forward_ps * 1e-12 == pytest.approx(factors[0] * time_s + GATHERED_S[0])
    assert layer.backward_ps * 1e-12 == pytest.approx(factors[1] * 2 * time_s + GATHERED_S[1])
    nearest = 4 if any(row.cp_size == 4 for row in rows) else 2
    said = f"times {factors[0]:.3g} forward and {factors[1]:.3g} backward as probed at {nearest}"
    assert layer.warnings[0].endswith(said)
    whole = layer_of(costs, 1, samples=8)
    assert whole.forward_ps * 1e-12 == pytest.approx(seconds(2, LENGTH, LENGTH**2))
    ring = layer_of(costs, 4, context=RING)
    assert ring.forward_ps * 1e-12 == pytest.approx(factors[0] * time_s + 3 * ROUND_S)


def test_without_a_curve_over_lengths_two_are_asked_for() -> None:
    with pytest.raises(BadInput, match=r"m\.h5: no curve over lengths of block.*: profile the model at two s"):
        layer_of(costs_of(rows_of((LENGTH,)), make_cluster(4)), 4)


def test_one_rank_that_has_all_positions_needs_no_curve() -> None:
    layer = layer_of(costs_of(rows_of((LENGTH,)), make_cluster(4)), 1, samples=8)
    assert layer.forward_ps * 1e-12 == pytest.approx(seconds(2, LENGTH, LENGTH**2))
    assert layer.warnings == ()


FASTER = 1e9
"""Bytes a second."""
ROUND_S = 20e-6 + 2 * 4 * NUMEL / 4 / 2 / FASTER
"""A send of keys and values of two samples and a quarter of the positions, at half the bytes a second."""


def test_a_ring_that_overlaps_with_nothing_adds_each_send() -> None:
    layer = layer_of(costs_of(rows_of((LENGTH, 2 * LENGTH)), make_cluster(4)), 4, context=RING)
    time_s, both_s = seconds(2, LENGTH / 4, LENGTH**2 / 4), 2 * ROUND_S - 20e-6
    assert layer.forward_ps * 1e-12 == pytest.approx(time_s + 3 * ROUND_S)
    assert layer.backward_ps * 1e-12 == pytest.approx(2 * time_s + 3 * both_s + ROUND_S)


@pytest.mark.parametrize(("recompute", "again"), [(Recompute.NONE, 0), (Recompute.FULL, 1)])
@pytest.mark.parametrize("slow", [1.0, 1.25])
def test_sends_of_a_ring_hide_behind_blocks_but_the_way_home(slow: float, recompute: Recompute, again: int) -> None:
    """A block is longer than a send: what it adds is what it slows the block by while it lasts."""
    overlap = [(Collective.P2P, 2, slow, 1.0)]
    costs = costs_of(rows_of((LENGTH, 2 * LENGTH)), make_cluster(4), overlap)
    layer = layer_of(costs, 4, context=RING, recompute=recompute)
    time_s, both_s = seconds(2, LENGTH / 4, LENGTH**2 / 4), 2 * ROUND_S - 20e-6
    assert QUADRATIC * 2 * LENGTH**2 / 16 > 10 * both_s
    added = 1 - 1 / slow
    assert layer.forward_ps * 1e-12 == pytest.approx(time_s + 3 * added * ROUND_S)
    backward_s = 3 * added * both_s + ROUND_S + again * 3 * added * ROUND_S
    assert layer.backward_ps * 1e-12 == pytest.approx(2 * time_s + backward_s)


def test_a_step_of_a_ring_takes_as_long_as_messages_both_ways_were_measured_to() -> None:
    """A message each way takes 1.5 times one way at 32 KiB, and 2 times at 1 MiB; overlap slows neither."""
    sizes = {1 << 15: 1.5, 1 << 20: 2.0}
    overlap = [
        (Collective.P2P, 2, 1.0, 1.0, 2, size, factor * (20e-6 + size / 2 / FASTER)) for size, factor in sizes.items()
    ]
    overlap += [(Collective.ALL_REDUCE, 2, 9.0, 9.0, 2, 1 << 15, 1.0)]
    costs = costs_of(rows_of((LENGTH, 2 * LENGTH)), make_cluster(4), overlap)
    for num_bytes, factor in {1 << 10: 1.5, 1 << 15: 1.5, int(2**17.5): 1.75, 1 << 21: 2.0}.items():
        one_way_s = send_kind_time(costs.profiles, True, False, num_bytes).time_s
        assert exchange_time(costs.profiles, True, False, num_bytes).time_s == pytest.approx(factor * one_way_s)
    time_s, home_s = seconds(2, LENGTH / 4, LENGTH**2 / 4), 1.5 * ROUND_S
    layer = layer_of(costs, 4, context=RING)
    assert layer.forward_ps * 1e-12 == pytest.approx(time_s)
    assert layer.backward_ps * 1e-12 == pytest.approx(2 * time_s + home_s)
    across = exchange_time(costs.profiles, True, True, 1 << 15).time_s
    assert across == send_kind_time(costs.profiles, True, True, 1 << 15).time_s, "not measured across nodes"


def test_a_ring_across_nodes_sends_at_their_rate() -> None:
    inside, across = (
        layer_of(costs_of(rows_of((LENGTH, 2 * LENGTH)), make_cluster(4, nodes)), 4, context=RING) for nodes in (1, 2)
    )
    assert across.forward_ps - inside.forward_ps == pytest.approx(3 * 20e-6 * 1e12)


@pytest.mark.parametrize("context", ContextParallel)
@pytest.mark.parametrize("split", [None, *SequenceParallel])
def test_ranks_of_a_region_are_priced_beside_those_that_share_positions(
    split: SequenceParallel | None, context: ContextParallel
) -> None:
    """Messages of tensor parallelism are inside the points; whatever its kind, two ranks have half of the heads."""
    tp_size, fields = (1, {}) if split is None else (2, {"sequence_parallel": split})
    rows, cluster = rows_of((LENGTH, 2 * LENGTH), tp_sizes=(1, 2)), make_cluster(4)
    layer = layer_of(costs_of(rows, cluster), 2, tp_size=tp_size, samples=4 // tp_size, context=context, **fields)
    time_s, size = seconds(2, LENGTH / 2, LENGTH**2 / 2), 2 * 4 * NUMEL / tp_size
    # In a ring of two each sends half of that, once forward; twice backward with gradients, which then go home.
    ring = (20e-6 + size / 4 / FASTER, 2 * 20e-6 + 3 * size / 4 / FASTER)
    added = (sent_s(size, 2), 2 * sent_s(size, 2)) if context is GATHER else ring
    assert layer.forward_ps * 1e-12 == pytest.approx(time_s + added[0])
    assert layer.backward_ps * 1e-12 == pytest.approx(2 * time_s + added[1])
    # Gathered: keys, values and their gradients of all ranks; in a ring two and three times those of one. Sums: output.
    buffers = 4 * 4 * (NUMEL / tp_size) if context is GATHER else 5 * 4 * (NUMEL / tp_size) / 2
    sums = 4 * LENGTH * 32 / 2 / tp_size
    assert layer.workspace_bytes == 100 * 2 * LENGTH // 2 + 2 * (buffers + sums)


@pytest.mark.parametrize("kind", [DataParallel.ZERO2, DataParallel.ZERO3])
@pytest.mark.parametrize("split", [SequenceParallel.NONE, SequenceParallel.MEGATRON, SequenceParallel.ULYSSES])
def test_states_are_shared_out_among_ranks_that_share_positions_out_as_among_those_with_samples(
    kind: DataParallel, split: SequenceParallel
) -> None:
    """On eight ranks dp 4 x cp 1, dp 2 x cp 2 and dp 1 x cp 4 gather, reduce and keep the same."""
    costs = costs_of(rows_of((LENGTH, 2 * LENGTH), tp_sizes=(1, 2)), make_cluster(8))
    by_size = [
        layer_of(costs, cp_size, samples=4, tp_size=2, sequence_parallel=split, data_parallel=kind)
        for cp_size in (1, 2, 4)
    ]
    assert len({layer.memory for layer in by_size}) == 1
    assert len({(layer.gather, layer.reduction_ps, layer.optimizer_ps) for layer in by_size}) == 1
    assert by_size[0].reduction_ps > 0
    assert (by_size[0].gather.alone_ps > 0) == (kind is DataParallel.ZERO3)
    shards = 8 if split is SequenceParallel.ULYSSES else 4
    count = MODEL.types["block"].parameter_count(1 if split is SequenceParallel.ULYSSES else 2)
    assert by_size[2].memory.parameters == pytest.approx(4 * count / shards, rel=0.02)


def test_memory_of_both_kinds_is_by_the_formulas() -> None:
    costs = costs_of(rows_of((LENGTH // 4, LENGTH)), make_cluster(4))
    gather, ring = (layer_of(costs, 4, context=kind) for kind in (GATHER, RING))
    assert gather.activation_bytes == ring.activation_bytes
    at_rest = 100 * 2 * LENGTH // 4
    assert gather.workspace_bytes == at_rest + 2 * (4 * NUMEL * 4 + SUMS)
    assert ring.workspace_bytes == at_rest + 2 * (5 * NUMEL // 4 * 4 + SUMS)
