"""Text into tokens: trains a byte-level BPE on files and writes them as a token file."""

import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.json import sha256_of_file, write_bytes, write_document
from shardwright_train.data.description import END_OF_TEXT, DataFolder, PreparedData
from shardwright_train.data.tokens import write_tokens

_PYTHON_STDLIB = "python-stdlib"
_NOT_STDLIB = frozenset({"__pycache__", "dist-packages", "site-packages", "test", "tests"})
_LEAST_VOCABULARY = 257  # every byte and the end of text
_MIB = 1 << 20
_MAX_WORD = 100_000
"""The most characters in a row of one kind: learning tokens takes time with the square of them, here seconds."""
_WORD = re.compile(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+")  # as ByteLevel tells them apart


class _TextFile(NamedTuple):
    path: Path
    text_bytes: int
    """How much of the file is taken, from its beginning."""


def prepare(text: str, glob: str, vocab_size: int, max_mib: float, out: Path) -> None:
    """Write OUT/{tokenizer.json,tokens.bin,tokens.idx,data.json}: the same files and arguments give the same bytes.

    `text` is a file; a folder, of which the files that match `glob` are taken in the order of their names; or
    `python-stdlib`, the sources of Python's standard library without its tests. Each file is a document, held in
    memory one at a time and closed by an end-of-text token. The file that goes beyond `max_mib` (MiB) is cut at the end
    of a line, and those after it are left out. A text too short for `vocab_size` gives a smaller vocabulary, which
    data.json says.

    Raises BadInput when there is no text, or a file is not UTF-8.
    """
    if vocab_size < _LEAST_VOCABULARY:
        raise BadInput("--vocab-size", f"{vocab_size} is too small for bytes", f"ask for {_LEAST_VOCABULARY} or more")
    files = _files(text, glob, int(max_mib * _MIB))
    text_bytes = sum(file.text_bytes for file in files)
    targets = DataFolder(out)
    _say(f"training a tokenizer on {len(files)} files, {text_bytes / _MIB:.1f} MiB")
    tokenizer = _trained(files, vocab_size)
    write_bytes(targets.tokenizer, (tokenizer.to_str(pretty=True) + "\n").encode())
    _say(f"writing {targets.tokens}")
    tokens = write_tokens(targets.tokens, targets.index, _documents(tokenizer, files), tokenizer.get_vocab_size())
    description = PreparedData(
        text=text,
        glob=glob,
        vocab_size=tokenizer.get_vocab_size(),
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


def _trained(files: Sequence[_TextFile], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_texts(files), trainer, length=len(files))
    return tokenizer


def _documents(tokenizer: Tokenizer, files: Sequence[_TextFile]) -> Iterator[NDArray[Any]]:
    # A text that spells the end-of-text token is text.
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id(END_OF_TEXT)
    for text in _texts(files):
        yield np.array([*tokenizer.encode(text).ids, end], np.int64)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
