"""The choice of a corpus from the options of `prepare`."""

from enum import StrEnum
from pathlib import Path

from shardwright_formats.io import BadInput
from shardwright_train.data.corpora.arrow import is_saved, open_saved
from shardwright_train.data.corpora.files import PYTHON_STDLIB, find_files
from shardwright_train.data.corpora.jsonl import JsonLines
from shardwright_train.data.corpora.piece import Corpus
from shardwright_train.data.corpora.text import TextFiles
from shardwright_train.data.corpora.wikipedia import WikipediaDump


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


_GLOBS = {
    Source.TEXT: "*.txt",
    Source.JSONL: "*.jsonl*",
    Source.WIKIPEDIA: "*.xml.bz2",
    Source.WIKITEXT: "*.xml.bz2",
}
_ENDINGS = {
    Source.JSONL: (".jsonl", ".jsonl.gz", ".jsonl.bz2"),
    Source.WIKIPEDIA: (".xml.bz2", ".xml"),
    Source.MEGATRON: (".idx",),
}


def source_of(text: str, glob: str | None) -> Source:
    """Return the format that `auto` stands for: by the ending of the file or pattern, else plain text."""
    if Path(text).is_dir() and is_saved(Path(text)):
        return Source.DATASETS
    name = text if glob is None or Path(text).is_file() else glob
    return next((source for source, ends in _ENDINGS.items() if name.endswith(ends)), Source.TEXT)


def glob_of(text: str, source: Source) -> str:
    """Return the default pattern for the files of a folder, unless one is given."""
    return "*.py" if text == PYTHON_STDLIB else _GLOBS.get(source, "")


def open_corpus(text: str, source: Source, glob: str, field: str, split: str, most_bytes: int | None) -> Corpus:
    """Open a corpus; raise BadInput where there is none."""
    if source is Source.DATASETS:
        return open_saved(Path(text), field, split)
    files = find_files(text, glob)
    match source:
        case Source.JSONL:
            return JsonLines(files, field)
        case Source.WIKIPEDIA | Source.WIKITEXT:
            return WikipediaDump(files, source is Source.WIKIPEDIA)
        case Source.TEXT:
            return TextFiles(files, most_bytes)
    raise BadInput(text, f"is no text ({source})", "name its files")
