"""Writes what is generated from the contract's types: the JSON Schemas and docs/formats.md.

python -m shardwright_formats.schema.generate            # write them, in the repository's root
python -m shardwright_formats.schema.generate --check    # exit 1, naming each file that is not up to date
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from shardwright_formats.io import Document
from shardwright_formats.schema import reference
from shardwright_formats.schema.writing import write_or_check
from shardwright_formats.types.certificate import Certificate
from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.correction import Correction
from shardwright_formats.types.measurement import Measurement
from shardwright_formats.types.model import Model
from shardwright_formats.types.plan import Plan, Plans
from shardwright_formats.types.prediction import Prediction
from shardwright_formats.types.run import Replanned, RunResult, StopNote

DOCUMENTS: tuple[type[Document], ...] = (
    *(Model, Cluster, Plan, Plans, Prediction, Certificate, Measurement, Correction),
    *(RunResult, StopNote, Replanned),
)
"""Every kind of JSON file, in the order of the documentation."""


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
    """Write or check the files of the contract."""
    return write_or_check("python -m shardwright_formats.schema.generate", generated(), arguments)


if __name__ == "__main__":
    sys.exit(main())
