"""The two parts of layers with experts, from measurements that were never made: what was put in comes out."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec import UNSET

from shardwright.estimate.expert_profile import expert_keys
from shardwright.estimate.settings import ProfileSettings
from shardwright.io import BadInput
from shardwright.io.table import Source, Sourced
from shardwright.key import LayerKey
from shardwright.models.description import model_of_config
from shardwright.types import (
    RECOMPUTE_WHOLE,
    Cluster,
    ExpertMeasurement,
    NodeGroup,
    NodeType,
    Recompute,
    SequenceParallel,
    Strategy,
)
from shardwright.types.model_profile import LayerFigures, LayerRow
from shardwright_profile.model.layers import fit_experts
from shardwright_profile.model.probes import is_apart, make_probes

CONFIG = {
    "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
LENGTH = 16
MODEL = model_of_config(CONFIG, "m", LENGTH, "config.json")
CLUSTER = Cluster(
    name="c",
    nodes=(NodeGroup(node_type="n", count=1),),
    node_types={"n": NodeType(device="cpu", devices_per_node=2, memory_bytes=1 << 34)},
)
NONE, FULL = Recompute.NONE, Recompute.FULL
KEPT = (NONE, Recompute.ATTENTION, Recompute.ATTENTION_NORMS)
REPLAYED = (FULL, Recompute.MLP, Recompute.MLP_NORMS_LATENTS)
"""Kinds that keep what experts do, and that repeat it."""
SETTINGS = ProfileSettings(
    tp_sizes=(1, 2), sequence_parallel=(SequenceParallel.MEGATRON,), recompute=tuple(RECOMPUTE_WHOLE),
    micro_batch_sizes=(2, 4),
)  # fmt: skip
REFERENCE_S, SLOW = 0.5, 2.0


def experts_s(rows, number, etp_size):
    """Forward time of experts: their matrices, then rows of a part of their features."""
    return 1e-3 * number + 1e-5 * rows / etp_size


def measured(probe) -> ExpertMeasurement:
    """A probe on a machine that is slow meanwhile; twice as long backward, and once more where all is repeated."""
    forward_s = SLOW * experts_s(probe.rows, probe.experts, probe.etp_size)
    replays = {NONE: 2, FULL: 3}.get(probe.recompute, 2.5)
    kept, again = (0, 100 * probe.rows) if probe.recompute is FULL else (100 * probe.rows, 0)
    return ExpertMeasurement(
        probe=probe, forward_s=(forward_s,) * 3, backward_s=(replays * forward_s,) * 3, activation_bytes=kept,
        workspace_bytes=50 * probe.rows + again, reference_s=SLOW * REFERENCE_S,
    )  # fmt: skip


def whole(recompute, tp_size=1, samples=2) -> LayerRow:
    """A layer that takes 7 ms a sample beside its experts, and twice that backward; all experts are the rank's."""
    rows = samples * LENGTH * 2 // tp_size
    inside, rest = experts_s(rows, 4, 1), 7e-3 * samples
    replays = 3 if recompute in REPLAYED else 2
    kept = 30 * rows + 100 * rows * (recompute in KEPT)
    split = SequenceParallel.MEGATRON if tp_size > 1 else SequenceParallel.NONE
    key = LayerKey(
        type="sparse", tp_size=tp_size, sequence_parallel=split, recompute=recompute, micro_batch_size=samples,
        sequence_length=LENGTH,
    )  # fmt: skip
    times = inside + rest, replays * inside + 2 * rest
    values = (*times, kept, 60 * rows + 100 * rows * (recompute in REPLAYED))
    return LayerRow.from_figures(key, LayerFigures(*(Sourced(value, Source.MEASURED) for value in values)))


@pytest.fixture(scope="module")
def probes():
    return make_probes([MODEL], CLUSTER, "n", SETTINGS)


def fitted(probes, *rows, apart=()):
    document = SimpleNamespace(experts=tuple(map(measured, probes.experts)))
    probe = SimpleNamespace(plan=SimpleNamespace(model=MODEL), reference_s=REFERENCE_S)
    return fit_experts([(Path("m.json"), document)], probe, rows, apart)


def test_experts_are_asked_for_in_any_number_and_part(probes):
    asked = {(probe.experts, probe.etp_size, probe.recompute) for probe in probes.experts}
    kinds = (NONE, FULL, Recompute.SELECTIVE)
    assert asked == {(number, etp, kind) for number in (1, 2, 4) for etp in (1, 2) for kind in kinds}
    rows = sorted({probe.rows for probe in probes.experts if probe.etp_size == 1})
    assert (len(rows), rows[0], rows[-1]) == (3, 2 * LENGTH * 2 // 2, 2 * 4 * LENGTH * 2)
    assert probes.document.experts == probes.experts


def test_layers_are_asked_for_whose_ranks_have_all_experts(probes):
    apart = [plan for plan in probes.plans if is_apart(plan)]
    assert {(plan.layers[0].tp_size, plan.layers[0].experts.ep_size) for plan in apart} == {(2, 1)}
    places = {place for place, plan in enumerate(probes.plans) if is_apart(plan)}
    assert all(places.issuperset(group) or not places & set(group) for group in probes.in_turns)


def test_experts_and_what_is_left_are_what_was_put_in(probes):
    kinds = (*KEPT, *REPLAYED)
    rows = [whole(kind, samples=samples) for kind in kinds for samples in (2, 4)]
    experts, rests = fitted(probes, *rows, apart=[whole(kind, 2) for kind in kinds])
    for row in experts:
        forward_s = experts_s(row.rows, row.experts, row.etp_size)
        assert row.forward_s == pytest.approx(forward_s)
        assert row.backward_s == pytest.approx((3 if row.recompute in REPLAYED else 2) * forward_s)
    assert {row.recompute for row in experts} == set(kinds)
    for row in rests:
        samples, positions = row.micro_batch_size, row.micro_batch_size * LENGTH // row.tp_size
        assert (row.forward_s, row.backward_s) == pytest.approx((7e-3 * samples, 14e-3 * samples))
        assert (row.activation_bytes, row.workspace_bytes) == (30 * 2 * positions, 60 * 2 * positions)
        assert row.forward_source is Source.DERIVED
    assert {(row.tp_size, row.recompute) for row in rests} == {(tp_size, kind) for tp_size in (1, 2) for kind in kinds}


def test_whole_layers_of_several_ranks_leave_nothing(probes):
    """Their ranks have a share of the features of all experts, for the positions of all."""
    _, rests = fitted(probes, whole(NONE), whole(NONE, 2))
    assert [row.tp_size for row in rests] == [1]


def test_experts_that_noise_makes_longer_than_the_layer_leave_a_hundredth(probes):
    row = whole(NONE)
    short = LayerRow.from_figures(row.key, row.figures._replace(forward_s=Sourced(1e-6, Source.MEASURED)))
    _, (rest,) = fitted(probes, short)
    assert rest.forward_s == pytest.approx(1e-8)


def test_no_experts_are_fitted_where_none_were_measured(probes):
    document = SimpleNamespace(experts=UNSET)
    assert fit_experts([(Path("m.json"), document)], None, [whole(NONE)], []) == ([], [])


def test_experts_measured_twice_are_refused(probes):
    document = SimpleNamespace(experts=tuple(map(measured, probes.experts[:2] + probes.experts[:1])))
    with pytest.raises(BadInput, match=r"m.json: 1 experts of sparse etp_size 1 recompute none were measured twice"):
        fit_experts([(Path("m.json"), document)], None, [whole(NONE)], [])


def test_points_of_experts_end_where_a_file_can_tell_no_more_rows():
    """A large batch of a model that computes each position many times, in one micro-batch."""
    strategy = Strategy(tp_size=1, dp_size=1)
    settings = msgspec.structs.replace(SETTINGS, tp_sizes=(1,), recompute=(NONE,), micro_batch_sizes=(1, 2**28))
    rows = [key.rows for key in expert_keys([MODEL], [strategy], settings, (NONE,))]
    assert max(rows) == 2**31 - 1 and min(rows) == LENGTH * 2
