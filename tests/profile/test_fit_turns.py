"""Times of probes that were stepped in turns: a slow moment changes no layer, and what is uncertain is said."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from probe_plans import probe_settings

from shardwright.types import Measurement, RankMeasurement
from shardwright_profile.model.fit import fit_profile
from shardwright_profile.model.probes import make_probes, probe_key


def _in_turns(measured: Measurement, again: int = 0, slow: float = 1.0) -> Measurement:
    """The same, stepped in turns by pairs, five rounds of which the last two were so many times as slow."""
    by_key: dict[Any, list[str]] = {}
    for found in measured.plans:
        by_key.setdefault(probe_key(found.plan), []).append(found.plan.sha256)
    pace = (1.0, 1.0, 1.0, slow, slow)

    def repeated(times_s: tuple[float, ...], offset: float = 0.0) -> tuple[float, ...]:
        return tuple(times_s[1] * by + offset * number for number, by in enumerate(pace))

    def of_rank(rank: RankMeasurement) -> RankMeasurement:
        segments = tuple(
            msgspec.structs.replace(one, forward_s=repeated(one.forward_s), backward_s=repeated(one.backward_s))
            for one in rank.segments
        )
        return msgspec.structs.replace(
            rank,
            step_s=repeated(rank.step_s),
            reference_s=repeated(rank.reference_s),
            segments=segments,
            gradient_reduction_s=repeated(rank.gradient_reduction_s),
            optimizer_s=repeated(rank.optimizer_s),
        )

    return msgspec.structs.replace(
        measured,
        plans=tuple(
            msgspec.structs.replace(
                found,
                ranks=tuple(map(of_rank, found.ranks)),
                in_turns=tuple(by_key[probe_key(found.plan)]),
                measured_again=again,
            )
            for found in measured.plans
        ),
    )


def test_of_probes_in_turns_a_slow_moment_changes_no_layer(plans, make_measurement, make_constants):
    measured = make_measurement(plans, make_constants(overhead_s=0.0))
    even, slowed = (fit_profile([(Path("m.json"), _in_turns(measured, slow=slow))]) for slow in (1.0, 1.7))
    np.testing.assert_allclose(slowed.layers["forward_s"], even.layers["forward_s"], rtol=1e-9)
    np.testing.assert_allclose(slowed.layers["backward_s"], even.layers["backward_s"], rtol=1e-9)
    assert (slowed.process["reference_s"] == even.process["reference_s"]).all()
    named = fit_profile([(Path("m.json"), msgspec.structs.replace(_in_turns(measured), attention_by="cudnn"))])
    assert named.provenance.notes == "attention by cudnn"
    assert even.provenance.notes == "" and not even.layers["forward_error_s"].any()


def test_a_profile_says_what_was_measured_again_and_what_is_uncertain(plans, make_measurement, make_constants):
    measured = _in_turns(make_measurement(plans, make_constants(overhead_s=0.0)), again=2, slow=4.0)
    profile = fit_profile([(Path("m.json"), measured)])
    again, *further = profile.provenance.notes.splitlines()
    uncertain = [line for line in further if line.startswith("uncertain: ")]
    assert again == "measured again: 12 of 12 groups of probes in turns, up to 2 times"
    blocks = [row for row in profile.layers.rows if row.type == "block"]
    assert len(uncertain) == 2 * len(blocks), "embedding and head are no differences"
    assert uncertain[0] == (
        "uncertain: forward time of block (tp_size 1, sequence_parallel none, recompute full, micro_batch_size 1, "
        "sequence_length 32) has a standard error of 88%"
    )


def test_probes_of_a_key_are_asked_for_in_turns_the_shortest_first(make_model, make_cluster):
    made = make_probes([make_model(("encoder", "decoder"))], make_cluster((1, 2)), "cpu-2", probe_settings())
    for group in made.document.in_turns:
        assert len({probe_key(made.plans[place]) for place in group}) == 1
        assert min(group, key=lambda place: len(made.plans[place].layers)) == group[0]
    assert sorted(place for group in made.in_turns for place in group) == list(range(len(made.plans)))
    assert {len(group) for group in made.in_turns} == {3, 5}, "one has ZeRO's probes, too"
