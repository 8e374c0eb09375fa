"""Writes the JSON Schemas of search, grid and offers files, which are generated from their types.

python -m shardwright_search.space.schema            # write them, in the repository's root
python -m shardwright_search.space.schema --check    # exit 1 if they are not up to date
"""

import json
import sys
from collections.abc import Sequence

from shardwright.schema.generate import json_schema, write_or_check
from shardwright_search.space.request import Grid, GridAnswers, Offers, SearchRequest


def generated() -> dict[str, str]:
    """Return the schemas' texts by path, from the repository's root."""
    kinds = {kind.FORMAT.removeprefix("shardwright."): kind for kind in (SearchRequest, Grid, GridAnswers, Offers)}
    return {
        f"stages/search/schemas/{name}.schema.json": json.dumps(json_schema(kind), indent=1) + "\n"
        for name, kind in kinds.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the schemas; return the exit code."""
    return write_or_check("python -m shardwright_search.space.schema", generated(), arguments)


if __name__ == "__main__":
    sys.exit(main())
