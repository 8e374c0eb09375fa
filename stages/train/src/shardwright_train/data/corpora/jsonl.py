"""JSON lines: each line is an object, one field of which is a document."""

import bz2
import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

import msgspec

from shardwright_formats.io import BadInput
from shardwright_train.data.corpora.files import Files
from shardwright_train.data.corpora.piece import Piece

_MAX_LINE = 1 << 28


@dataclass(frozen=True)
class JsonLines:
    """Files of JSON lines, compressed ones (.gz, .bz2) too; a document without text is left out."""

    files: Files
    field: str
    is_wikitext: bool = False

    @property
    def size(self) -> int:
        """Return the bytes of the files as stored, compressed or not."""
        return self.files.size

    @property
    def identity(self) -> list[object]:
        """Return the files and the name of the field."""
        return [self.field, *self.files.identity]

    def pieces(self) -> Iterator[Piece]:
        """Yield the field of each line; raise BadInput with the line's number where the field is missing."""
        at = 0
        for path in self.files.paths:
            with path.open("rb") as raw:
                for number, line in enumerate(_lines(path, raw), start=1):
                    if line.strip() and (text := _text(path, number, line, self.field)):
                        yield Piece(text, True, at + raw.tell())
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


def _text(path: Path, number: int, line: bytes, field: str) -> str:
    try:
        found = _DECODER.decode(line)
        return msgspec.json.decode(found[field], type=str) if field in found else _lacks(path, number, field, found)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(path, f"line {number}: {error}", "correct it, or name another --field") from None
    except RecursionError:
        raise BadInput(path, f"line {number} is nested too deeply", "leave it out") from None


def _lacks(path: Path, number: int, field: str, found: dict[str, msgspec.Raw]) -> str:
    raise BadInput(path, f"line {number} has no field {field!r}", f"name one with --field: {', '.join(found)}")


_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
