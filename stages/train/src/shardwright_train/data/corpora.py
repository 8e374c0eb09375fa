"""The corpora that `prepare` reads: their source formats, their files, and the choice of a reader."""

import sysconfig
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shardwright_formats.io import BadInput
from shardwright_train.data import documents

_PYTHON_STDLIB = "python-stdlib"
_NOT_STDLIB = frozenset({"__pycache__", "dist-packages", "site-packages", "test", "tests"})


class Source(StrEnum):
    """The source format of a text."""

    AUTO = "auto"
    """The format that the name indicates."""
    TEXT = "text"
    """Files of plain text, a document each."""
    JSONL = "jsonl"
    """Files of JSON lines, a document each."""
    DATASETS = "datasets"
    """A folder that `datasets` saved, a document each row."""
    WIKIPEDIA = "wikipedia"
    """Dumps of Wikipedia, an article each, without its markup."""
    WIKITEXT = "wikitext"
    """Dumps of Wikipedia, an article each, with its markup."""
    MEGATRON = "megatron"
    """Megatron's .bin and .idx, tokens already."""
    IMAGES = "images"
    """No text: a folder of classes, JPEG and PNG files in each."""


_GLOBS = {Source.TEXT: "*.txt", Source.JSONL: "*.jsonl*", Source.WIKIPEDIA: "*.xml.bz2", Source.WIKITEXT: "*.xml.bz2"}
_ENDINGS = {
    Source.JSONL: (".jsonl", ".jsonl.gz", ".jsonl.bz2"),
    Source.WIKIPEDIA: (".xml.bz2", ".xml"),
    Source.MEGATRON: (".idx",),
}


class Corpus(NamedTuple):
    """A sequence of documents in an order that never changes."""

    size: int
    """Position after the last piece, in the corpus' unit: bytes of files as stored, or rows."""
    identity: list[object]
    """Properties that identify the corpus: how it is read, its files, their sizes and modification times."""
    pieces: Callable[[], Iterator[documents.Piece]]
    """Function that yields the text from the beginning; it raises BadInput with the place where it is damaged."""
    strips_markup: bool = False
    """Whether the text has MediaWiki markup that is removed."""


def source_of(text: str, glob: str | None) -> Source:
    """Return the format that `auto` stands for: by the ending of the file or pattern, else plain text."""
    if Path(text).is_dir() and documents.is_saved(Path(text)):
        return Source.DATASETS
    name = text if glob is None or Path(text).is_file() else glob
    return next((source for source, ends in _ENDINGS.items() if name.endswith(ends)), Source.TEXT)


def glob_of(text: str, source: Source) -> str:
    """Return the default pattern for the files of a folder, unless one is given."""
    return "*.py" if text == _PYTHON_STDLIB else _GLOBS.get(source, "")


def open_corpus(text: str, source: Source, glob: str, field: str, split: str, max_bytes: int | None) -> Corpus:
    """Open a corpus; raise BadInput where there is none."""
    if source is Source.DATASETS:
        rows = documents.open_saved(Path(text), field, split)
        identity = [split, field, *_stamps(_find_files(text, "*"))]
        return Corpus(len(rows), identity, partial(documents.row_pieces, Path(text), rows, field))
    files = _find_files(text, glob)
    size, stamps = sum(path.stat().st_size for path in files), _stamps(files)
    match source:
        case Source.JSONL:
            return Corpus(size, [field, *stamps], partial(documents.line_pieces, files, field))
        case Source.WIKIPEDIA | Source.WIKITEXT:
            strips_markup = source is Source.WIKIPEDIA
            return Corpus(size, [strips_markup, *stamps], partial(documents.article_pieces, files), strips_markup)
        case Source.TEXT:
            size = size if max_bytes is None else min(size, max_bytes)
            return Corpus(size, [max_bytes, *stamps], partial(documents.text_pieces, files, max_bytes))
    raise BadInput(text, f"is no text ({source})", "name its files")


def _find_files(text: str, glob: str) -> tuple[Path, ...]:
    """Return a single file, the matching files of a folder, or Python's own sources without their tests, by name.

    Raises BadInput where there are none.
    """
    source = Path(sysconfig.get_path("stdlib") if text == _PYTHON_STDLIB else text)
    if source.is_file():
        return (source,)
    if not source.is_dir():
        raise BadInput(source, "is no file and no folder", f"pass a text file, a folder of them, or {_PYTHON_STDLIB}")
    try:
        matches = {path.relative_to(source).parts: path for path in source.rglob(glob) if path.is_file()}
    except (NotImplementedError, ValueError) as error:
        problem = f"--glob {glob!r} cannot be matched ({error})"
        raise BadInput(source, problem, "pass a pattern such as '*.txt'") from None
    unwanted = _NOT_STDLIB if text == _PYTHON_STDLIB else frozenset()
    paths = tuple(matches[parts] for parts in sorted(matches) if not unwanted & set(parts))
    if not paths:
        raise BadInput(source, f"no text in files {glob!r}", "check --text and --glob")
    return paths


def _stamps(files: tuple[Path, ...]) -> list[object]:
    """Return the names, sizes and modification times of files."""
    stats = [(str(path.resolve()), path.stat()) for path in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
