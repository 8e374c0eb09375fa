"""Probes of a rank's share of positions, and their check of derived times, from measurements that were never made."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from shardwright.estimate.settings import ProfileSettings
from shardwright.io import BadInput
from shardwright.key import LayerKey
from shardwright.models.description import model_of_config
from shardwright.types import Attention, Cluster, Measurement, NodeGroup, NodeType, Plan, Recompute, SequenceParallel
from shardwright_profile.model.fit import fit_profile
from shardwright_profile.model.probes import Probes, make_probes

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
LENGTH = 64
CLUSTER = Cluster(
    name="c",
    nodes=(NodeGroup(node_type="n", count=1),),
    node_types={"n": NodeType(device="cpu", devices_per_node=2, memory_bytes=1 << 34)},
)
SETTINGS = ProfileSettings(
    tp_sizes=(1,), sequence_parallel=(SequenceParallel.NONE,), recompute=(Recompute.NONE,), micro_batch_sizes=(1, 4),
    sequence_lengths=(16, 32), cp_sizes=(4, 2),
)  # fmt: skip
SLOWER = {1: 1.0, 2: 1.25, 4: 1.5}
"""How much longer a layer takes than derived, by cp_size."""


def models(lengths=(LENGTH, 16, 32), **changes):
    return [model_of_config(CONFIG | changes, "m", length, "config.json") for length in lengths]


def probes_of(settings=SETTINGS, **changes) -> Probes:
    return make_probes(models(**changes), CLUSTER, "n", settings)


def layer_s(samples: int, length: int, cp_size: int) -> float:
    return SLOWER[cp_size] * (1e-3 + samples * (1e-4 * length + 2e-6 * length**2 * cp_size))


@pytest.fixture(scope="module")
def made() -> Probes:
    return probes_of()


@pytest.fixture(scope="module")
def measurement(made, make_measurement, make_constants) -> Measurement:
    """A world without noise: two ranks whose layers take `layer_s`, and twice that backward."""
    asked = {probe.plan: probe.cp_size for probe in made.context}
    usual = make_measurement(made.plans, make_constants())
    return replace(usual, plans=tuple(timed(one, asked.get(place)) for place, one in enumerate(usual.plans)))


def timed(measured, cp_size):
    plan: Plan = measured.plan
    samples = plan.microbatch_samples // 2
    time_s = 1e-2 + len(plan.layers) * layer_s(samples, plan.model.sequence_length, cp_size or 1)
    ranks = tuple(
        replace(
            rank,
            segments=tuple(
                replace(each, forward_s=(time_s,) * 3, backward_s=(2 * time_s,) * 3) if each.name == "layers" else each
                for each in rank.segments
            ),
        )
        for rank in measured.ranks
    )
    return replace(measured, ranks=ranks) if cp_size is None else replace(measured, ranks=ranks, cp_size=cp_size)


def test_a_cp_size_adds_probes_of_a_share_which_are_stepped_in_turns(made) -> None:
    shares = [(made.plans[probe.plan], probe.cp_size) for probe in made.context]
    assert [(plan.model.sequence_length, len(plan.layers), cp_size) for plan, cp_size in shares] == [
        (32, 1, 2), (32, 3, 2), (16, 1, 4), (16, 3, 4)
    ]  # fmt: skip
    assert {(plan.microbatch_samples, plan.layers[0].recompute) for plan, _ in shares} == {(2, Recompute.NONE)}
    assert {plan.name.rpartition(" keys of ")[2] for plan, _ in shares} == {"2 ranks", "4 ranks"}
    assert {turns for turns in made.in_turns if turns[0] >= made.context[0].plan} == {
        (made.context[0].plan, made.context[1].plan), (made.context[2].plan, made.context[3].plan)
    }  # fmt: skip
    assert made.document.context == made.context
    assert len(made.plans) == len(probes_of(replace(SETTINGS, cp_sizes=())).plans) + 4


def test_a_profile_says_what_a_share_takes_over_what_is_derived(made, measurement) -> None:
    profile = fit_profile([(Path("m.json"), measurement)])
    rows = {row.cp_size: row for row in profile.context.rows}
    assert {size: (row.type, row.micro_batch_size, row.sequence_length) for size, row in rows.items()} == {
        2: ("block", 1, LENGTH), 4: ("block", 1, LENGTH)
    }  # fmt: skip
    for size, row in rows.items():
        assert row.forward_s == pytest.approx(layer_s(1, LENGTH // size, size))
        assert row.backward_s == pytest.approx(2 * row.forward_s)
        assert (row.forward_ratio, row.backward_ratio) == pytest.approx((SLOWER[size], SLOWER[size]))
        assert row.corrections == (row.forward_ratio, row.backward_ratio)
    note = "block of a share of 64 tokens on 4 ranks was measured to take 1.5 times the derived forward time"
    assert note in profile.provenance.notes
    plain = replace(measurement, plans=tuple(one for one in measurement.plans if not one.cp_size))
    other = fit_profile([(Path("m.json"), plain)])
    assert other.layers.rows == profile.layers.rows, "they are in no other figure"
    assert (other.states.rows, other.fits.rows, len(other.context)) == (profile.states.rows, profile.fits.rows, 0)


def test_two_standard_errors_explain_a_ratio(measurement) -> None:
    (row, *_) = fit_profile([(Path("m.json"), measurement)]).context.rows
    assert row.forward_ratio == pytest.approx(1.25)
    noisy = replace(row, forward_error_s=0.11 * row.forward_s, backward_error_s=0.05 * row.backward_s)
    assert noisy.corrections == (1.0, row.backward_ratio)


def test_points_that_determine_no_curve_over_lengths_are_asked_for(measurement) -> None:
    one_size = tuple(one for one in measurement.plans if one.plan.microbatch_samples == 2)
    with pytest.raises(
        BadInput, match=r"m.json: the points of block .* determine no curve over lengths, which '.* keys"
    ):
        fit_profile([(Path("m.json"), replace(measurement, plans=one_size[:4] + one_size[-4:]))])


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"cp_sizes": (3,)}, "2 x cp_size 3 does not divide the sequence length 64"),
        ({"cp_sizes": (8,)}, "cp_sizes: 8 leaves a rank 8 of 64 tokens, which are not measured: add 8 to sequence_l"),
    ],
)
def test_shares_of_lengths_that_are_not_measured_are_refused(changed, problem) -> None:
    with pytest.raises(BadInput, match=f"--settings: {problem}"):
        probes_of(replace(SETTINGS, **changed))


@pytest.mark.parametrize(
    ("settings", "changes", "problem"),
    [
        ({"compile": True}, {}, "blocks that attend to positions of other ranks (cp_size) are not compiled"),
        (
            {},
            {"attention_dropout": 0.1},
            "cp_size above 1 drops nothing inside attention, for which attention_dropout has a rate",
        ),
        ({"attention": Attention.EAGER}, {}, "context ring computes only with the kernels of sdpa"),
        ({}, {"model_type": "mistral", "sliding_window": 8}, "context ring does not support windows"),
    ],
)
def test_models_that_cannot_be_probed_so_are_left_out_with_the_reason(settings, changes, problem) -> None:
    made = probes_of(replace(SETTINGS, **settings), **changes)
    assert made.context == ()
    assert [line for line in made.left_out if line.startswith("cp_size 2: ") and problem in line]


def test_keys_of_layers_are_those_of_whole_samples_alone(measurement) -> None:
    profile = fit_profile([(Path("m.json"), measurement)])
    lengths = {row.sequence_length for row in profile.layers.rows}
    assert lengths == {16, 32, 64}
    keys = [LayerKey.from_fields(row) for row in profile.layers.rows]
    assert len(set(keys)) == len(keys)
