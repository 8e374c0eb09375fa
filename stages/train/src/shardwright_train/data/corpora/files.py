"""The files that a corpus consists of."""

import sysconfig
from pathlib import Path
from typing import NamedTuple

from shardwright_formats.io import BadInput

PYTHON_STDLIB = "python-stdlib"
_NOT_STDLIB = frozenset({"__pycache__", "dist-packages", "site-packages", "test", "tests"})


class Files(NamedTuple):
    """The files of a corpus, in the order of their names."""

    source: Path
    glob: str
    paths: tuple[Path, ...]

    @property
    def size(self) -> int:
        """Return the total length of the files in bytes."""
        return sum(path.stat().st_size for path in self.paths)

    @property
    def identity(self) -> list[object]:
        """Return the names, sizes and modification times of the files."""
        found = [(str(path.resolve()), path.stat()) for path in self.paths]
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]


def find_files(text: str, glob: str) -> Files:
    """Return a single file, the matching files of a folder, or Python's own sources without their tests.

    Raises BadInput where there are none.
    """
    source = Path(sysconfig.get_path("stdlib") if text == PYTHON_STDLIB else text)
    if source.is_file():
        return Files(source, glob, (source,))
    if not source.is_dir():
        raise BadInput(source, "is no file and no folder", f"pass a text file, a folder of them, or {PYTHON_STDLIB}")
    paths = _matching(source, glob, _NOT_STDLIB if text == PYTHON_STDLIB else frozenset())
    if not paths:
        raise BadInput(source, f"no text in files {glob!r}", "check --text and --glob")
    return Files(source, glob, paths)


def _matching(folder: Path, glob: str, unwanted: frozenset[str]) -> tuple[Path, ...]:
    try:
        found = {path.relative_to(folder).parts: path for path in folder.rglob(glob) if path.is_file()}
    except (NotImplementedError, ValueError) as error:
        what = f"--glob {glob!r} cannot be matched ({error})"
        raise BadInput(folder, what, "pass a pattern such as '*.txt'") from None
    return tuple(found[parts] for parts in sorted(found) if not unwanted & set(parts))
