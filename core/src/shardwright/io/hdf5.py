"""Profiles in HDF5, generated from a profile's fields: written reproducibly, and read with full validation."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import h5py
import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwright.io.errors import WRITE_AGAIN, BadInput, has_controls
from shardwright.io.json import Value, check_regular, checked_header, write_bytes
from shardwright.io.table import Column, Row, Table, columns_of

_MAX_BYTES = 2**30
OPTIONAL = MappingProxyType({"optional": True})
"""Metadata of a table's field that means that files may omit the table."""
_MAX_ROWS = 10_000_000
_MAX_ATTRIBUTE_BYTES = 64 * 1024


class Provenance(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Creation date, software and notes of a profile."""

    date: str
    """UTC day, such as 2026-01-31; if several files were joined, the latest day."""
    versions: str
    """Versions of the software and of the device's driver during the measurement, such as `torch 2.13.0, driver
    550.54`."""
    notes: str = ""
    """Sources, assumptions and defects, one sentence per line."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """A value stored as an HDF5 file: its fields are strings, structs of strings, and tables.

    A table whose field is `OPTIONAL` may be missing in a file; it is not written if it has no rows.
    """

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int]

    @property
    def problem(self) -> str | None:
        """Return a contradiction in the profile's tables, or None."""
        return None


ProfileType = TypeVar("ProfileType", bound=Profile)


def tables_of(kind: type[Profile]) -> dict[str, type[Row]]:
    """Return the row types of a profile's tables, by the table's name."""
    return {name: get_args(hint)[0] for name, hint in _fields(kind).items() if get_origin(hint) is Table}


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile; equal content gives equal bytes. Raise BadInput if its tables contradict each other."""
    if (problem := profile.problem) is not None:
        raise BadInput(path, problem, "measure these points again")
    # Written to memory first: HDF5 does not recover from a write that the system refuses.
    content = BytesIO()
    with h5py.File(content, "w", libver="v110", track_order=True) as file:
        file.attrs["format"] = profile.FORMAT
        file.attrs["version"] = np.int64(profile.VERSION)
        for name, hint in _fields(type(profile)).items():
            value = getattr(profile, name)
            if isinstance(value, Table):
                if len(value) or name not in _optional(type(profile)):
                    _write_table(file, name, value)
            else:
                file.attrs.update({name: value} if hint is str else _not_by_default(value))
    write_bytes(path, content.getvalue())


def read_profile(path: Path, kind: type[ProfileType]) -> ProfileType:
    """Read a profile; raise BadInput if any value is not valid."""
    with _opened(path) as file:
        _check_header(path, file, kind)
        values: dict[str, Any] = {}
        for name, hint in _fields(kind).items():
            if get_origin(hint) is Table:
                if name not in _optional(kind) or file.get(name, getlink=True) is not None:
                    values[name] = _read_table(path, file, name, *get_args(hint))
            elif hint is str:
                values[name] = _text(path, file, name)
            else:
                absent = {text for text in _defaults(hint) if text not in file.attrs}
                read = (text for text in hint.__struct_fields__ if text not in absent)
                values[name] = hint(**{text: _text(path, file, text) for text in read})
    profile = kind(**values)
    if (problem := profile.problem) is not None:
        raise BadInput(path, problem, "measure these points again")
    return profile


def format_of(path: Path) -> object:
    """Return the format that an HDF5 file declares, or None if it declares none; raise BadInput if it is unreadable."""
    with _opened(path) as file:
        return _attribute(path, file, "format")


def _fields(kind: type[Profile]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}


def _defaults(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the string fields that a file may omit, with their defaults."""
    fields = msgspec.structs.fields(kind)
    return {field.name: field.default for field in fields if field.default is not msgspec.NODEFAULT}


def _not_by_default(texts: msgspec.Struct) -> dict[str, Any]:
    defaults = _defaults(type(texts))
    return {name: text for name, text in msgspec.structs.asdict(texts).items() if defaults.get(name) != text}


def _optional(kind: type[Profile]) -> frozenset[str]:
    """Return the names of the tables that a file may omit."""
    return frozenset(field.name for field in fields(kind) if field.metadata == OPTIONAL)


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    check_regular(path, _MAX_BYTES)
    with _h5py_errors(path, "not a readable HDF5 file"):
        file = h5py.File(path, "r")
    with file:
        yield file


def _write_table(file: h5py.File, name: str, table: Table[Row]) -> None:
    """Write a table as a group of equally long, checksummed datasets with their units."""
    group = file.create_group(name, track_order=True)
    for column, spec in columns_of(table.row_type).items():
        values = table[column]
        # An empty dataset has no chunks that could have a checksum.
        stored = {"chunks": values.shape, "fletcher32": True} if len(values) else {}
        dataset = group.create_dataset(column, data=values, track_times=False, **stored)
        dataset.attrs["unit"] = spec.unit


def _read_table(path: Path, file: h5py.File, name: str, row_type: type[Row]) -> Table[Row]:
    """Read a table; refuse links, other columns, dtypes, units or lengths, and invalid values."""
    columns = columns_of(row_type)
    with _h5py_errors(path, f"table {name} is not readable"):
        group = _hard_linked(path, file, name, h5py.Group)
        if set(group) != set(columns):
            odd = sorted(set(group) ^ set(columns))
            raise BadInput(path, f"table {name} has missing or unknown columns {odd}", WRITE_AGAIN)
    values = {column: _read_column(path, file, f"{name}/{column}", spec) for column, spec in columns.items()}
    try:
        return Table(row_type, values)
    except ValueError as error:
        raise BadInput(path, f"table {name}: {error}", "measure that point again") from None


def _text(path: Path, file: h5py.File, name: str) -> str:
    value = _attribute(path, file, name)
    if not isinstance(value, str):
        raise BadInput(path, f"attribute {name!r} is absent or not a text", WRITE_AGAIN)
    if has_controls(value):
        raise BadInput(path, f"attribute {name!r} contains a control character", WRITE_AGAIN)
    return value


@contextmanager
def _h5py_errors(path: Path, problem: str) -> Iterator[None]:
    """Convert h5py's exceptions about a damaged file into a BadInput; only h5py calls belong inside."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise BadInput(path, f"{problem} ({error})", WRITE_AGAIN) from None


def _check_header(path: Path, file: h5py.File, kind: type[Profile]) -> None:
    version = _attribute(path, file, "version")
    number = int(version) if isinstance(version, np.integer) else version
    checked_header(path, _attribute(path, file, "format"), number, {kind.FORMAT: kind})


def _attribute(path: Path, holder: h5py.File | h5py.Dataset, name: str) -> object:
    """Return an attribute's value, or None if it is missing; a large attribute is refused without being read."""
    with _h5py_errors(path, f"attribute {name!r} is not readable"):
        if name not in holder.attrs:
            return None
        if holder.attrs.get_id(name).get_storage_size() > _MAX_ATTRIBUTE_BYTES:
            raise BadInput(path, f"attribute {name!r} is larger than 64 KiB", WRITE_AGAIN)
        value: object = holder.attrs[name]
        return value


def _read_column(path: Path, file: h5py.File, where: str, spec: Column) -> NDArray[Any]:
    with _h5py_errors(path, f"{where} is not readable"):
        dataset = _hard_linked(path, file, where, h5py.Dataset)
        dtype, shape = dataset.dtype, dataset.shape
    # The strings of a column become longer as kinds are added; in an older file the column is as wide as its strings
    # were.
    narrower = dtype.kind == spec.dtype.kind == "S" and dtype.itemsize < spec.dtype.itemsize
    if dtype != spec.dtype and not narrower:
        raise BadInput(path, f"{where} has dtype {dtype}, not {spec.dtype}", WRITE_AGAIN)
    unit = _attribute(path, dataset, "unit")
    if not isinstance(unit, str) or unit != spec.unit:
        raise BadInput(path, f"{where} has unit {unit!r}, not {spec.unit!r}", "convert it")
    if shape is None or len(shape) != 1 or shape[0] > _MAX_ROWS:
        raise BadInput(path, f"{where} has shape {shape}, not a column's", WRITE_AGAIN)
    with _h5py_errors(path, f"{where} is not readable"):
        if (problem := _stored_elsewhere(dataset)) is not None:
            raise BadInput(path, f"{where} {problem}", WRITE_AGAIN)
        values: NDArray[Any] = dataset[()]
        return values.astype(spec.dtype, copy=False)


def _stored_elsewhere(dataset: h5py.Dataset) -> str | None:
    """Return why the values of a dataset are not stored directly in the file; None if they are.

    Declaring a large shape costs a hostile file nothing, so a dataset is read only if its values really occupy their
    size in the file.
    """
    if dataset.external or dataset.is_virtual:
        return "is stored in another file"
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
            raise BadInput(path, f"{name} is missing", WRITE_AGAIN)
        if not isinstance(link, h5py.HardLink):
            raise BadInput(path, f"{name} is a link to elsewhere", WRITE_AGAIN)
        walked = walked[part]
    if not isinstance(walked, kind):
        raise BadInput(path, f"{name} is not a {kind.__name__.lower()}", WRITE_AGAIN)
    return walked
