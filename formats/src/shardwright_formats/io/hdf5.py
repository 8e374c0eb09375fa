"""Tables of columns in HDF5, written reproducibly and read with suspicion."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.json import atomic_path

__all__ = [
    "SOURCES",
    "Column",
    "Provenance",
    "Table",
    "open_profile",
    "read_attribute",
    "read_table",
    "table_of",
    "write_profile",
    "write_table",
]

Table = dict[str, NDArray[Any]]

SOURCES = ("measured", "derived", "assumed", "analytic", "absent")
"""Where a number of a profile can come from; `absent` stands beside a 0 that nobody has measured."""

_MOST_ROWS = 10_000_000
_MOST_ATTRIBUTE_BYTES = 64 * 1024


class Column(NamedTuple):
    """What one column of a table holds; no value is ever infinite or NaN."""

    dtype: str
    unit: str
    """Written beside the values, and compared when they are read."""
    positive: bool = False
    """Whether zero is refused too."""
    among: tuple[str, ...] = ()
    """The only texts allowed, where not any."""
    signed: bool = False
    """Whether a number may be negative."""
    sourced_by: str = ""
    """The column that says where a number comes from; a number that is absent must be 0."""


class Provenance(NamedTuple):
    """When and with what a profile was made, and what there is to say about it; attributes of the file."""

    date: str
    """UTC day, as 2026-01-31; where several files were joined, the latest."""
    versions: str
    """Of the software and the device's driver that measured, as `torch 2.13.0, driver 550.54`."""
    notes: str = ""
    """Sources, assumptions and defects, one sentence a line."""


@contextmanager
def write_profile(path: Path, format_name: str, version: int, attributes: Mapping[str, str]) -> Iterator[h5py.File]:
    """Yield a new HDF5 file that takes the name `path` when it is complete; equal content gives equal bytes."""
    with atomic_path(path) as temporary, h5py.File(temporary, "w", libver="v110", track_order=True) as file:
        file.attrs["format"] = format_name
        file.attrs["version"] = np.int64(version)
        for name, value in attributes.items():
            file.attrs[name] = value
        yield file


def table_of(columns: Mapping[str, Column], rows: Iterable[Mapping[str, object]]) -> Table:
    """A table from its rows, each of which has a value for every column."""
    found = list(rows)
    for row in found:
        if set(row) != set(columns):
            raise ValueError(f"missing or unknown columns {sorted(set(row) ^ set(columns))}")
    return {
        name: _exactly(name, np.array([row[name] for row in found], dtype=None if found else spec.dtype), spec.dtype)
        for name, spec in columns.items()
    }


def write_table(file: h5py.File, name: str, columns: Mapping[str, Column], table: Mapping[str, ArrayLike]) -> None:
    """Write a table as a group of equally long, checksummed datasets with their units.

    Raises ValueError when it could not be read back: other columns, different lengths, a value that is not finite,
    is negative, or does not fit the column's dtype.
    """
    if set(table) != set(columns):
        raise ValueError(f"table {name}: missing or unknown columns {sorted(set(table) ^ set(columns))}")
    checked = {column: _exactly(f"{name}/{column}", table[column], spec.dtype) for column, spec in columns.items()}
    if (problem := _problem(columns, checked)) is not None:
        raise ValueError(f"table {name}: {problem}")
    group = file.create_group(name, track_order=True)
    for column, spec in columns.items():
        values = checked[column]
        # An empty dataset has no chunks to put a checksum on.
        stored = {"chunks": values.shape, "fletcher32": True} if len(values) else {}
        dataset = group.create_dataset(column, data=values, track_times=False, **stored)
        dataset.attrs["unit"] = spec.unit


@contextmanager
def open_profile(path: Path, format_name: str, version: int) -> Iterator[h5py.File]:
    """Open an HDF5 profile for reading; read from it with `read_attribute` and `read_table`.

    Raises BadInput when it is no HDF5 file, is truncated, or has another format or version. Errors of the caller's
    own making inside the `with` pass through as they are.
    """
    if not path.is_file():
        raise BadInput(path, "is a folder" if path.is_dir() else "no such file", "check the path")
    with _h5py_errors(path, "not a readable HDF5 file"):
        file = h5py.File(path, "r")
    with file:
        _check_header(path, file, format_name, version)
        yield file


def read_attribute(path: Path, file: h5py.File, name: str) -> str:
    """Read a text attribute of the file."""
    value = _attribute(path, file, name)
    if not isinstance(value, str):
        raise BadInput(path, f"attribute {name!r} is absent or no text", "write the profile again")
    return value


def read_table(path: Path, file: h5py.File, name: str, columns: Mapping[str, Column]) -> Table:
    """Read a table, refusing links, other columns, dtypes, units or lengths, and values that cannot be."""
    with _h5py_errors(path, f"table {name} is not readable"):
        group = _hard_linked(path, file, name, h5py.Group)
        if set(group) != set(columns):
            odd = sorted(set(group) ^ set(columns))
            raise BadInput(path, f"table {name} has missing or unknown columns {odd}", "write the profile again")
    table = {column: _read_column(path, file, f"{name}/{column}", spec) for column, spec in columns.items()}
    if (problem := _problem(columns, table)) is not None:
        raise BadInput(path, f"table {name}: {problem}", "measure that point again")
    return table


@contextmanager
def _h5py_errors(path: Path, what: str) -> Iterator[None]:
    """Turn what h5py raises over a damaged file into one line; only h5py calls belong inside."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise BadInput(path, f"{what} ({error})", "write the profile again") from None


def _check_header(path: Path, file: h5py.File, format_name: str, version: int) -> None:
    found = _attribute(path, file, "format")
    if not isinstance(found, str) or found != format_name:
        raise BadInput(path, f"format is {found!r}, not {format_name}", "pass a file of that format")
    number = _attribute(path, file, "version")
    if isinstance(number, np.integer):
        number = int(number)
    if type(number) is not int or number != version:
        raise BadInput(
            path,
            f"version {number!r} of {format_name} is unknown here, only {version} is read",
            "write the file again with this version of shardwright",
        )


def _attribute(path: Path, holder: h5py.File | h5py.Dataset, name: str) -> object:
    """An attribute's value, or None; attributes are small, so a big one is refused unread."""
    with _h5py_errors(path, f"attribute {name!r} is not readable"):
        if name not in holder.attrs:
            return None
        if holder.attrs.get_id(name).get_storage_size() > _MOST_ATTRIBUTE_BYTES:
            raise BadInput(path, f"attribute {name!r} is larger than 64 KiB", "write the profile again")
        value: object = holder.attrs[name]
        return value


def _read_column(path: Path, file: h5py.File, where: str, spec: Column) -> NDArray[Any]:
    with _h5py_errors(path, f"{where} is not readable"):
        dataset = _hard_linked(path, file, where, h5py.Dataset)
        dtype, shape = dataset.dtype, dataset.shape
    if dtype != np.dtype(spec.dtype):
        raise BadInput(path, f"{where} has dtype {dtype}, not {spec.dtype}", "write the profile again")
    unit = _attribute(path, dataset, "unit")
    if not isinstance(unit, str) or unit != spec.unit:
        raise BadInput(path, f"{where} has unit {unit!r}, not {spec.unit!r}", "convert it")
    if shape is None or len(shape) != 1 or shape[0] > _MOST_ROWS:
        raise BadInput(path, f"{where} has shape {shape}, not that of a column", "write the profile again")
    with _h5py_errors(path, f"{where} is not readable"):
        if (problem := _stored_elsewhere(dataset)) is not None:
            raise BadInput(path, f"{where} {problem}", "write the profile again")
        values: NDArray[Any] = dataset[()]
        return values


def _stored_elsewhere(dataset: h5py.Dataset) -> str | None:
    """Why a dataset's values are not simply there in the file, or None when they are.

    A declared shape costs a hostile file nothing, so only values that take their full room in the file are read.
    """
    if dataset.external or dataset.is_virtual:
        return "lies in another file"
    creation = dataset.id.get_create_plist()
    filters = {creation.get_filter(i)[0] for i in range(creation.get_nfilters())}
    if filters - {h5py.h5z.FILTER_FLETCHER32}:
        return "is compressed or filtered"
    if dataset.id.get_storage_size() < dataset.nbytes:
        return f"declares {dataset.nbytes} bytes and stores {dataset.id.get_storage_size()}"
    return None


def _hard_linked(path: Path, file: h5py.File, name: str, kind: type) -> h5py.Group | h5py.Dataset:
    walked = file
    for part in name.split("/"):
        link = walked.get(part, getlink=True)
        if link is None:
            raise BadInput(path, f"{name} is missing", "write the profile again")
        if not isinstance(link, h5py.HardLink):
            raise BadInput(path, f"{name} is a link to elsewhere", "write the profile again")
        walked = walked[part]
    if not isinstance(walked, kind):
        raise BadInput(path, f"{name} is no {kind.__name__.lower()}", "write the profile again")
    return walked


def _exactly(where: str, values: ArrayLike, dtype: str) -> NDArray[Any]:
    """The values in another dtype; ValueError where a text would be cut off or a number changed."""
    given = np.asarray(values)
    with np.errstate(invalid="ignore"):
        made = given.astype(dtype)
        if not np.array_equal(made.astype(given.dtype), given, equal_nan=given.dtype.kind == "f"):
            raise ValueError(f"{where}: values do not fit {dtype}")
    return made


def _problem(columns: Mapping[str, Column], table: Mapping[str, NDArray[Any]]) -> str | None:
    if any(values.ndim != 1 for values in table.values()):
        return "a column is no list of values"
    if len({len(values) for values in table.values()}) > 1:
        return "columns of different lengths"
    for name, spec in columns.items():
        problem = _text_problem if np.dtype(spec.dtype).kind == "S" else _number_problem
        if (found := problem(spec, table[name])) is not None:
            return f"{name} is {found}"
    return _absent_problem(columns, table)


def _text_problem(spec: Column, values: NDArray[Any]) -> str | None:
    for row, value in enumerate(values.tolist()):
        if not value.isascii():
            return f"{value!r} in row {row}, not ASCII"
        if spec.among and value.decode() not in spec.among:
            return f"{value.decode()!r} in row {row}, not one of {', '.join(spec.among)}"
    return None


def _number_problem(spec: Column, values: NDArray[Any]) -> str | None:
    numbers = values.astype(np.float64)
    below = (numbers <= 0) if spec.positive else (numbers < 0) & (not spec.signed)
    bad = ~np.isfinite(numbers) | below
    if not bad.any():
        return None
    row = int(np.flatnonzero(bad)[0])
    wanted = "finite" if spec.signed else f"{'positive' if spec.positive else 'non-negative'} and finite"
    return f"{values[row]} in row {row}, not {wanted}"


def _absent_problem(columns: Mapping[str, Column], table: Mapping[str, NDArray[Any]]) -> str | None:
    for name, spec in columns.items():
        if spec.sourced_by:
            odd = np.flatnonzero((table[spec.sourced_by] == b"absent") & (table[name] != 0))
            if len(odd):
                return f"{name} is {table[name][odd[0]]} in row {odd[0]}, where {spec.sourced_by} says absent"
    return None
