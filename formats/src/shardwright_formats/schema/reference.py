"""docs/formats.md: every file's fields or columns, with their types, units and meanings."""

from collections.abc import Iterable, Iterator, Mapping
from math import log2
from typing import Any, get_args

import msgspec

from shardwright_formats.io import Document
from shardwright_formats.io.hdf5 import Profile, tables_of, texts_of
from shardwright_formats.io.table import Column, columns_of
from shardwright_formats.schema.field_docs import class_doc, field_docs
from shardwright_formats.types import StepMetrics
from shardwright_formats.types.hardware_profile import HardwareProfile
from shardwright_formats.types.model_profile import ModelProfile

_INTRODUCTION = """\
# File formats

Written by `python -m shardwright_formats.schema.generate` from the types in `formats/`; change those, not this page.

JSON files are UTF-8 objects headed by `format` and `version`. Readers refuse another version, unknown and repeated
keys, wrong types, NaN and infinities, and what contradicts itself across fields. A field without a default must be
there. The JSON Schemas in `formats/schemas/` say all of it but the checks across fields; `formats/examples/` holds an
example of every file. Equal values are written as equal bytes, through a temporary name that is renamed at the end. An
input is a regular file, JSON of at most 256 MiB, HDF5 of at most 1 GiB.
"""
_LARGE = 2**20
"""The number from which on limits are powers of two, or 1 less."""
_PROFILES: tuple[type[Profile], ...] = (HardwareProfile, ModelProfile)
_HDF5_INTRODUCTION = """\
## HDF5 files

The file's attributes are `format` (text), `version` (int64) and the texts named below. A table is a group; its columns
are equally long one-dimensional datasets with a text attribute `unit` and a Fletcher-32 checksum: int64, float64, int8
for truth values (0 or 1), and ASCII text of a fixed length. No number is infinite or NaN; one whose source is `absent`
is 0, and nobody knows it. Readers refuse links, values in other files, compressed or absent values, and other columns,
dtypes or units.
"""


def markdown(schemas: Mapping[type[Document], Mapping[str, Any]]) -> str:
    """Return the whole page: documents with their JSON Schemas, the types they are made of, HDF5 profiles."""
    shared: dict[str, Any] = {}
    blocks = [_INTRODUCTION, "## JSON files\n", _overview(schemas)]
    for kind, schema in schemas.items():
        name = kind.FORMAT.removeprefix("shardwright.")
        properties = {
            field: entry for field, entry in schema["properties"].items() if field not in ("format", "version")
        }
        blocks += [f"### {name}\n", f"{schema['description']}\n", _fields(properties, schema["required"])]
        shared |= schema["$defs"]
    row_types = [row_type for profile in _PROFILES for row_type in tables_of(profile).values()]
    others: list[type[msgspec.Struct]] = [StepMetrics, *row_types]
    for other in others:
        shared |= described_components(other)
    for name in (struct.__name__ for struct in (*schemas, *row_types)):
        shared.pop(name, None)
    blocks.append("## Types inside them\n")
    known = _types_of([*schemas, StepMetrics, *row_types])
    for title, entry in sorted(shared.items()):
        blocks += [f"### {title}\n", f"{entry['description']}\n"]
        blocks.append(_members(known[title]) if "enum" in entry else _fields(entry["properties"], entry["required"]))
    blocks.append(_HDF5_INTRODUCTION)
    for profile in _PROFILES:
        blocks += _profile(profile)
    return "\n".join(blocks)


def _types_of(kinds: Iterable[type]) -> dict[str, type]:
    """Return the given structs and every struct and enumeration that their fields are made of, by name."""
    kinds_by_name: dict[str, type] = {}
    waiting: list[Any] = list(kinds)
    while waiting:
        kind = waiting.pop()
        waiting += get_args(kind)
        if isinstance(kind, type) and kind.__module__.startswith("shardwright_") and kind.__name__ not in kinds_by_name:
            kinds_by_name[kind.__name__] = kind
            if issubclass(kind, msgspec.Struct):
                waiting += [field.type for field in msgspec.structs.fields(kind)]
    return kinds_by_name


def described_components(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schemas of a struct and of every type inside it, by name, with their meanings as descriptions."""
    _, components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    known = _types_of([kind])
    for name, component in components.items():
        component["description"] = class_doc(known[name])
        meanings, properties = field_docs(known[name]), component.get("properties", {})
        for field in msgspec.structs.fields(known[name]) if properties else ():
            if field.name in meanings:
                properties[field.encode_name]["description"] = meanings[field.name]
    return components


def _overview(schemas: Mapping[type[Document], Mapping[str, Any]]) -> str:
    rows = []
    for kind in schemas:
        name = kind.FORMAT.removeprefix("shardwright.")
        links = f"[schema](../formats/schemas/{name}.schema.json) | [example](../formats/examples/{name}.json)"
        rows.append(f"| [{name}](#{name}) | `{kind.FORMAT}` | {kind.VERSION} | {links} |")
    return _table("| file | format | version | schema | example |", rows)


def _fields(properties: Mapping[str, Any], required: Iterable[str]) -> str:
    needed = set(required)
    rows = []
    for field, schema in properties.items():
        default = "" if field in needed else f"`{_spelled(schema.get('default'))}`"
        rows.append(f"| `{field}` | {_type(schema)} | {default} | {schema.get('description', '')} |")
    return _table("| field | type | default | meaning |", rows)


def _members(kind: type) -> str:
    meanings = field_docs(kind)
    members = msgspec.inspect.type_info(kind)
    assert isinstance(members, msgspec.inspect.EnumType)
    rows = [f'| `"{member.value}"` | {meanings.get(member.name, "")} |' for member in members.cls]
    return _table("| value | meaning |", rows)


def _type(schema: Mapping[str, Any]) -> str:
    """Return a JSON Schema in a few words."""
    match schema:
        case {"$ref": target}:
            title = target.rpartition("/")[2]
            return f"[{title}](#{title.lower()})"
        case {"anyOf": options}:
            return " or ".join(_type(option) for option in options)
        case {"enum": values}:
            return ", ".join(f'`"{value}"`' for value in values)
        case {"type": "array", "prefixItems": items}:
            return f"list of {len(items)}: {', '.join(_type(item) for item in items)}"
        case {"type": "array", "items": item}:
            return f"{'non-empty ' if schema.get('minItems') else ''}list of {_type(item)}"
        case {"type": "object", "additionalProperties": dict(item)}:
            return f"object: name to {_type(item)}"
        case {"type": "string"}:
            return "non-empty text" if schema.get("minLength") else "text"
        case {"type": str(name)}:
            return " ".join([name, " and ".join(_limits(schema))]).rstrip()
    raise ValueError(f"no words for the schema {schema}")


def _spelled(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _limits(schema: Mapping[str, Any]) -> Iterator[str]:
    for key, word in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<")):
        if key in schema:
            yield f"{word} {schema[key]:g}" if schema[key] < _LARGE else f"{word} 2^{log2(schema[key]):.0f}"


def _profile(kind: type[Profile]) -> Iterator[str]:
    yield f"### {kind.FORMAT}, version {kind.VERSION}\n"
    yield f"{class_doc(kind)}\n"
    yield f"Attributes: {', '.join(f'`{name}`' for name in texts_of(kind))}.\n"
    for name, row_type in tables_of(kind).items():
        yield f"Table `{name}`: {class_doc(row_type)}\n"
        properties = described_components(row_type)[row_type.__name__]["properties"]
        rows = (_column(name, column, properties[name]) for name, column in columns_of(row_type).items())
        yield _table("| column | type | unit | meaning |", rows)


def _column(name: str, column: Column, schema: Mapping[str, Any]) -> str:
    text = column.dtype.kind == "S"
    unit = "" if text or column.dtype == "int8" else column.unit
    length = f" of at most {column.dtype.itemsize} bytes" if text and "$ref" not in schema else ""
    source = f" Source: `{column.source}`." if column.source else ""
    return f"| `{name}` | {_type(schema)}{length} | {unit} | {schema.get('description', '')}{source} |"


def _table(head: str, rows: Iterable[str]) -> str:
    rule = "|" + " --- |" * (head.count("|") - 1)
    return "\n".join([head, rule, *rows]) + "\n"
