"""Writes what is generated from the contract's types: the JSON Schemas and docs/formats.md.

python -m shardwright_formats.schema.generate            # write them, in the repository's root
python -m shardwright_formats.schema.generate --check    # exit 1, naming each file that is not up to date
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwright_formats.io.errors import BadInput, one_line_errors
from shardwright_formats.io.json import Document, write_bytes
from shardwright_formats.schema import reference
from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.correction import Correction
from shardwright_formats.types.measurement import Measurement
from shardwright_formats.types.model import Model
from shardwright_formats.types.plan import Plan, Plans
from shardwright_formats.types.prediction import Prediction
from shardwright_formats.types.run import RunResult

DOCUMENTS: tuple[type[Document], ...] = (Model, Cluster, Plan, Plans, Prediction, Measurement, Correction, RunResult)
"""Every kind of JSON file, in the order of the documentation."""

_COMMAND = "python -m shardwright_formats.schema.generate"


def json_schema(kind: type[Document]) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a file of this kind, its `format` and `version` included.

    Cross-field checks are not in it: a file that fits may still be refused when it is read.
    """
    components = reference.described_components(kind)
    root = components.pop(kind.__name__)
    header = {"format": {"const": kind.FORMAT}, "version": {"const": kind.VERSION}}
    root["properties"] = header | root["properties"]
    root["required"] = [*header, *root["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": components}


def generated() -> dict[str, str]:
    """Text of every generated file, by its path from the repository's root."""
    schemas = {kind: json_schema(kind) for kind in DOCUMENTS}
    texts = {"docs/formats.md": reference.markdown(schemas)}
    for kind, schema in schemas.items():
        name = kind.FORMAT.removeprefix("shardwright.")
        texts[f"formats/schemas/{name}.schema.json"] = json.dumps(schema, indent=1) + "\n"
    return texts


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the generated files; returns the exit code."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description="Writes formats/schemas/ and docs/formats.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not up to date")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository's root (default: this folder)")
    options = parser.parse_args(arguments)
    with one_line_errors():
        if not (options.root / "formats" / "pyproject.toml").is_file():
            raise BadInput(options.root, "is not the repository's root", "run there, or pass --root")
        stale = [
            (options.root / path, text) for path, text in generated().items() if _differs(options.root / path, text)
        ]
        for path, text in stale:
            if options.check:
                print(f"error: {path}: not what the types say: run `{_COMMAND}`", file=sys.stderr)
            else:
                write_bytes(path, text.encode())
    return 1 if options.check and stale else 0


def _differs(path: Path, text: str) -> bool:
    return not path.is_file() or path.read_bytes() != text.encode()


if __name__ == "__main__":
    sys.exit(main())
