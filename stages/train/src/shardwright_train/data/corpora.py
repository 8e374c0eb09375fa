"""The corpora that `prepare` reads: plain text, JSON lines, dumps of Wikipedia and folders of `datasets`.

`datasets` itself also reads JSON lines, but it infers one schema for all fields of all lines, which fails for mixed
corpora, reports no line numbers, and first copies the corpus to Arrow files.
"""

import bz2
import gzip
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

import msgspec

from shardwright.io import BadInput

_PYTHON_STDLIB = "python-stdlib"
_NOT_STDLIB = frozenset({"__pycache__", "dist-packages", "site-packages", "test", "tests"})
_PIECE_BYTES = 1 << 20
"""Bytes of a piece of a longer file, up to the end of a line that is not followed by a space. Cut there, the text gives
the same tokens as the whole text with tokenizers that split words like GPT-2's."""
_LINE_END = re.compile(rb"\n(?=\S)")
_MAX_LINE = 1 << 28
_ARTICLES = "0"
"""The namespace of articles; other namespaces contain talk, templates, users and the like."""
_MAX_PAGE_BYTES = 1 << 25
"""Largest size of a page with its head, in bytes; Wikipedia allows texts of 2 MiB."""
_READ_BYTES = 1 << 16
_ROWS = 1000
_SAVED_FILES = ("state.json", "dataset_dict.json")
"""Files that `save_to_disk` writes into the folder of one data set, and of several splits."""
_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Source(StrEnum):
    """Source formats of texts."""

    AUTO = "auto"
    """The format that the name indicates."""
    TEXT = "text"
    """Files of plain text, each one document."""
    JSONL = "jsonl"
    """Files of JSON lines, each line one document."""
    DATASETS = "datasets"
    """A folder that `datasets` saved, each row one document."""
    WIKIPEDIA = "wikipedia"
    """Dumps of Wikipedia, each article one document, without its markup."""
    WIKITEXT = "wikitext"
    """Dumps of Wikipedia, each article one document, with its markup."""
    MEGATRON = "megatron"
    """Megatron's .bin and .idx, which already contain tokens."""
    IMAGES = "images"
    """No text: a folder with a subfolder of JPEG and PNG files for each class."""
    CAPTIONS = "captions"
    """A folder of images, and captions.jsonl with a text for each."""
    SPEECH = "speech"
    """A folder of WAV files, and transcripts.jsonl with what is spoken in each."""


_GLOBS = {Source.TEXT: "*.txt", Source.JSONL: "*.jsonl*", Source.WIKIPEDIA: "*.xml.bz2", Source.WIKITEXT: "*.xml.bz2"}
_ENDINGS = {
    Source.JSONL: (".jsonl", ".jsonl.gz", ".jsonl.bz2"),
    Source.WIKIPEDIA: (".xml.bz2", ".xml"),
    Source.MEGATRON: (".idx",),
}


class TextPiece(NamedTuple):
    """A part of a document's text; most documents are one piece, but long ones are never completely in memory."""

    text: str
    ends: bool
    """Whether the document ends with this piece."""
    at: int
    """Position in the corpus after this piece, in the unit of `Corpus.size`."""
    begins: bool = True
    """Whether the document begins with this piece."""
    source: str = ""
    """Where the document comes from, for messages; empty unless pieces are JSON objects."""


class Corpus(NamedTuple):
    """A sequence of documents in an order that never changes."""

    name: str
    source: Source
    glob: str
    max_bytes: int | None
    size: int
    """Position after the last piece, in the corpus's unit: bytes of files as stored, or rows."""
    identity: list[object]
    """Properties that identify the corpus: how it is read, its files, their sizes and modification times."""
    pieces: Callable[[], Iterator[TextPiece]]
    """Function that yields the text from the beginning; it raises BadInput naming the place of any damage."""

    @property
    def strips_markup(self) -> bool:
        """Whether the text has MediaWiki markup that is removed."""
        return self.source is Source.WIKIPEDIA


def source_of(text: str, glob: str | None) -> Source:
    """Return the format that `auto` selects: by the suffix of the file or pattern, else plain text."""
    if _is_saved(Path(text)):
        return Source.DATASETS
    name = text if glob is None or Path(text).is_file() else glob
    return next((source for source, ends in _ENDINGS.items() if name.endswith(ends)), Source.TEXT)


def open_corpus(
    text: str, source: Source, glob: str | None, field: str | None, split: str, max_bytes: int | None = None
) -> Corpus:
    """Open a corpus, or its first `max_bytes` of text; raise BadInput if there is none.

    `field`: the field of lines or rows that is the document; None: documents are whole lines or rows, as JSON objects.

    A plain file that goes beyond `max_bytes` is cut at the end of a line; other documents are kept whole or left out.
    """
    if glob is None:
        glob = "*.py" if text == _PYTHON_STDLIB else _GLOBS.get(source, "")
    if source is Source.DATASETS:
        rows = _open_saved(Path(text), field, split)
        files, read = _find_files(text, "*"), partial(row_pieces, Path(text), rows, field)
    else:
        files = _find_files(text, glob)
        read = partial(line_pieces, files, field) if source is Source.JSONL else partial(article_pieces, files)
        read = partial(text_pieces, files) if source is Source.TEXT else read
    stats = [(str(path.resolve()), path.stat()) for path in files]
    size = sum(stat.st_size for _, stat in stats) if source is not Source.DATASETS else len(rows)
    if source is Source.TEXT and max_bytes is not None:
        size = min(size, max_bytes)
    stamps = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    limited = partial(_limited, read, max_bytes, cuts=source is Source.TEXT)
    return Corpus(text, source, glob, max_bytes, size, [source, field, split, max_bytes, *stamps], limited)


def _find_files(text: str, glob: str) -> tuple[Path, ...]:
    """Return a file, a folder's matching files, or Python's sources without tests; raise BadInput if there are none."""
    source = Path(sysconfig.get_path("stdlib") if text == _PYTHON_STDLIB else text)
    if source.is_file():
        return (source,)
    if not source.is_dir():
        raise BadInput(
            source, "is neither a file nor a folder", f"pass a text file, a folder of them, or {_PYTHON_STDLIB}"
        )
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


def _limited(read: Callable[[], Iterator[TextPiece]], max_bytes: int | None, cuts: bool) -> Iterator[TextPiece]:
    room = max_bytes
    for piece in read():
        if room is not None:
            content = piece.text.encode()
            if len(content) > room:
                end = content.rfind(b"\n", 0, room) + 1
                if cuts and (end or not piece.begins):
                    yield piece._replace(text=content[:end].decode(), ends=True)
                return
            room -= len(content)
        yield piece


def text_pieces(files: Sequence[Path]) -> Iterator[TextPiece]:
    """Yield the text of plain files, one document per file; raise BadInput if it is not UTF-8."""
    at = 0
    for path in files:
        with path.open("rb") as file:
            content, done = file.read(_PIECE_BYTES), 0
            while content:
                more = file.read(_PIECE_BYTES)
                cut = _cut(content) if more else len(content)
                try:
                    text = content[:cut].decode()
                except UnicodeDecodeError as error:
                    problem = f"not UTF-8 ({error.reason} at byte {done + error.start})"
                    raise BadInput(path, problem, "convert it, or narrow --glob") from None
                yield TextPiece(text, not more, at + done + cut, begins=done == 0)
                content, done = content[cut:] + more, done + cut
            at += done


def _cut(content: bytes) -> int:
    """Return where to cut a long text: after a line, or else after a word, or else after a character."""
    lines = [match.end() for match in _LINE_END.finditer(content, len(content) // 2)]
    if lines:
        return lines[-1]
    if (word := content.rfind(b" ")) >= 1:
        return word
    starts = (place for place in range(len(content) - 1, max(0, len(content) - 5), -1) if content[place] & 0xC0 != 0x80)
    return next(starts, len(content))


def line_pieces(files: Sequence[Path], field: str | None) -> Iterator[TextPiece]:
    """Yield a field of each JSON line of files, which may be compressed (.gz, .bz2); lines without text are left out.

    `field` None: yield whole lines.

    Raises BadInput with the line's number if the field is missing.
    """
    at = 0
    for path in files:
        with path.open("rb") as raw:
            number = 0
            try:
                for number, line in enumerate(iter(partial(_unpacked(path, raw).readline, _MAX_LINE), b""), start=1):
                    if line.strip() and (text := _field_text(path, number, line, field)):
                        source = f"{path}: line {number}" if field is None else ""
                        yield TextPiece(text, True, at + raw.tell(), source=source)
            except (EOFError, zlib.error, OSError) as error:
                raise BadInput(path, f"is damaged after line {number} ({error})", "fetch it again") from None
            at += raw.tell()


def _unpacked(path: Path, raw: IO[bytes]) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    return bz2.BZ2File(raw) if path.suffix == ".bz2" else raw


def _field_text(path: Path, number: int, line: bytes, field: str | None) -> str:
    if len(line) == _MAX_LINE:
        raise BadInput(path, f"line {number} is longer than {_MAX_LINE >> 20} MiB", "split it")
    try:
        if field is None:
            return line.decode()
        fields = _DECODER.decode(line)
        if field in fields:
            return msgspec.json.decode(fields[field], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(path, f"line {number}: {error}", "correct it, or name another --field") from None
    except RecursionError:
        raise BadInput(path, f"line {number} is nested too deeply", "leave it out") from None
    raise BadInput(path, f"line {number} has no field {field!r}", f"choose one with --field: {', '.join(fields)}")


def article_pieces(files: Sequence[Path]) -> Iterator[TextPiece]:
    """Yield the wikitext of each article of dumps, `.xml.bz2` or `.xml`, without redirects.

    Raises BadInput if a dump is damaged.
    """
    at = 0
    for path in files:
        with path.open("rb") as raw:
            for page in _pages(path, _unpacked(path, raw)):
                parts = {_name(element): element for element in page.iter()}
                is_article = "redirect" not in parts and "ns" in parts and parts["ns"].text == _ARTICLES
                if is_article and "text" in parts and (text := parts["text"].text):
                    yield TextPiece(text, True, at + raw.tell())
        at += path.stat().st_size


def _pages(path: Path, file: IO[bytes]) -> Iterator[Element]:
    """Yield the pages of a dump, limiting their size: a few compressed KB can unpack to a GiB."""
    parser: XMLPullParser[Any] = XMLPullParser(("start", "end"))
    root: Element | None = None
    pages = page_bytes = 0
    try:
        while block := file.read(_READ_BYTES):
            parser.feed(block)
            page_bytes += len(block)
            for event, element in cast("Iterator[tuple[str, Element]]", parser.read_events()):
                root = element if root is None else root
                if event == "end" and _name(element) == "page":
                    pages, page_bytes = pages + 1, 0
                    yield element
                    root.clear()  # drops the pages that have been read
            if page_bytes > _MAX_PAGE_BYTES:
                problem = f"page {pages + 1} is longer than {_MAX_PAGE_BYTES >> 20} MiB"
                raise BadInput(path, problem, "leave it out")
        parser.close()
    except (ParseError, EOFError, OSError, ValueError) as error:
        raise BadInput(path, f"is damaged after page {pages} ({error})", "fetch it again") from None


def _name(element: Element) -> str:
    """Return an element's tag without its namespace, which is the version of the dump's format."""
    return element.tag.rpartition("}")[2]


def plain(wikitext: str) -> str:
    """Return an article without links, tables, templates and other markup, by mwparserfromhell."""
    import mwparserfromhell

    return str(mwparserfromhell.parse(wikitext).strip_code())


def check_plain(corpus: object) -> None:
    """Raise BadInput if the package that removes markup is not installed."""
    try:
        plain("")
    except ImportError:
        remedy = "pip install 'shardwright[wikipedia]', or use --source wikitext, which keeps markup"
        raise BadInput(corpus, "removing markup needs the package `mwparserfromhell`", remedy) from None


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _SAVED_FILES)


def _open_saved(folder: Path, field: str | None, split: str) -> Any:
    """Return the `datasets.Dataset` of a folder, mapped from its files.

    Raises BadInput if the folder is not a data set, if it has no such split or column, or if `datasets` is missing.
    """
    try:
        import datasets
    except ImportError:
        remedy = "pip install 'shardwright[datasets]'"
        raise BadInput(folder, "reading it needs the package `datasets`", remedy) from None
    if not _is_saved(folder):
        raise BadInput(folder, f"has none of {' and '.join(_SAVED_FILES)}", "pass a folder that save_to_disk wrote")
    try:
        rows: Any = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(folder, f"cannot be opened ({error})", "save it again with save_to_disk") from None
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            raise BadInput(folder, f"has no split {split!r}", f"choose one with --dataset-split: {', '.join(rows)}")
        rows = rows[split]
    if field is not None and field not in rows.column_names:
        raise BadInput(folder, f"has no column {field!r}", f"choose one with --field: {', '.join(rows.column_names)}")
    return rows


def row_pieces(folder: Path, rows: Any, field: str | None) -> Iterator[TextPiece]:
    """Yield the column `field` of a data set, without rows that have no text; None: whole rows as JSON objects."""
    if field is None:
        for number, row in enumerate(rows):
            try:
                fields = msgspec.json.encode({name: value for name, value in row.items() if value is not None})
            except TypeError as error:
                problem = f"row {number} has a value that JSON cannot express ({error})"
                raise BadInput(folder, problem, "leave out the column with that value") from None
            yield TextPiece(fields.decode(), True, number + 1, source=f"{folder}: row {number}")
        return
    for first in range(0, len(rows), _ROWS):
        for number, text in enumerate(rows[first : first + _ROWS][field], start=first):
            if not isinstance(text, str | None):
                raise BadInput(folder, f"row {number} of {field!r} is not a text", "choose another --field")
            if text:
                yield TextPiece(text, True, number + 1)
