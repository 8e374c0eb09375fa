"""Writes the JSON Schema of search files, which is generated from their type.

python -m shardwright_search.space.schema            # write it, in the repository's root
python -m shardwright_search.space.schema --check    # exit 1 if it is not up to date
"""

import json
import sys
from collections.abc import Sequence

from shardwright_formats.schema.generate import json_schema
from shardwright_formats.schema.writing import write_or_check
from shardwright_search.space.request import SearchRequest

SCHEMA = "stages/search/schemas/search.schema.json"
"""From the repository's root."""


def generated() -> str:
    """The schema's text."""
    return json.dumps(json_schema(SearchRequest), indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the schema; returns the exit code."""
    return write_or_check("python -m shardwright_search.space.schema", {SCHEMA: generated()}, arguments)


if __name__ == "__main__":
    sys.exit(main())
