"""Generated files: written, or checked to be up to date."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwright_formats.io import BadInput, one_line_errors, write_bytes


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
