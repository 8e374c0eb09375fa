"""Writes the JSON Schemas in core/schemas from the types of the files.

python -m shardwright.schema.generate            # write them, in the repository's root
python -m shardwright.schema.generate --check    # exit 1, naming each file that is not up to date
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import msgspec

from shardwright import types
from shardwright.io import BadInput, Document, one_line_errors, write_bytes
from shardwright.schema.field_docs import class_doc, field_docs

DOCUMENTS: tuple[type[Document], ...] = (
    *(types.Model, types.Cluster, types.Plan, types.Plans, types.Prediction, types.Certificate, types.Measurement),
    *(types.Correction, types.RunResult, types.StopNote, types.Replanned, types.ExpertLoad),
)
"""Every kind of JSON file, in the order of the documentation."""


def json_schema(kind: type[Document]) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a kind of file, including `format` and `version`.

    It does not contain checks across fields: a file that is valid by the schema may still be refused when it is read.
    """
    components = _described_components(kind)
    root = components.pop(kind.__name__)
    header = {"format": {"const": kind.FORMAT}, "version": {"const": kind.VERSION}}
    root["properties"] = header | root["properties"]
    root["required"] = [*header, *root["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": components}


def _described_components(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schemas of a struct and of every type inside it, by name, with docstrings as descriptions."""
    _, components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    known = _types_of(kind)
    for name, component in components.items():
        found, meanings = known[name], field_docs(known[name])
        component["description"] = class_doc(found)
        if issubclass(found, Enum) and meanings:
            values = (f"{member.value}: {meanings[member.name]}" for member in found)
            component["description"] += "\n\n" + "\n".join(values)
        for field in msgspec.structs.fields(found) if "properties" in component else ():
            if field.name in meanings:
                component["properties"][field.encode_name]["description"] = meanings[field.name]
    return components


def _types_of(kind: type) -> dict[str, type]:
    """Return a struct, and every struct and enumeration that its fields contain, by name."""
    kinds_by_name: dict[str, type] = {}
    waiting: list[Any] = [kind]
    while waiting:
        kind = waiting.pop()
        waiting += get_args(kind)
        if isinstance(kind, type) and kind.__module__.startswith("shardwright") and kind.__name__ not in kinds_by_name:
            kinds_by_name[kind.__name__] = kind
            if issubclass(kind, msgspec.Struct):
                waiting += [field.type for field in msgspec.structs.fields(kind)]
    return kinds_by_name


def generated() -> dict[str, str]:
    """Return the text of every generated file, by its path from the repository's root."""
    return {
        f"core/schemas/{kind.FORMAT.removeprefix('shardwright.')}.schema.json": json.dumps(json_schema(kind), indent=1)
        + "\n"
        for kind in DOCUMENTS
    }


def write_or_check(command: str, texts: Mapping[str, str], arguments: Sequence[str] | None = None) -> int:
    """Write generated files, or with --check report outdated ones; return the exit code."""
    parser = argparse.ArgumentParser(prog=command, description=f"Writes {', '.join(texts)}.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not up to date")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository's root (default: this folder)")
    options = parser.parse_args(arguments)
    with one_line_errors():
        if not (options.root / "core" / "pyproject.toml").is_file():
            raise BadInput(options.root, "is not the repository's root", "run there, or pass --root")
        paths = {options.root / path: text.encode() for path, text in texts.items()}
        stale = {path: text for path, text in paths.items() if not path.is_file() or path.read_bytes() != text}
        for path, text in stale.items():
            if options.check:
                print(f"error: {path}: not what the types say: run `{command}`", file=sys.stderr)
            else:
                write_bytes(path, text)
    return 1 if options.check and stale else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the JSON Schemas of all files."""
    return write_or_check("python -m shardwright.schema.generate", generated(), arguments)


if __name__ == "__main__":
    sys.exit(main())
