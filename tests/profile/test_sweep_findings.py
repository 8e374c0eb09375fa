"""What a sweep names as amiss, on made-up profiles."""

from dataclasses import replace

import pytest

from shardwright.io.hdf5 import tables_of
from shardwright.io.table import Table, columns_of
from shardwright.types.hardware_profile import Collective, HardwareProfile, PairRow, write_hardware_profile
from shardwright_profile.hardware.profile import (
    OverlapEntry,
    PairEntry,
    PointEntry,
    RateEntry,
    StartEntry,
    SweepIdentity,
    bad_links,
    findings,
    profile_of,
    slow_ranks,
    unsettled_points,
)
from shardwright_profile.show import show_profile

_MIB = 2**20


@pytest.fixture
def made(make_cluster):
    def profile(*entries, nodes=((1, 4),)):
        cluster = make_cluster(*nodes)
        identity = SweepIdentity(
            cluster=cluster, backend="gloo", min_bytes=4, max_bytes=4, max_repeats=9, versions="torch 0"
        )
        return profile_of(identity, entries, "2026-01-31"), cluster

    return profile


def _point(*times_s, message_bytes=1024):
    return PointEntry(
        collective=Collective.ALL_REDUCE,
        group_size=4,
        ranks_per_node=4,
        consecutive=True,
        message_bytes=message_bytes,
        times_s=times_s,
    )


def _pairs(apart, times_s, message_bytes=_MIB):
    return [
        PairEntry(source_rank=rank, target_rank=rank + apart, message_bytes=message_bytes, time_s=time_s)
        for rank, time_s in times_s.items()
    ]


def test_a_rank_under_four_fifths_of_the_median_is_named_with_what_it_is_slow_at(made):
    rates = [
        RateEntry(name="matrix_flops_per_s", values=(1e12, 1.02e12, 0.81e12, 0.61e12)),
        RateEntry(name="memory_bytes_per_s", values=(1e9, 0.5e9, 1e9, 1e9)),
    ]
    assert slow_ranks(*made(*rates)) == (
        "rank 1 copies memory at 50% of the median rate of the ranks on cpu-4 (memory_bytes_per_s)",
        "rank 3 computes at 67% of the median rate of the ranks on cpu-4 (matrix_flops_per_s)",
    )


def test_layers_that_are_slower_in_a_pipeline_than_alone_are_told_with_both_times(made):
    def told(alone_per_s, in_pipeline_per_s):
        layers = (("layers_alone_per_s", alone_per_s), ("layers_in_pipeline_per_s", in_pipeline_per_s))
        rates = [RateEntry(name=name, values=(value, value)) for name, value in layers]
        return findings(*made(*rates, nodes=((1, 2),)))

    assert told(200.0, 40.0) == (
        "a layer takes 25 ms inside a pipeline and 5 ms alone, 5.0 times as long: predictions of pipelines count it as "
        "alone",
    )
    assert told(200.0, 140.0) == told(200.0, 400.0) == ()
    assert findings(*made(nodes=((1, 1),))) == (), "on one device nothing was timed"


def test_a_rank_is_held_against_those_on_its_own_type_of_node(made):
    rates = RateEntry(name="matrix_flops_per_s", values=(9e12, 9e12, 9e12, 1e12, 1e12))
    assert slow_ranks(*made(rates, nodes=((1, 3), (1, 2)))) == ()
    assert len(slow_ranks(*made(rates, nodes=((1, 5),)))) == 2


def test_a_link_is_named_that_takes_half_as_long_again_as_its_like(made):
    profile, cluster = made(*_pairs(1, {0: 1e-3, 1: 1.4e-3, 2: 2e-3}), *_pairs(1, {0: 1e-5, 1: 1e-5, 2: 1e-5}, 1024))
    assert bad_links(profile, cluster) == ()  # 2 ms is under 1.5 times the median of 1.4 ms
    profile, cluster = made(*_pairs(1, {0: 1e-3, 1: 1e-3, 2: 1.6e-3}))
    assert bad_links(profile, cluster) == (
        "the link from rank 2 to rank 3 takes 1.6 ms for 1 MiB, 1.6 times the median of the 3 pairs 1 apart in a node",
    )


def test_two_links_are_too_few_to_say_which_is_bad(made):
    assert bad_links(*made(*_pairs(2, {0: 1e-3, 1: 9e-3}))) == ()


def test_a_link_across_nodes_is_not_held_against_one_inside(made):
    # Of four nodes of two ranks: 0-1, 2-3, 4-5, 6-7 inside, 1-2, 3-4, 5-6 across.
    times_s = {rank: 1e-3 if rank % 2 == 0 else 5e-3 for rank in range(7)}
    assert bad_links(*made(*_pairs(1, times_s), nodes=((4, 2),))) == ()
    slow = times_s | {3: 9e-3}
    (sentence,) = bad_links(*made(*_pairs(1, slow), nodes=((4, 2),)))
    assert sentence.startswith("the link from rank 3 to rank 4 takes 9 ms for 1 MiB, 1.8 times the median of the 3 ")
    assert sentence.endswith("across nodes")


def test_points_that_are_not_known_well_are_counted_and_the_worst_named(made):
    settled, single = _point(*[1e-3] * 6), _point(1e-3, message_bytes=4096)
    wide = _point(*[1e-3] * 3, *[2e-3] * 3, message_bytes=8192)
    assert unsettled_points(made(settled)[0]) == ()
    (sentence,) = unsettled_points(made(settled, wide)[0])
    assert sentence == (
        "1 of 2 points are not known to within 3% "
        "(the worst: all_reduce of 4 consecutive ranks in a node, 8 KiB: ± 33%)"
    )
    (sentence,) = unsettled_points(made(settled, wide, single)[0])
    assert sentence.startswith("2 of 3 points")
    assert sentence.endswith("4 KiB: one repeat)")


def test_a_thousand_bad_links_are_told_in_twenty_sentences_and_all_notes_are_in_the_profile(made):
    entries = _pairs(1, {rank: 1e-3 if rank < 40 else 1.0 + rank for rank in range(63)})
    profile, cluster = made(*entries, _point(1.0), nodes=((1, 64),))
    sentences = findings(profile, cluster)
    assert len(sentences) == 20 + 1 + 1
    assert "rank 62 to rank 63" in sentences[0]
    assert sentences[20] == "and 3 more like these"
    assert profile.provenance.notes.splitlines() == list(sentences)
    assert findings(replace(profile, pairs=Table.from_rows(PairRow, [])), cluster) == sentences[-1:]


def test_every_entry_has_its_row_and_outliers_are_kept_and_marked(made):
    profile, _ = made(
        StartEntry(time_s=2.5),
        RateEntry(name="matrix_flops_per_s", values=(2.0, 1.0)),
        _point(*[1e-3] * 3, 1.1e-3, 5e-3, 1e-3),
        OverlapEntry(
            collective=Collective.ALL_GATHER,
            group_size=2,
            ranks_per_node=2,
            collective_bytes=64,
            compute_ratio=0.5,
            compute_s=1.0,
            collective_s=2.0,
            compute_slowdown=0.9,
            collective_slowdown=1.5,
        ),
        *_pairs(1, {0: 1e-3}),
        nodes=((1, 2),),
    )
    assert profile.rates["name"].tolist() == [b"matrix_flops_per_s", b"startup_s"]
    assert profile.rates["value"].tolist() == [1.0, 2.5]
    assert profile.ranks["value"].tolist() == [2.0, 1.0]
    assert profile.repeats["time_s"].tolist() == [1e-3, 1e-3, 1e-3, 1.1e-3, 5e-3, 1e-3]
    assert profile.repeats["outlier"].tolist() == [0, 0, 0, 1, 1, 0]
    assert profile.points["interval"].tolist() == [pytest.approx(2.0)]
    assert {name: column.tolist() for name, column in profile.overlap.columns.items()} == {
        "collective": [b"all_gather"],
        "group_size": [2],
        "ranks_per_node": [2],
        "collective_bytes": [64],
        "compute_s": [1.0],
        "collective_s": [2.0],
        "compute_slowdown": [0.9],
        "collective_slowdown": [1.5],
        "source": [b"measured"],
    }
    for name, row_type in tables_of(HardwareProfile).items():
        columns = columns_of(row_type)
        assert {c: getattr(profile, name)[c].dtype for c in columns} == {c: spec.dtype for c, spec in columns.items()}


def test_show_prints_the_notes_and_what_was_measured_of_links_overlap_and_ranks(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    overlap = {"compute_ratio": 0.5, "compute_s": 0.25, "collective_s": 2.0, "compute_slowdown": 1.125}
    kind = {"collective": Collective.ALL_REDUCE, "group_size": 4, "ranks_per_node": 4, "collective_bytes": 4096}
    profile, _ = made(
        RateEntry(name="matrix_flops_per_s", values=(4e12, 4e12, 4e12, 1e12)),
        _point(1.0),
        OverlapEntry(**kind, **overlap, collective_slowdown=1.75),
        *_pairs(1, {0: 1e-3, 1: 1e-3, 2: 1.6e-3}),
    )
    write_hardware_profile(tmp_path / "h.h5", profile)
    show_profile(tmp_path / "h.h5")
    printed = capsys.readouterr().out
    lines, notes = printed.splitlines(), profile.provenance.notes.splitlines()
    assert len(notes) == 3 and max(map(len, lines)) <= 120
    assert " ".join(f"note: {note}" for note in notes) in " ".join(printed.split())
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert ["2", "3", "1 MiB", "1.6 ms", "measured"] in rows
    assert ["all_reduce", "4", "4", "4 KiB", "250 ms", "2 s", "1.12", "1.75", "measured"] in rows
    assert ["3", "matrix_flops_per_s", "1e+12", "measured"] in rows
