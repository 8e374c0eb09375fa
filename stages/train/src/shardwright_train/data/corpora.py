"""The corpora that `prepare` reads: plain text, JSON lines, dumps of Wikipedia and folders of `datasets`."""

import bz2
import gzip
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, NamedTuple, cast
from xml.etree.ElementTree import Element, ParseError, iterparse

import msgspec

from shardwright_formats.io import BadInput

_PYTHON_STDLIB = "python-stdlib"
_NOT_STDLIB = frozenset({"__pycache__", "dist-packages", "site-packages", "test", "tests"})
_PIECE_BYTES = 1 << 20
"""Bytes of a piece of a longer file, extended to the end of a line that no space follows: there, tokenizers that
split words as GPT-2's does give the same tokens as for the whole text."""
_LINE_END = re.compile(rb"\n(?=\S)")
_MAX_LINE = 1 << 28
_ARTICLES = "0"
"""The namespace of articles; the others are talk, templates, users and the like."""
_MAX_PAGE_BYTES = 1 << 25
"""Largest size of a page with its head, in bytes; Wikipedia allows texts of 2 MiB."""
_ROWS = 1000
_SAVED_FILES = ("state.json", "dataset_dict.json")
"""Files that `save_to_disk` writes into the folder of one data set, and of several splits."""
_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


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
    CAPTIONS = "captions"
    """A folder of images, and captions.jsonl with a text for each."""
    SPEECH = "speech"
    """A folder of WAV files, and transcripts.jsonl with what is said in each."""


_GLOBS = {Source.TEXT: "*.txt", Source.JSONL: "*.jsonl*", Source.WIKIPEDIA: "*.xml.bz2", Source.WIKITEXT: "*.xml.bz2"}
_ENDINGS = {
    Source.JSONL: (".jsonl", ".jsonl.gz", ".jsonl.bz2"),
    Source.WIKIPEDIA: (".xml.bz2", ".xml"),
    Source.MEGATRON: (".idx",),
}


class TextPiece(NamedTuple):
    """A part of a document's text; most documents are one piece, and a long one is never held as a whole."""

    text: str
    ends: bool
    """Whether the document ends with this piece."""
    at: int
    """Position in the corpus after this piece, in the unit of `Corpus.size`."""


class Corpus(NamedTuple):
    """A sequence of documents in an order that never changes."""

    size: int
    """Position after the last piece, in the corpus' unit: bytes of files as stored, or rows."""
    identity: list[object]
    """Properties that identify the corpus: how it is read, its files, their sizes and modification times."""
    pieces: Callable[[], Iterator[TextPiece]]
    """Function that yields the text from the beginning; it raises BadInput with the place where it is damaged."""
    strips_markup: bool = False
    """Whether the text has MediaWiki markup that is removed."""


def source_of(text: str, glob: str | None) -> Source:
    """Return the format that `auto` stands for: by the ending of the file or pattern, else plain text."""
    if Path(text).is_dir() and is_saved(Path(text)):
        return Source.DATASETS
    name = text if glob is None or Path(text).is_file() else glob
    return next((source for source, ends in _ENDINGS.items() if name.endswith(ends)), Source.TEXT)


def glob_of(text: str, source: Source) -> str:
    """Return the default pattern for the files of a folder, unless one is given."""
    return "*.py" if text == _PYTHON_STDLIB else _GLOBS.get(source, "")


def open_corpus(text: str, source: Source, glob: str, field: str, split: str, max_bytes: int | None) -> Corpus:
    """Open a corpus; raise BadInput where there is none."""
    if source is Source.DATASETS:
        rows = open_saved(Path(text), field, split)
        identity = [split, field, *_stamps(_find_files(text, "*"))]
        return Corpus(len(rows), identity, partial(row_pieces, Path(text), rows, field))
    files = _find_files(text, glob)
    size, stamps = sum(path.stat().st_size for path in files), _stamps(files)
    match source:
        case Source.JSONL:
            return Corpus(size, [field, *stamps], partial(line_pieces, files, field))
        case Source.WIKIPEDIA | Source.WIKITEXT:
            strips_markup = source is Source.WIKIPEDIA
            return Corpus(size, [strips_markup, *stamps], partial(article_pieces, files), strips_markup)
        case Source.TEXT:
            size = size if max_bytes is None else min(size, max_bytes)
            return Corpus(size, [max_bytes, *stamps], partial(text_pieces, files, max_bytes))
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


def text_pieces(files: Sequence[Path], max_bytes: int | None) -> Iterator[TextPiece]:
    """Yield the text of plain files, a document each; raise BadInput where it is not UTF-8.

    The file that exceeds `max_bytes` is cut at the end of a line, and those after it are left out.
    """
    at = 0
    for path in files:
        size = path.stat().st_size
        room = size if max_bytes is None else max_bytes - at
        taken = size if size <= room else _last_line_end(path, room)
        yield from _pieces_of_file(path, taken, at)
        at += taken
        if taken < size:
            return


def _pieces_of_file(path: Path, size: int, at: int) -> Iterator[TextPiece]:
    with path.open("rb") as file:
        done, rest = 0, b""
        while done < size:
            content = rest + file.read(min(_PIECE_BYTES, size - done - len(rest)))
            if len(content) < _PIECE_BYTES and done + len(content) < size:
                raise BadInput(path, "became shorter while it was read", "leave it alone, and prepare again")
            cut = len(content) if done + len(content) == size else _cut(content)
            try:
                text = content[:cut].decode()
            except UnicodeDecodeError as error:
                problem = f"not UTF-8 ({error.reason} at byte {done + error.start})"
                raise BadInput(path, problem, "convert it, or narrow --glob") from None
            yield TextPiece(text, done + cut == size, at + done + cut)
            done, rest = done + cut, content[cut:]


def _cut(content: bytes) -> int:
    """Return where a piece of a longer text may end: after a line, a word, or else a character."""
    lines = [match.end() for match in _LINE_END.finditer(content, len(content) // 2)]
    if lines:
        return lines[-1]
    if (word := content.rfind(b" ")) >= 1:
        return word
    starts = (place for place in range(len(content) - 1, max(0, len(content) - 5), -1) if content[place] & 0xC0 != 0x80)
    return next(starts, len(content))


def _last_line_end(path: Path, max_bytes: int) -> int:
    """Return the length of the file's whole lines within a number of bytes."""
    with path.open("rb") as file:
        end = max_bytes
        while end > 0:
            begin = max(0, end - _PIECE_BYTES)
            file.seek(begin)
            if length := file.read(end - begin).rfind(b"\n") + 1:
                return begin + length
            end = begin
    return 0


def line_pieces(files: Sequence[Path], field: str) -> Iterator[TextPiece]:
    """Yield a field of each JSON line of files, compressed ones (.gz, .bz2) too; a line without text is left out.

    Raises BadInput with the line's number where the field is missing.
    """
    at = 0
    for path in files:
        with path.open("rb") as raw:
            for number, line in enumerate(_lines(path, raw), start=1):
                if line.strip() and (text := _field_text(path, number, line, field)):
                    yield TextPiece(text, True, at + raw.tell())
        at += path.stat().st_size


def _lines(path: Path, raw: BufferedReader) -> Iterator[bytes]:
    file: IO[bytes] = raw
    if path.suffix == ".gz":
        file = cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    elif path.suffix == ".bz2":
        file = bz2.BZ2File(raw)
    number = 0
    try:
        while line := file.readline(_MAX_LINE):
            number += 1
            if len(line) == _MAX_LINE:
                raise BadInput(path, f"line {number} is longer than {_MAX_LINE >> 20} MiB", "break it up")
            yield line
    except (EOFError, zlib.error, OSError) as error:
        raise BadInput(path, f"is damaged behind line {number} ({error})", "fetch it again") from None


def _field_text(path: Path, number: int, line: bytes, field: str) -> str:
    try:
        fields = _DECODER.decode(line)
        if field in fields:
            return msgspec.json.decode(fields[field], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(path, f"line {number}: {error}", "correct it, or name another --field") from None
    except RecursionError:
        raise BadInput(path, f"line {number} is nested too deeply", "leave it out") from None
    raise BadInput(path, f"line {number} has no field {field!r}", f"name one with --field: {', '.join(fields)}")


def article_pieces(files: Sequence[Path]) -> Iterator[TextPiece]:
    """Yield the wikitext of each article of dumps, `.xml.bz2` or `.xml`, without redirects.

    Raises BadInput where a dump is damaged.
    """
    at = 0
    for path in files:
        with path.open("rb") as raw:
            for text in _articles(path, raw):
                yield TextPiece(text, True, at + raw.tell())
        at += path.stat().st_size


class _PageReader:
    """A reader of a dump that limits the size of a page: a few compressed KB can unpack to a GiB."""

    def __init__(self, path: Path, raw: IO[bytes]) -> None:
        self._path, self._file = path, bz2.BZ2File(raw) if path.suffix == ".bz2" else raw
        self.pages, self.page_bytes = 0, 0

    def read(self, size: int = -1, /) -> bytes:
        """Read the next bytes; raise BadInput where their page is too long."""
        content = self._file.read(size)
        self.page_bytes += len(content)
        if self.page_bytes > _MAX_PAGE_BYTES:
            problem = f"page {self.pages + 1} is longer than {_MAX_PAGE_BYTES >> 20} MiB"
            raise BadInput(self._path, problem, "leave it out")
        return content


def _articles(path: Path, raw: IO[bytes]) -> Iterator[str]:
    file = _PageReader(path, raw)
    try:
        root: Element | None = None
        for event, element in iterparse(file, events=("start", "end")):
            if root is None:
                root = element
            if event == "end" and _name(element) == "page":
                file.pages, file.page_bytes = file.pages + 1, 0
                if text := _article(element):
                    yield text
                root.clear()  # what has been read is let go
    except (ParseError, EOFError, OSError, ValueError) as error:
        raise BadInput(path, f"is damaged behind page {file.pages} ({error})", "fetch it again") from None


def _article(page: Element) -> str:
    parts = {_name(element): element for element in page.iter()}
    if "redirect" in parts or "ns" not in parts or parts["ns"].text != _ARTICLES or "text" not in parts:
        return ""
    return parts["text"].text or ""


def _name(element: Element) -> str:
    """Return a tag without its namespace, which is the version of the dump's format."""
    return element.tag.rpartition("}")[2]


def is_saved(folder: Path) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    return any((folder / name).is_file() for name in _SAVED_FILES)


def open_saved(folder: Path, field: str, split: str) -> Any:
    """Return the `datasets.Dataset` of a folder, mapped from its files.

    Raises BadInput where the folder is no data set, lacks the split or column, or `datasets` is missing.
    """
    try:
        import datasets
    except ImportError:
        remedy = "pip install 'shardwright-train[datasets]'"
        raise BadInput(folder, "reading it takes the package `datasets`", remedy) from None
    if not is_saved(folder):
        raise BadInput(folder, f"has none of {' and '.join(_SAVED_FILES)}", "pass a folder that save_to_disk wrote")
    try:
        rows: Any = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(folder, f"cannot be opened ({error})", "save it again with save_to_disk") from None
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            raise BadInput(folder, f"has no split {split!r}", f"name one with --dataset-split: {', '.join(rows)}")
        rows = rows[split]
    if field not in rows.column_names:
        raise BadInput(folder, f"has no column {field!r}", f"name one with --field: {', '.join(rows.column_names)}")
    return rows


def row_pieces(folder: Path, rows: Any, field: str) -> Iterator[TextPiece]:
    """Yield a column of a data set, several rows at a time; rows without text are left out."""
    for first in range(0, len(rows), _ROWS):
        for number, text in enumerate(rows[first : first + _ROWS][field], start=first):
            if not isinstance(text, str | None):
                raise BadInput(folder, f"row {number} of {field!r} is no text", "name another --field")
            if text:
                yield TextPiece(text, True, number + 1)
