"""Tables of columns in HDF5, written reproducibly and read with suspicion."""

from collections.abc import Mapping
from contextlib import contextmanager
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from shardwright_formats.errors import BadInput
from shardwright_formats.files import atomic_path

__all__ = ["Column", "Table", "open_profile", "read_table", "write_profile", "write_table"]

Table = dict[str, NDArray[Any]]

_MOST_ROWS = 10_000_000


class Column(NamedTuple):
    """What one column of a table holds: `unit` is written beside it, `least` bounds its values.

    `least` 0 allows zero; `positive` does not.
    """

    dtype: str
    unit: str
    positive: bool = False


@contextmanager
def write_profile(path: Path, format_name: str, version: int, attributes: Mapping[str, str]) -> Iterator[h5py.File]:
    """Yield a new HDF5 file that takes the name `path` when it is complete; equal content gives equal bytes."""
    with atomic_path(path) as temporary, h5py.File(temporary, "w", libver="v110", track_order=True) as file:
        file.attrs["format"] = format_name
        file.attrs["version"] = np.int64(version)
        for name, value in attributes.items():
            file.attrs[name] = value
        yield file


def write_table(file: h5py.File, name: str, columns: Mapping[str, Column], table: Mapping[str, Any]) -> None:
    """Write a table as a group of equally long, checksummed datasets with their units.

    Raises ValueError when a value could not be read back: wrong length, not finite, negative.
    """
    checked = {column: np.asarray(table[column], dtype=spec.dtype) for column, spec in columns.items()}
    if set(table) != set(columns) or (problem := _problem(columns, checked)):
        raise ValueError(f"table {name}: {problem if set(table) == set(columns) else 'columns differ'}")
    group = file.create_group(name, track_order=True)
    for column, spec in columns.items():
        dataset = group.create_dataset(
            column, data=checked[column], chunks=(max(1, len(checked[column])),), fletcher32=True, track_times=False
        )
        dataset.attrs["unit"] = spec.unit


@contextmanager
def open_profile(path: Path, format_name: str, version: int) -> Iterator[h5py.File]:
    """Open an HDF5 profile for reading.

    Raises BadInput when it is no HDF5 file, is truncated, or has another format or version.
    """
    if not path.is_file():
        raise BadInput(path, "no such file", "check the path")
    try:
        with h5py.File(path, "r") as file:
            _check_header(path, file, format_name, version)
            yield file
    except (OSError, RuntimeError, KeyError) as error:
        raise BadInput(path, f"not a readable HDF5 file ({error})", "write the profile again") from None


def read_attribute(path: Path, file: h5py.File, name: str) -> str:
    """Read a text attribute of the file."""
    value = file.attrs.get(name)
    if not isinstance(value, str):
        raise BadInput(path, f"attribute {name!r} is absent or no text", "write the profile again")
    return value


def read_table(path: Path, file: h5py.File, name: str, columns: Mapping[str, Column]) -> Table:
    """Read a table, refusing links, other columns, dtypes, units or lengths, and values that cannot be."""
    group = _hard_linked(path, file, name, h5py.Group)
    if set(group) != set(columns):
        odd = sorted(set(group) ^ set(columns))
        raise BadInput(path, f"table {name} has missing or unknown columns {odd}", "write the profile again")
    table: Table = {}
    for column, spec in columns.items():
        where = f"{name}/{column}"
        dataset = _hard_linked(path, file, where, h5py.Dataset)
        if dataset.dtype != np.dtype(spec.dtype):
            raise BadInput(path, f"{where} has dtype {dataset.dtype}, not {spec.dtype}", "write the profile again")
        if dataset.attrs.get("unit") != spec.unit:
            raise BadInput(path, f"{where} has unit {dataset.attrs.get('unit')!r}, not {spec.unit!r}", "convert it")
        if dataset.ndim != 1 or dataset.shape[0] > _MOST_ROWS or dataset.external or dataset.is_virtual:
            raise BadInput(path, f"{where} has shape {dataset.shape} or lies elsewhere", "write the profile again")
        table[column] = dataset[()]
    if problem := _problem(columns, table):
        raise BadInput(path, f"table {name}: {problem}", "measure that point again")
    return table


def _check_header(path: Path, file: h5py.File, format_name: str, version: int) -> None:
    found = file.attrs.get("format")
    if found != format_name:
        raise BadInput(path, f"format is {found!r}, not {format_name}", "pass a file of that format")
    number = file.attrs.get("version")
    if not isinstance(number, np.integer) or number != version:
        raise BadInput(
            path,
            f"version {number!r} of {format_name} is unknown here, only {version} is read",
            "write the file again with this version of shardwright",
        )


def _hard_linked(path: Path, file: h5py.File, name: str, kind: type) -> Any:
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


def _problem(columns: Mapping[str, Column], table: Mapping[str, NDArray[Any]]) -> str | None:
    lengths = {len(values) for values in table.values()}
    if len(lengths) > 1:
        return "columns of different lengths"
    for name, spec in columns.items():
        values = table[name]
        if values.dtype.kind == "S":
            continue
        bad = ~np.isfinite(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)
        bad |= (values <= 0) if spec.positive else (values < 0)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            rule = "positive and finite" if spec.positive else "non-negative and finite"
            return f"{name} is {values[row]} in row {row}, not {rule}"
    return None
