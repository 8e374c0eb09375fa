"""Tables of rows: one struct for each table, which declares the columns, their units and limits."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cache, cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.inspect import BoolType, EnumType, FloatType, IntType, Metadata, StrType
from numpy.typing import ArrayLike, NDArray

from shardwright.io.errors import has_controls
from shardwright.io.json import Value


class Source(StrEnum):
    """Kinds of sources of a profile's numbers."""

    MEASURED = "measured"
    """The number was timed or counted."""
    DERIVED = "derived"
    """The number was computed from measured numbers."""
    ASSUMED = "assumed"
    """The number was taken from elsewhere, or follows a rule that was not checked."""
    ANALYTIC = "analytic"
    """The number was computed by a formula from a device's data sheet."""
    ABSENT = "absent"
    """The number is unknown, and its value is 0."""


class Sourced(NamedTuple):
    """A number of a profile with its source, and its standard error, which is 0 if it is unknown."""

    value: float
    source: Source
    error: float = 0.0


class Row(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of a table; each field is a column.

    Fields are numbers, booleans, enumerations or strings with a maximum length. Their `Meta` contains their limits and,
    in `extra`, their `unit` and the name of the field with their source (`source`). No number is infinite or NaN.
    """


RowType = TypeVar("RowType", bound=Row)


def sourced(by: str) -> Meta:
    """Return the annotation of a number whose `Source` is in field `by`; if that is absent, the number is 0."""
    return Meta(extra={"source": by})


class Column(NamedTuple):
    """The type, dtype, unit and source of one column."""

    type: msgspec.inspect.Type
    dtype: np.dtype[Any]
    unit: str
    """Unit that is written with the values, and compared when they are read."""
    source: str
    """Name of the column with the source of this number; empty if there is none."""

    def problem(self, values: NDArray[Any]) -> str | None:
        """Return a message about the first invalid value of the column, or None if all are valid."""
        match self.type:
            case EnumType() | StrType():
                return _text_problem(self.type, values)
            case _:
                return _number_problem(self.type, values)

    def decoded(self, values: NDArray[Any]) -> Iterable[Any]:
        """Return the column's values as the Python values of rows."""
        items: Iterable[Any] = values.tolist()
        match self.type:
            case EnumType(cls):
                members = {member.value.encode(): member for member in cls}
                return (members[value] for value in items)
            case StrType():
                return (value.decode() for value in items)
            case BoolType():
                return map(bool, items)
            case _:
                return items


@cache
def columns_of(row_type: type[Row]) -> Mapping[str, Column]:
    """Return the columns of a row type by name, in order."""
    info = msgspec.inspect.type_info(row_type)
    assert isinstance(info, msgspec.inspect.StructType)
    return {field.name: _column(field.type) for field in info.fields}


class Table(Generic[RowType]):
    """Rows of one type, stored as columns of equal length; strings are ASCII bytes, as in the file.

    Raises ValueError if columns are missing, differ in length, or contain invalid values.
    """

    def __init__(self, row_type: type[RowType], columns: Mapping[str, ArrayLike]) -> None:
        wanted = columns_of(row_type)
        if set(columns) != set(wanted):
            raise ValueError(f"missing or unknown columns {sorted(set(columns) ^ set(wanted))}")
        self.row_type = row_type
        self.columns: Mapping[str, NDArray[Any]] = {
            name: _exactly(name, columns[name], column.dtype) for name, column in wanted.items()
        }
        if (problem := _problem(wanted, self.columns)) is not None:
            raise ValueError(problem)

    @classmethod
    def from_rows(cls, row_type: type[RowType], rows: Iterable[RowType]) -> "Table[RowType]":
        """Return a table with these rows."""
        listed = list(rows)
        return cls(row_type, {name: [getattr(row, name) for row in listed] for name in columns_of(row_type)})

    @cached_property
    def rows(self) -> tuple[RowType, ...]:
        """Return the rows of the table."""
        columns = columns_of(self.row_type)
        lists = [column.decoded(self.columns[name]) for name, column in columns.items()]
        return tuple(self.row_type(**dict(zip(columns, values, strict=True))) for values in zip(*lists, strict=True))

    def replace(self, **columns: ArrayLike) -> "Table[RowType]":
        """Return the table with other values in some columns."""
        return Table(self.row_type, {**self.columns, **columns})

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


def _column(annotated: msgspec.inspect.Type) -> Column:
    kind, extra = (annotated.type, annotated.extra or {}) if isinstance(annotated, Metadata) else (annotated, {})
    match kind:
        case IntType():
            dtype, unit = "int64", ""
        case FloatType():
            dtype, unit = "float64", ""
        case BoolType():
            dtype, unit = "int8", "0 or 1"
        case EnumType(cls):
            dtype, unit = f"S{max(len(member.value) for member in cls)}", "name"
        case StrType(max_length=int(length)):
            dtype, unit = f"S{length}", "name"
        case _:
            raise TypeError(f"no column for {kind}")
    return Column(kind, np.dtype(dtype), extra.get("unit", unit), extra.get("source", ""))


def _exactly(name: str, values: ArrayLike, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the values in another dtype; raise ValueError if a string would be cut off or a number changed."""
    given = np.asarray(values)
    if not given.size:
        return given.astype(dtype)
    with np.errstate(invalid="ignore"):
        made = given.astype(dtype)
        if not np.array_equal(made.astype(given.dtype), given, equal_nan=given.dtype.kind == "f"):
            raise ValueError(f"{name}: values do not fit {dtype.str.lstrip('<|')}")
    return made


def _problem(columns: Mapping[str, Column], values: Mapping[str, NDArray[Any]]) -> str | None:
    if any(column.ndim != 1 for column in values.values()):
        return "a column is not a list of values"
    if len({len(column) for column in values.values()}) > 1:
        return "columns of different lengths"
    for name, column in columns.items():
        if (problem := column.problem(values[name])) is not None:
            return f"{name} is {problem}"
    for name, column in columns.items():
        if column.source:
            odd = np.flatnonzero((values[column.source] == Source.ABSENT.encode()) & (values[name] != 0))
            if len(odd):
                return f"{name} is {values[name][odd[0]]} in row {odd[0]}, but {column.source} marks it absent"
    return None


def _text_problem(kind: EnumType | StrType, values: NDArray[Any]) -> str | None:
    among = [member.value for member in kind.cls] if isinstance(kind, EnumType) else []
    for row, value in enumerate(values.tolist()):
        if not value.isascii() or has_controls(value.decode()):
            return f"{value!r} in row {row}, not ASCII that can be shown"
        if among and value.decode() not in among:
            return f"{value.decode()!r} in row {row}, not one of {', '.join(among)}"
    return None


def _number_problem(kind: msgspec.inspect.Type, values: NDArray[Any]) -> str | None:
    bad, wanted = ~np.isfinite(values), ["finite"]
    if isinstance(kind, BoolType):
        bad, wanted = bad | (values < 0) | (values > 1), ["0 or 1"]
    if isinstance(kind, IntType | FloatType):
        for limit, beyond, word in (
            (kind.gt, np.less_equal, ">"),
            (kind.ge, np.less, ">="),
            (kind.lt, np.greater_equal, "<"),
            (kind.le, np.greater, "<="),
        ):
            if limit is not None:
                bad = bad | beyond(values, limit)
                wanted.append(f"{word} {limit:g}")
    if not bad.any():
        return None
    row = int(np.flatnonzero(bad)[0])
    return f"{values[row]} in row {row}, not {' and '.join(wanted)}"


def median(values: NDArray[np.floating]) -> float:
    """Return the median; numpy's function would import numpy.ma, which takes a tenth of a search's time."""
    ordered = np.sort(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return float((low + high) / 2)
