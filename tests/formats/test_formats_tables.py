"""Tables of profiles: what could not be read back is not made."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta
from numpy.typing import ArrayLike

from shardwright.io import BadInput
from shardwright.io.hdf5 import Profile, read_profile, write_profile
from shardwright.io.table import Row, Source, Table
from shardwright.types import PositiveSeconds, Ranks
from shardwright.types.hardware_profile import RateRow, RepeatRow, read_hardware_profile

EXAMPLES = Path(__file__).parents[2] / "core" / "examples"


class SomeRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    time_s: PositiveSeconds
    ranks: Ranks
    name: Annotated[str, Meta(max_length=4)]
    near: bool
    source: Source


class TextRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    text: str


@dataclass(frozen=True, kw_only=True, eq=False)
class SomeProfile(Profile):
    FORMAT = "some"
    VERSION = 1

    some: Table[SomeRow]


ROW = {"time_s": [1.0], "ranks": [2], "name": ["a"], "near": [True], "source": ["measured"]}


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"other": [1.0]}, "unknown columns"),
        ({"time_s": [float("nan")]}, "time_s is nan"),
        ({"time_s": [0.0]}, "time_s is 0.0 in row 0, not finite and > 0 and <= 1e\\+09"),
        ({"time_s": [1e300]}, "time_s is 1e\\+300"),
        ({"time_s": 1.0}, "not a list of values"),
        ({"time_s": [1.0, 2.0]}, "different lengths"),
        ({"ranks": [1.5]}, "do not fit i8"),
        ({"ranks": [0]}, "ranks is 0 in row 0, not finite and >= 1 and <= 1.04858e\\+06"),
        ({"ranks": [2**20 + 1]}, "ranks is 1048577"),
        ({"near": [300]}, "do not fit i1"),
        ({"near": [2]}, "near is 2 in row 0, not 0 or 1"),
        ({"name": ["longer"]}, "do not fit S4"),
        ({"source": ["guessed"]}, "'guessed' in row 0, not one of measured, derived"),
    ],
)
def test_a_table_that_could_not_be_read_back_is_not_made(changed: dict[str, ArrayLike], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Table(SomeRow, ROW | changed)


def test_a_table_without_a_column_is_not_made() -> None:
    with pytest.raises(ValueError, match=r"missing or unknown columns \['ranks'\]"):
        Table(SomeRow, {name: values for name, values in ROW.items() if name != "ranks"})


def test_rows_and_columns_say_the_same() -> None:
    table = Table(SomeRow, ROW)
    (row,) = table.rows
    assert row == SomeRow(time_s=1.0, ranks=2, name="a", near=True, source=Source.MEASURED)
    assert row.near is True and row.source is Source.MEASURED
    again = Table.from_rows(SomeRow, [row])
    assert {name: values.tolist() for name, values in again.columns.items()} == {
        name: values.tolist() for name, values in table.columns.items()
    }


def test_a_table_without_rows_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "p.h5"
    write_profile(path, SomeProfile(some=Table.from_rows(SomeRow, ())))
    assert read_profile(path, SomeProfile).some["time_s"].shape == (0,)


def test_a_profile_that_contradicts_itself_is_not_written(tmp_path: Path) -> None:
    example = read_hardware_profile(EXAMPLES / "hardware_profile.h5")
    with pytest.raises(BadInput, match="points without repeats"):
        write_profile(tmp_path / "p.h5", replace(example, repeats=Table.from_rows(RepeatRow, ())))
    assert list(tmp_path.iterdir()) == []


def test_a_row_without_a_unit_or_length_has_no_column() -> None:
    with pytest.raises(TypeError, match="no column for StrType"):
        Table.from_rows(TextRow, ())
    assert Table.from_rows(RateRow, ()).columns["name"].dtype == "S32"
