"""Writes the JSON Schemas of search, grid and offers files, which are generated from their types.

python -m shardwright_search.space.schema            # write them, in the repository's root
python -m shardwright_search.space.schema --check    # exit 1 if they are not up to date
"""

import json
import sys
from collections.abc import Sequence

from shardwright_formats.schema.generate import json_schema, write_or_check
from shardwright_search.space.grid import Grid, GridAnswers
from shardwright_search.space.offers import Offers
from shardwright_search.space.request import SearchRequest

_FOLDER = "stages/search/schemas"
_KINDS = (SearchRequest, Grid, GridAnswers, Offers)


def generated() -> dict[str, str]:
    """The schemas' texts by path, from the repository's root."""
    names = {kind: kind.FORMAT.removeprefix("shardwright.") for kind in _KINDS}
    return {
        f"{_FOLDER}/{name}.schema.json": json.dumps(json_schema(kind), indent=1) + "\n" for kind, name in names.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the schemas; returns the exit code."""
    return write_or_check("python -m shardwright_search.space.schema", generated(), arguments)


if __name__ == "__main__":
    sys.exit(main())
