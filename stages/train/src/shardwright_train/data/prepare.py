"""Text into tokens: files, with a tokenizer that is trained on them or given, as a token file."""

import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.json import sha256_of_file, write_bytes, write_document
from shardwright_train.data.description import DataFolder, PreparedData
from shardwright_train.data.tokenizing import Tokenizing, given, trained
from shardwright_train.data.tokens import write_tokens

_PYTHON_STDLIB = "python-stdlib"
_NOT_STDLIB = frozenset({"__pycache__", "dist-packages", "site-packages", "test", "tests"})
_MIB = 1 << 20
_MAX_WORD = 100_000
"""The most characters in a row of one kind: learning tokens takes time with the square of them, here seconds."""
_WORD = re.compile(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+")  # as ByteLevel tells them apart


class _TextFile(NamedTuple):
    path: Path
    text_bytes: int
    """How much of the file is taken, from its beginning."""


def prepare(
    text: str, glob: str, vocab_size: int | None, max_mib: float, out: Path, tokenizer_folder: Path | None = None
) -> None:
    """Write OUT/{tokenizer.json,tokens.bin,tokens.idx,data.json}: the same files and arguments give the same bytes.

    `text` is a file; a folder, of which the files that match `glob` are taken in the order of their names; or
    `python-stdlib`, the sources of Python's standard library without its tests. Each file is a document, held in
    memory one at a time and closed by an end-of-text token. The file that goes beyond `max_mib` (MiB) is cut at the end
    of a line, and those after it are left out. A text too short for `vocab_size` gives a smaller vocabulary, which
    data.json says. With `tokenizer_folder` that model's tokenizer is taken, and none is trained.

    Raises BadInput when there is no text, a file is not UTF-8, or not one of vocabulary and tokenizer is given.
    """
    if (vocab_size is None) == (tokenizer_folder is None):
        raise BadInput("prepare", "it takes either --vocab-size or --tokenizer", "train a tokenizer, or name a model's")
    files = _files(text, glob, int(max_mib * _MIB))
    text_bytes = sum(file.text_bytes for file in files)
    targets = DataFolder(out)
    if tokenizer_folder is not None:
        tokenizing = given(tokenizer_folder)
    else:
        assert vocab_size is not None
        _say(f"training a tokenizer on {len(files)} files, {text_bytes / _MIB:.1f} MiB")
        tokenizing = trained(_texts(files), len(files), vocab_size)
    write_bytes(targets.tokenizer, (tokenizing.tokenizer.to_str(pretty=True) + "\n").encode())
    _say(f"writing {targets.tokens}")
    tokens = write_tokens(targets.tokens, targets.index, _documents(tokenizing, files), tokenizing.vocab_size)
    description = PreparedData(
        text=text,
        glob=glob,
        vocab_size=tokenizing.vocab_size,
        documents=len(files),
        text_bytes=text_bytes,
        tokens=tokens,
        tokenizer_sha256=sha256_of_file(targets.tokenizer),
        tokens_sha256=sha256_of_file(targets.tokens),
    )
    write_document(targets.description, description)
    _say(f"{tokens} tokens, vocabulary {description.vocab_size}")


def _files(text: str, glob: str, most_bytes: int) -> list[_TextFile]:
    source = Path(sysconfig.get_path("stdlib") if text == _PYTHON_STDLIB else text)
    if not source.is_dir() and not source.is_file():
        raise BadInput(source, "is no file and no folder", f"pass a text file, a folder of them, or {_PYTHON_STDLIB}")
    unwanted = _NOT_STDLIB if text == _PYTHON_STDLIB else frozenset()
    taken: list[_TextFile] = []
    room = most_bytes
    for path in [source] if source.is_file() else _matching(source, glob, unwanted):
        size = path.stat().st_size
        if size > room:
            size = _last_line_end(path, room)
        if size:
            taken.append(_TextFile(path, size))
        room -= size
        if size < path.stat().st_size:
            break
    if not taken:
        raise BadInput(
            source, f"no text in files {glob!r} within {most_bytes} bytes", "check --text, --glob and --max-mib"
        )
    return taken


def _matching(folder: Path, glob: str, unwanted: frozenset[str]) -> list[Path]:
    try:
        found = {path.relative_to(folder).parts: path for path in folder.rglob(glob) if path.is_file()}
    except (NotImplementedError, ValueError) as error:
        raise BadInput(
            folder, f"--glob {glob!r} cannot be matched ({error})", "pass a pattern such as '*.txt'"
        ) from None
    return [found[parts] for parts in sorted(found) if not unwanted & set(parts)]


def _last_line_end(path: Path, most_bytes: int) -> int:
    """Length of the file's whole lines within a number of bytes."""
    with path.open("rb") as file:
        return file.read(most_bytes).rfind(b"\n") + 1


def _texts(files: Sequence[_TextFile]) -> Iterator[str]:
    for path, text_bytes in files:
        with path.open("rb") as file:
            content = file.read(text_bytes)
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            what = f"not UTF-8 ({error.reason} at byte {error.start})"
            raise BadInput(path, what, "convert it, or narrow --glob") from None
        longest = max(_WORD.finditer(text), key=lambda word: word.end() - word.start(), default=None)
        if longest is not None and longest.end() - longest.start() > _MAX_WORD:
            what = f"a word of {longest.end() - longest.start()} characters from number {longest.start()} on"
            raise BadInput(path, f"{what}, over {_MAX_WORD}", "break it up, or narrow --glob")
        yield text


def _documents(tokenizing: Tokenizing, files: Sequence[_TextFile]) -> Iterator[NDArray[Any]]:
    # A text that spells a special token is text.
    tokenizing.tokenizer.encode_special_tokens = True
    for text in _texts(files):
        tokens = tokenizing.tokenizer.encode(text, add_special_tokens=False).ids
        yield np.array([*tokens, tokenizing.end], np.int64)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
