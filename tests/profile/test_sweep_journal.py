import pytest

from shardwright.io import BadInput
from shardwright.launch.journal import Journal, Kept, journal_path
from shardwright.types.hardware_profile import Collective
from shardwright_profile.hardware.profile import (
    JOURNAL,
    OverlapEntry,
    PairEntry,
    PointEntry,
    RateEntry,
    StartEntry,
    SweepIdentity,
)

_NOTHING = Kept()


@pytest.fixture
def identity(make_cluster):
    return SweepIdentity(
        cluster=make_cluster((1, 2)), backend="gloo", min_bytes=4, max_bytes=8, max_repeats=9, versions="torch 0"
    )


def _entries():
    overlap = {"compute_ratio": 0.5, "compute_s": 1.0, "collective_s": 2.0, "compute_slowdown": 0.9}
    kind = {"collective": Collective.ALL_REDUCE, "group_size": 2, "ranks_per_node": 2}
    return (
        StartEntry(time_s=0.1 + 0.2),
        RateEntry(name="matrix_flops_per_s", values=(1e12, 1 / 3)),
        PointEntry(**kind, message_bytes=64, consecutive=True, times_s=(1e-5, 2e-5)),
        PairEntry(source_rank=0, target_rank=1, message_bytes=64, time_s=1e-6),
        OverlapEntry(**kind, **overlap, collective_bytes=64, collective_slowdown=1.5),
    )


def _written(path, identity, entries):
    journal = Journal(path, JOURNAL, identity, _NOTHING)
    for entry in entries:
        assert journal.add([entry])
    return journal


def test_what_is_added_is_read_back_to_the_bit_and_added_once(tmp_path, identity):
    path = journal_path(tmp_path / "new" / "h.h5")
    journal = _written(path, identity, _entries())
    before = path.read_bytes()
    assert not journal.add(_entries())
    assert path.read_bytes() == before
    assert JOURNAL.read(path, identity) == Kept(_entries(), len(before))
    assert len({entry.key for entry in _entries()}) == 5
    assert all(journal.find(*entry.key) == entry for entry in _entries())
    journal.remove()
    assert JOURNAL.read(path, identity) == _NOTHING


def test_a_journal_that_is_cut_anywhere_keeps_its_whole_lines_and_goes_on_after_them(tmp_path, identity):
    path, entries = tmp_path / "h.h5.journal", _entries()
    _written(path, identity, entries)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        kept = JOURNAL.read(path, identity)
        complete = whole[:cut].count(b"\n")
        assert kept.entries == entries[: max(0, complete - 1)]
        Journal(path, JOURNAL, identity, kept).add(entries[len(kept.entries) :])
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"max_bytes": 16}, "another max_bytes"),
        ({"max_repeats": 3, "versions": "torch 1"}, "another max_repeats, versions"),
    ],
)
def test_a_journal_of_another_sweep_is_refused(tmp_path, identity, changed, named):
    path = tmp_path / "h.h5.journal"
    _written(path, identity, _entries())
    names = SweepIdentity.__struct_fields__
    other = SweepIdentity(**{name: getattr(identity, name) for name in names} | changed)
    with pytest.raises(BadInput, match=rf"h.h5.journal: belongs to a killed sweep with {named}: delete it"):
        JOURNAL.read(path, other)


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"\xff",
        b'{"type":"start","time_s":0}',
        b'{"type":"start","time_s":-1.0}',
        b'{"type":"start","time_s":1e999}',
        b'{"type":"start","time_s":NaN}',
        b'{"type":"start"}',
        b'{"type":"other","time_s":1.0}',
        b'{"type":"rate","name":"a","values":[]}',
        b'{"type":"pair","source_rank":-1,"target_rank":1,"message_bytes":4,"time_s":1.0}',
    ],
)
def test_a_whole_line_that_says_nothing_sensible_is_refused_by_its_number(tmp_path, identity, line):
    path = tmp_path / "h.h5.journal"
    _written(path, identity, _entries()[:1])
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(BadInput, match="line 3 is not readable"):
        JOURNAL.read(path, identity)


def test_a_file_that_is_no_journal_is_refused(tmp_path, identity):
    path = tmp_path / "h.h5.journal"
    path.write_text("notes of mine\n")
    with pytest.raises(BadInput, match="line 1 is not readable"):
        JOURNAL.read(path, identity)
    path.unlink()
    path.mkdir()
    with pytest.raises(BadInput, match="choose another --out"):
        JOURNAL.read(path, identity)


def test_a_journal_that_cannot_be_written_is_one_line(tmp_path, identity):
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file" / "h.h5.journal", JOURNAL, identity, _NOTHING)
    with pytest.raises(BadInput, match="cannot be written"):
        journal.add(_entries())


def test_a_journal_of_another_sweep_counts_as_none_where_that_is_asked(tmp_path, identity):
    path = tmp_path / "h.h5.journal"
    _written(path, identity, _entries())
    names = SweepIdentity.__struct_fields__
    other = SweepIdentity(**{name: getattr(identity, name) for name in names} | {"max_bytes": 16})
    assert JOURNAL.read(path, other, anew=True) == _NOTHING
    path.write_text("notes of mine\n")
    with pytest.raises(BadInput, match="line 1 is not readable"):
        JOURNAL.read(path, other, anew=True)
