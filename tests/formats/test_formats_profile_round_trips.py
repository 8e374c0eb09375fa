"""HDF5 profiles are read back as they were written, and equal content gives equal bytes at any time."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from shardwright_formats.io.hdf5 import Column, Provenance, Table
from shardwright_formats.io.json import sha256_of_file
from shardwright_formats.types import hardware_profile as hp
from shardwright_formats.types import model_profile as mp

OTHERS = ("pairs", "overlap", "ranks", "rates")
EXAMPLES = Path(__file__).parents[2] / "formats" / "examples"


def _values(column: Column, rows: int) -> st.SearchStrategy[NDArray[Any]]:
    least = 1 if column.positive else -(2**53) if column.signed else 0
    dtype = np.dtype(column.dtype)
    if dtype.kind == "S":
        text = (
            st.sampled_from(column.among)
            if column.among
            else st.from_regex(rf"[!-~]{{1,{dtype.itemsize}}}", fullmatch=True)
        )
        return st.lists(text.map(str.encode), min_size=rows, max_size=rows).map(lambda found: np.array(found, dtype))
    most = 1 if column.unit == "0 or 1" else 2**53
    numbers = st.floats(least, most) if dtype.kind == "f" else st.integers(least, most)
    return hnp.arrays(dtype, rows, elements=numbers)


@st.composite
def tables(draw: st.DrawFn, columns: dict[str, Column], rows: int) -> Table:
    table = {name: draw(_values(column, rows)) for name, column in columns.items()}
    for name, column in columns.items():
        if column.sourced_by:
            table[name][table[column.sourced_by] == b"absent"] = 0
    return table


@st.composite
def hardware_profiles(draw: st.DrawFn) -> hp.HardwareProfile:
    rows = draw(st.integers(0, 5))
    repeats = draw(tables(hp.TABLES["repeats"], 2 * rows))
    repeats["point"] = np.array(draw(st.permutations([*range(rows), *range(rows)])), "int64")
    return hp.HardwareProfile(
        cluster=draw(file_texts),
        device=draw(file_texts),
        backend=draw(file_texts),
        provenance=Provenance(*(draw(file_texts) for _ in Provenance._fields)),
        points=draw(tables(hp.TABLES["points"], rows)),
        repeats=repeats,
        **{name: draw(tables(hp.TABLES[name], draw(st.integers(0, 3)))) for name in OTHERS},
    )


file_texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@st.composite
def model_profiles(draw: st.DrawFn) -> mp.ModelProfile:
    made = {
        name: draw(tables(columns, 1 if name == "process" else draw(st.integers(0, 4))))
        for name, columns in mp.TABLES.items()
    }
    # No point is there twice.
    made["layers"]["type"] = np.array([f"type {row}" for row in range(len(made["layers"]["type"]))], "S32")
    return mp.ModelProfile(
        mp.ProfileOrigin(*(draw(file_texts) for _ in mp.ProfileOrigin._fields)),
        Provenance(*(draw(file_texts) for _ in Provenance._fields)),
        **made,
    )


def _same(first: Table, second: Table) -> bool:
    return list(first) == list(second) and all(
        first[name].dtype == second[name].dtype and np.array_equal(first[name], second[name]) for name in first
    )


@settings(max_examples=20, deadline=None)
@given(hardware_profiles())
def test_a_hardware_profile_is_read_as_it_was_written(profile: hp.HardwareProfile) -> None:
    with TemporaryDirectory() as folder:
        first, second = Path(folder, "first.h5"), Path(folder, "second.h5")
        hp.write_hardware_profile(first, profile)
        again = hp.read_hardware_profile(first)
        hp.write_hardware_profile(second, again)
        assert second.read_bytes() == first.read_bytes()
    for name in ("cluster", "device", "backend", "provenance"):
        assert getattr(again, name) == getattr(profile, name)
    for name in hp.TABLES:
        assert _same(getattr(again, name), getattr(profile, name))


@settings(max_examples=20, deadline=None)
@given(model_profiles())
def test_a_model_profile_is_read_as_it_was_written(profile: mp.ModelProfile) -> None:
    with TemporaryDirectory() as folder:
        first, second = Path(folder, "first.h5"), Path(folder, "second.h5")
        mp.write_model_profile(first, profile)
        again = mp.read_model_profile(first)
        mp.write_model_profile(second, again)
        assert second.read_bytes() == first.read_bytes()
    assert (again.origin, again.provenance) == (profile.origin, profile.provenance)
    for name in mp.TABLES:
        assert _same(getattr(again, name), getattr(profile, name))


def test_profiles_written_at_another_time_have_the_same_bytes(tmp_path: Path) -> None:
    profile = mp.read_model_profile(EXAMPLES / "model_profile.h5")
    hashes = set()
    for name in ("now.h5", "later.h5"):
        mp.write_model_profile(tmp_path / name, profile)
        hashes.add(sha256_of_file(tmp_path / name))
        # HDF5 stamps objects, where it does, with whole seconds.
        time.sleep(1.1)
    assert len(hashes) == 1


@settings(max_examples=20, deadline=None)
@given(hardware_profiles())
def test_a_curve_is_the_median_by_message_size_of_each_kind(profile: hp.HardwareProfile) -> None:
    seen = 0
    for key, (sizes, times_s) in profile.curves.items():
        assert (np.diff(sizes) >= 0).all()
        points = [i for i in range(len(profile.points["source"])) if profile.key(i) == key]
        expected = {(int(profile.points["message_bytes"][i]), float(np.median(profile.times_s(i)))) for i in points}
        assert set(zip(sizes.tolist(), times_s.tolist(), strict=True)) == expected
        seen += len(points)
    assert seen == len(profile.points["source"])
