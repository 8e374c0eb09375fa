"""Writes the JSON Schema of search files, which is generated from their type.

python -m shardwright_search.space.schema            # write it, in the repository's root
python -m shardwright_search.space.schema --check    # exit 1 if it is not up to date
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwright_formats.io.errors import BadInput, one_line_errors
from shardwright_formats.io.json import write_bytes
from shardwright_formats.schema.generate import json_schema
from shardwright_search.space.request import SearchRequest

__all__ = ["SCHEMA", "generated", "main"]

SCHEMA = Path("stages/search/schemas/search.schema.json")
"""From the repository's root."""

_COMMAND = "python -m shardwright_search.space.schema"


def generated() -> bytes:
    """The schema's text."""
    return (json.dumps(json_schema(SearchRequest), indent=1) + "\n").encode()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the schema; returns the exit code."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=f"Writes {SCHEMA}.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it is not up to date")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository's root (default: this folder)")
    options = parser.parse_args(arguments)
    path = options.root / SCHEMA
    with one_line_errors():
        if not (options.root / "stages" / "search" / "pyproject.toml").is_file():
            raise BadInput(options.root, "is not the repository's root", "run there, or pass --root")
        stale = not path.is_file() or path.read_bytes() != generated()
        if stale and options.check:
            print(f"error: {path}: not what the type says: run `{_COMMAND}`", file=sys.stderr)
        elif stale:
            write_bytes(path, generated())
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
