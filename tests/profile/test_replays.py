"""Kinds of recomputation share a forward time, and no replay is free because noise says so."""

from pathlib import Path

import msgspec
import pytest

from shardwright.io.table import Source
from shardwright.types import Measurement, RankMeasurement, Recompute
from shardwright.types.model_profile import LayerRow, ModelProfile
from shardwright_profile.model.fit import fit_profile


def _with_times(measured: Measurement, forward: float, backward: float) -> Measurement:
    """The same, in even repeats, with times of the layers under full recomputation that are so many times as long."""

    def rank(one: RankMeasurement, by: dict[str, float]) -> RankMeasurement:
        segments = tuple(
            msgspec.structs.replace(
                segment,
                forward_s=(segment.forward_s[1] * (by["forward"] if segment.name == "layers" else 1),) * 3,
                backward_s=(segment.backward_s[1] * (by["backward"] if segment.name == "layers" else 1),) * 3,
            )
            for segment in one.segments
        )
        return msgspec.structs.replace(one, segments=segments)

    plain, changed = {"forward": 1.0, "backward": 1.0}, {"forward": forward, "backward": backward}
    return msgspec.structs.replace(
        measured,
        plans=tuple(
            msgspec.structs.replace(
                plan,
                ranks=tuple(
                    rank(one, changed if plan.plan.layers[0].recompute is Recompute.FULL else plain)
                    for one in plan.ranks
                ),
            )
            for plan in measured.plans
        ),
    )


def _by_kind(profile: ModelProfile) -> dict[Recompute, LayerRow]:
    return {
        row.recompute: row
        for row in profile.layers.rows
        if row.type == "block" and row.tp_size == row.micro_batch_size == 1
    }


@pytest.fixture
def fitted(plans, make_measurement, make_constants):
    """The profile of probes whose times of full recomputation are changed by a factor."""

    def made(forward=1.0, backward=1.0):
        measured = make_measurement(plans, make_constants(overhead_s=0.0))
        return fit_profile([(Path("m.json"), _with_times(measured, forward, backward))])

    return made


def test_all_kinds_of_recomputation_have_one_forward_time(fitted):
    rows = _by_kind(fitted(forward=0.8))
    assert rows[Recompute.FULL].forward_s == rows[Recompute.NONE].forward_s == pytest.approx(0.9 * 2e-3)
    assert rows[Recompute.FULL].forward_source is Source.MEASURED


def test_a_replay_that_was_measured_is_kept(fitted):
    rows = _by_kind(fitted(backward=0.9))
    assert rows[Recompute.FULL].backward_s == pytest.approx(0.9 * 3 * 2e-3)
    assert rows[Recompute.FULL].backward_source is Source.MEASURED


def test_full_recomputation_is_no_faster_than_none_where_noise_says_so(fitted):
    profile = fitted(backward=0.6)
    rows = _by_kind(profile)
    none, full = rows[Recompute.NONE], rows[Recompute.FULL]
    assert full.backward_s == pytest.approx(none.backward_s + none.forward_s)
    assert full.backward_source is Source.DERIVED
    told = [line for line in profile.provenance.notes.splitlines() if line.startswith("replay hidden by noise: ")]
    assert len(told) == sum(row.recompute is Recompute.FULL for row in profile.layers.rows)
    assert told[0] == (
        "replay hidden by noise: backward time of block tp_size 1 sequence_parallel none recompute full "
        "micro_batch_size 1 sequence_length 32 was measured as 0.0036 s, 0.006 s is taken: that without recomputation"
        " and one forward pass"
    )


def test_a_replay_within_three_standard_errors_of_nothing_is_not_told_apart(plans, make_measurement, make_constants):
    """The fixture's repeats scatter by half of their median, so that nothing is certain."""
    rows = _by_kind(fit_profile([(Path("m.json"), make_measurement(plans, make_constants(replay=0.1)))]))
    assert rows[Recompute.FULL].backward_s == pytest.approx(3 * 2e-3)
    assert rows[Recompute.FULL].backward_source is Source.DERIVED
