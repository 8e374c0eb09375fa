"""HDF5 profiles are read back as they were written, and equal content gives equal bytes at any time."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import h5py
import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.inspect import BoolType, EnumType, FloatType, IntType
from numpy.typing import NDArray
from random_documents import shown

from shardwright.io import sha256_of_file
from shardwright.io.hdf5 import Provenance, tables_of
from shardwright.io.table import Column, Row, Table, columns_of
from shardwright.types.hardware_profile import HardwareProfile, read_hardware_profile, write_hardware_profile
from shardwright.types.model_profile import ModelProfile, ProfileOrigin, read_model_profile, write_model_profile

StructType = TypeVar("StructType", bound=msgspec.Struct)

OTHERS = ("pairs", "overlap", "ranks", "rates")
EXAMPLES = Path(__file__).parents[2] / "core" / "examples"


def _values(column: Column, rows: int) -> st.SearchStrategy[NDArray[Any]]:
    kind = column.type
    if column.dtype.kind == "S":
        text = (
            st.sampled_from([member.value for member in kind.cls])
            if isinstance(kind, EnumType)
            else st.from_regex(rf"[!-~]{{1,{column.dtype.itemsize}}}", fullmatch=True)
        )
        return st.lists(text.map(str.encode), min_size=rows, max_size=rows).map(
            lambda found: np.array(found, column.dtype)
        )
    if isinstance(kind, BoolType):
        return hnp.arrays(column.dtype, rows, elements=st.integers(0, 1))
    assert isinstance(kind, IntType | FloatType)
    least = (kind.ge if kind.ge is not None else -(2**53)) if kind.gt is None else kind.gt + 1
    most = kind.le if kind.le is not None else 2**53 if kind.lt is None else kind.lt - 1
    numbers = st.floats(least, most) if isinstance(kind, FloatType) else st.integers(int(least), int(most))
    return hnp.arrays(column.dtype, rows, elements=numbers)


@st.composite
def tables(draw: st.DrawFn, row_type: type[Row], rows: int, **given: NDArray[Any]) -> Table[Row]:
    columns = columns_of(row_type)
    table = {name: draw(_values(column, rows)) for name, column in columns.items()} | given
    for name, column in columns.items():
        if column.source:
            table[name][table[column.source] == b"absent"] = 0
    return Table(row_type, table)


def _texts(draw: st.DrawFn, kind: type[StructType]) -> StructType:
    return kind(**{name: draw(file_texts) for name in kind.__struct_fields__})


@st.composite
def hardware_profiles(draw: st.DrawFn) -> HardwareProfile:
    rows = draw(st.integers(0, 5))
    point = np.array(draw(st.permutations([*range(rows), *range(rows)])), "int64")
    types = tables_of(HardwareProfile)
    others = {name: draw(st.integers(0, 3)) for name in OTHERS}
    alone = {"overlap": {"ranks_per_node": np.ones(others["overlap"], "int64")}}
    return HardwareProfile(
        cluster=draw(file_texts),
        device=draw(file_texts),
        backend=draw(file_texts),
        provenance=_texts(draw, Provenance),
        points=draw(tables(types["points"], rows, ranks_per_node=np.ones(rows, "int64"))),
        repeats=draw(tables(types["repeats"], 2 * rows, point=point)),
        **{name: draw(tables(types[name], count, **alone.get(name, {}))) for name, count in others.items()},
    )


file_texts = st.text(shown, max_size=20)


@st.composite
def model_profiles(draw: st.DrawFn) -> ModelProfile:
    rows = draw(st.integers(0, 4))
    # No point is there twice.
    names = np.array([f"type {row}" for row in range(rows)], "S32")
    types = tables_of(ModelProfile)
    return ModelProfile(
        origin=_texts(draw, ProfileOrigin),
        provenance=_texts(draw, Provenance),
        layers=draw(tables(types["layers"], rows, type=names)),
        states=draw(tables(types["states"], draw(st.integers(0, 4)))),
        process=draw(tables(types["process"], 1)),
        fits=draw(tables(types["fits"], draw(st.integers(0, 4)))),
        rests=draw(tables(types["rests"], rows, type=names)),
        experts=draw(tables(types["experts"], rows, type=names)),
        context=draw(tables(types["context"], draw(st.integers(0, 2)))),
    )


def _same(first: Table[Row], second: Table[Row]) -> bool:
    return first.rows == second.rows and all(
        first[name].dtype == second[name].dtype and np.array_equal(first[name], second[name]) for name in first.columns
    )


@settings(max_examples=20, deadline=None)
@given(hardware_profiles())
def test_a_hardware_profile_is_read_as_it_was_written(profile: HardwareProfile) -> None:
    with TemporaryDirectory() as folder:
        first, second = Path(folder, "first.h5"), Path(folder, "second.h5")
        write_hardware_profile(first, profile)
        again = read_hardware_profile(first)
        write_hardware_profile(second, again)
        assert second.read_bytes() == first.read_bytes()
    for name in ("cluster", "device", "backend", "provenance"):
        assert getattr(again, name) == getattr(profile, name)
    for name in tables_of(HardwareProfile):
        assert _same(getattr(again, name), getattr(profile, name))


@settings(max_examples=20, deadline=None)
@given(model_profiles())
def test_a_model_profile_is_read_as_it_was_written(profile: ModelProfile) -> None:
    with TemporaryDirectory() as folder:
        first, second = Path(folder, "first.h5"), Path(folder, "second.h5")
        write_model_profile(first, profile)
        again = read_model_profile(first)
        write_model_profile(second, again)
        assert second.read_bytes() == first.read_bytes()
    assert (again.origin, again.provenance) == (profile.origin, profile.provenance)
    for name in tables_of(ModelProfile):
        assert _same(getattr(again, name), getattr(profile, name))


def test_every_column_has_a_checksum(tmp_path: Path) -> None:
    columns: list[h5py.Dataset] = []
    write_model_profile(tmp_path / "profile.h5", read_model_profile(EXAMPLES / "model_profile.h5"))
    with h5py.File(tmp_path / "profile.h5") as file:
        file.visititems(lambda _, node: columns.append(node) if isinstance(node, h5py.Dataset) else None)
        assert columns and all(column.fletcher32 for column in columns if column.shape and column.shape[0])


def test_profiles_written_at_another_time_have_the_same_bytes(tmp_path: Path) -> None:
    profile = read_model_profile(EXAMPLES / "model_profile.h5")
    hashes = set()
    for name in ("now.h5", "later.h5"):
        write_model_profile(tmp_path / name, profile)
        hashes.add(sha256_of_file(tmp_path / name))
        # HDF5 stamps objects, where it does, with whole seconds.
        time.sleep(1.1)
    assert len(hashes) == 1


@settings(max_examples=20, deadline=None)
@given(hardware_profiles())
def test_a_curve_is_the_median_by_message_size_of_each_kind(profile: HardwareProfile) -> None:
    seen = 0
    numbers, all_s = profile.repeats["point"], profile.repeats["time_s"]
    repeats = [all_s[numbers == number] for number in range(len(profile.points))]
    for key, (sizes, times_s) in profile.curves.items():
        assert (np.diff(sizes) >= 0).all()
        points = [(row, times_s) for row, times_s in zip(profile.points.rows, repeats, strict=True) if row.key == key]
        expected = {(row.message_bytes, float(np.median(times_s))) for row, times_s in points}
        assert set(zip(sizes.tolist(), times_s.tolist(), strict=True)) == expected
        seen += len(points)
    assert seen == len(profile.points)


def test_a_profile_whose_columns_of_words_are_as_wide_as_the_words_were_is_read(tmp_path: Path) -> None:
    """Those of a kind become wider once a longer name is added to it."""
    path, column = tmp_path / "model.h5", "layers/recompute"
    path.write_bytes((EXAMPLES / "model_profile.h5").read_bytes())
    new = read_model_profile(path)
    with h5py.File(path, "r+") as file:
        values, unit = file[column][()], file[column].attrs["unit"]
        del file[column]
        narrow = file.create_dataset(column, data=values.astype("S9"), chunks=values.shape, fletcher32=True)
        narrow.attrs["unit"] = unit
        assert values.dtype.itemsize > narrow.dtype.itemsize
    old = read_model_profile(path)
    assert old.layers.rows == new.layers.rows and old.layers.columns["recompute"].dtype == values.dtype
