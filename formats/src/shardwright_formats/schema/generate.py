"""Writes what is generated from the contract's types: the JSON Schemas and docs/formats.md.

python -m shardwright_formats.schema.generate            # write them, in the repository's root
python -m shardwright_formats.schema.generate --check    # exit 1, naming each file that is not up to date
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright_formats import types
from shardwright_formats.io import BadInput, Document, one_line_errors, write_bytes
from shardwright_formats.schema import reference

DOCUMENTS: tuple[type[Document], ...] = (
    *(types.Model, types.Cluster, types.Plan, types.Plans, types.Prediction, types.Certificate, types.Measurement),
    *(types.Correction, types.RunResult, types.StopNote, types.Replanned, types.ExpertLoad),
)
"""Every kind of JSON file, in the order of the documentation."""


def json_schema(kind: type[Document]) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a file of this kind, its `format` and `version` included.

    Cross-field checks are not in it: a file that fits may still be refused when it is read.
    """
    components = reference.described_components(kind)
    root = components.pop(kind.__name__)
    header = {"format": {"const": kind.FORMAT}, "version": {"const": kind.VERSION}}
    root["properties"] = header | root["properties"]
    root["required"] = [*header, *root["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": components}


def generated() -> dict[str, str]:
    """Return the text of every generated file, by its path from the repository's root."""
    schemas = {kind: json_schema(kind) for kind in DOCUMENTS}
    texts = {"docs/formats.md": reference.markdown(schemas)}
    for kind, schema in schemas.items():
        name = kind.FORMAT.removeprefix("shardwright.")
        texts[f"formats/schemas/{name}.schema.json"] = json.dumps(schema, indent=1) + "\n"
    return texts


def write_or_check(command: str, texts: Mapping[str, str], arguments: Sequence[str] | None = None) -> int:
    """Write generated files, or with --check name those that are not up to date; returns the exit code."""
    parser = argparse.ArgumentParser(prog=command, description=f"Writes {', '.join(texts)}.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not up to date")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository's root (default: this folder)")
    options = parser.parse_args(arguments)
    with one_line_errors():
        if not (options.root / "formats" / "pyproject.toml").is_file():
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
    """Write or check the files of the contract."""
    return write_or_check("python -m shardwright_formats.schema.generate", generated(), arguments)


if __name__ == "__main__":
    sys.exit(main())
