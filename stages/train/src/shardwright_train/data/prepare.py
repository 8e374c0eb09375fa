"""Preparation of data: a corpus is tokenized into a token file, or Megatron's own token files are copied."""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwright_formats.io import (
    BadInput,
    atomic_path,
    check_writable,
    sha256_of_file,
    sha256_of_value,
    write_document,
)
from shardwright_formats.types import MIB
from shardwright_launch.lock import only_run
from shardwright_launch.nodes import Nodes
from shardwright_train.data.corpora import Corpus, Source, TextPiece, glob_of, open_corpus, source_of
from shardwright_train.data.tokenizing import (
    SETTINGS,
    Encoder,
    Tokenizing,
    check_plain,
    encoding,
    given,
    plain,
    trained,
)
from shardwright_train.data.tokens import DataFolder, PreparedData, read_tokens, token_dtype, write_index
from shardwright_train.data.unfinished import Done, Unfinished

_SAY_EVERY_S = 10.0
_BLOCK = 1 << 20


class How(NamedTuple):
    """The secondary options of `prepare`."""

    source: Source = Source.AUTO
    field: str = "text"
    """Field of JSON lines and of rows that holds the document."""
    dataset_split: str = "train"
    tokenizer_mib: float = 64.0
    """Largest amount of text that a tokenizer is trained on, in MiB."""
    workers: int | None = None
    """Number of processes; None: one per core."""


_USUAL = How()


def prepare(
    text: str,
    glob: str | None,
    vocab_size: int | None,
    max_mib: float | None,
    out: Path,
    tokenizer_folder: Path | None = None,
    how: How = _USUAL,
) -> None:
    """Write OUT/{tokenizer.json,tokens.bin,tokens.idx,data.json}: the same files and options give the same bytes.

    Each document is closed by an end-of-text token; where `max_mib` (MiB) ends the text, the file that goes beyond is
    cut at the end of a line, and other documents are left out. Killed and started again, it goes on with what has
    reached the disk. A text too short for `vocab_size` gives a smaller vocabulary, which data.json says. With
    `tokenizer_folder` that model's tokenizer is taken, and none is trained.

    Raises BadInput when there is no text, it is damaged, or not one of vocabulary and tokenizer is given: then nothing
    is left of what was written.
    """
    source = source_of(text, glob) if how.source is Source.AUTO else how.source
    if source is Source.MEGATRON:
        _import_megatron(Path(text), tokenizer_folder, DataFolder(out))
        return
    if (vocab_size is None) == (tokenizer_folder is None):
        raise BadInput("prepare", "it takes either --vocab-size or --tokenizer", "train a tokenizer, or name a model's")
    glob = glob_of(text, source) if glob is None else glob
    max_bytes = None if max_mib is None else int(max_mib * MIB)
    corpus = open_corpus(text, source, glob, how.field, how.dataset_split, max_bytes)
    if corpus.strips_markup:
        check_plain(text)
    request = _Request(text, source, glob, corpus, max_bytes, vocab_size, tokenizer_folder, how)
    is_new, targets = not out.exists(), DataFolder(out)
    check_writable(targets.description)
    with only_run(out.with_name(f"{out.name}.lock"), Nodes()):
        try:
            _prepare(request, targets, Unfinished(targets.unfinished))
        except BadInput:
            Unfinished(targets.unfinished).remove()
            if is_new:
                out.rmdir()
            raise


class _Request(NamedTuple):
    text: str
    source: Source
    glob: str
    corpus: Corpus
    max_bytes: int | None
    vocab_size: int | None
    tokenizer_folder: Path | None
    how: How

    @property
    def identity(self) -> str:
        """Return the identity of the request, which is equal where the resulting tokens are."""
        tokenizer: object = [self.vocab_size, self.how.tokenizer_mib]
        if self.tokenizer_folder is not None:
            files = [self.tokenizer_folder / name for name in SETTINGS]
            tokenizer = [sha256_of_file(file) if file.is_file() else "" for file in files]
        return sha256_of_value([self.corpus.identity, self.max_bytes, tokenizer])

    def tokenizing(self) -> Tokenizing:
        """Return the given tokenizer, or train one."""
        if self.tokenizer_folder is not None:
            return given(self.tokenizer_folder)
        assert self.vocab_size is not None
        max_bytes = int(self.how.tokenizer_mib * MIB)
        _say(f"training a tokenizer on the first {max_bytes / MIB:g} MiB at most")
        return trained(self._texts(max_bytes), self.vocab_size, self.text)

    def pieces(self) -> Iterator[TextPiece]:
        """Yield the pieces to tokenize, up to the limit of text."""
        room = self.max_bytes
        for piece in self.corpus.pieces():
            if room is not None:
                room -= len(piece.text.encode())
                if room < 0:
                    return
            yield piece

    def _texts(self, room: int) -> Iterator[str]:
        for piece in self.pieces():
            text = plain(piece.text) if self.corpus.strips_markup else piece.text
            yield text
            room -= len(text.encode())
            if room <= 0:
                return


def _prepare(request: _Request, targets: DataFolder, unfinished: Unfinished) -> None:
    done = unfinished.read(request.identity)
    if done is None:
        tokenizing = request.tokenizing()
        done = unfinished.begin(request.identity, tokenizing)
    else:
        _say(f"going on behind document {done.documents}")
    done = _encoded(request, unfinished, done)
    if not done.documents:
        within = "" if request.max_bytes is None else f" within {request.max_bytes} bytes"
        problem = f"no text in files {request.glob!r}{within}" if request.glob else f"no text{within}"
        raise BadInput(request.text, problem, "check --text, --glob and --max-mib")
    targets.description.unlink(missing_ok=True)
    write_index(targets.index, unfinished.all_lengths(done.documents), token_dtype(done.vocab_size))
    os.replace(unfinished.tokenizer, targets.tokenizer)
    os.replace(unfinished.tokens, targets.tokens)
    description = PreparedData(
        text=request.text,
        source=request.source.value,
        glob=request.glob,
        vocab_size=done.vocab_size,
        documents=done.documents,
        text_bytes=done.text_bytes,
        tokens=done.tokens,
        tokenizer_sha256=done.tokenizer_sha256,
        tokens_sha256=sha256_of_file(targets.tokens),
    )
    write_document(targets.description, description)
    unfinished.remove()
    _say(f"{done.tokens} tokens of {done.documents} documents, vocabulary {done.vocab_size}")


def _encoded(request: _Request, unfinished: Unfinished, done: Done) -> Done:
    """Tokenize the rest of the corpus."""
    strips_markup = request.corpus.strips_markup
    encoder = Encoder(unfinished.tokenizer, done.tokenizer_sha256, done.end, done.vocab_size, strips_markup)
    pieces = islice(request.pieces(), done.pieces, None)
    size, first, began = max(request.corpus.size, 1), done, time.monotonic()
    reported_s = began
    with unfinished.appended(done) as appender, encoding(encoder, pieces, request.how.workers) as batches:
        for encoded in batches:
            appender.write(encoded)
            if (now := time.monotonic()) - reported_s >= _SAY_EVERY_S:
                reported_s = now
                _say(_progress(first, appender.done, size, now - began))
    return appender.done


def _progress(first: Done, done: Done, size: int, time_s: float) -> str:
    """Return a line of the progress since preparing began or went on, `time_s` seconds ago, and the remaining time."""
    rate = (done.tokens - first.tokens) / time_s
    left_s = (size - done.at) * time_s / max(done.at - first.at, 1)
    share = f"{100 * done.at / size:.1f} % of the text, {done.tokens / 1e6:.1f} million tokens"
    return f"{share}, {rate / 1e6:.2f} million tokens/s, {left_s / 60:.0f} min left"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _import_megatron(index: Path, tokenizer_folder: Path | None, targets: DataFolder) -> None:
    """Copy Megatron's token file into a folder of prepared data, checked against the vocabulary of its tokenizer.

    Raises BadInput where a file is damaged, a token is not in the vocabulary, or no tokenizer is given.
    """
    if tokenizer_folder is None:
        raise BadInput(index, "its tokens are of some tokenizer", "name the folder of that model with --tokenizer")
    if index.suffix != ".idx":
        raise BadInput(index, "is no .idx", "name the .idx of Megatron's token file")
    tokenizing, token_file = given(tokenizer_folder), index.with_suffix(".bin")
    read = read_tokens(token_file, index)
    tokens, opened = read.tokens, read.index
    if not opened.num_documents or not opened.total:
        raise BadInput(index, "holds no tokens", "prepare a text")
    for first in range(0, len(tokens), _BLOCK):
        block = tokens[first : first + _BLOCK]
        strange = np.flatnonzero((block < 0) | (block >= tokenizing.vocab_size))
        if len(strange):
            number, token = first + strange[0], block[strange[0]]
            problem = f"token number {number} is {token}, the tokenizer has {tokenizing.vocab_size}"
            raise BadInput(token_file, problem, "name the tokenizer that these tokens are of")
    targets.description.unlink(missing_ok=True)
    with atomic_path(targets.tokens) as temporary:
        shutil.copyfile(token_file, temporary)
    write_index(targets.index, opened.lengths, opened.dtype, opened.documents)
    tokenizing.write(targets.tokenizer)
    description = PreparedData(
        text=str(index),
        source=Source.MEGATRON.value,
        glob="",
        vocab_size=tokenizing.vocab_size,
        documents=opened.num_documents,
        text_bytes=None,
        tokens=opened.total,
        tokenizer_sha256=sha256_of_file(targets.tokenizer),
        tokens_sha256=sha256_of_file(targets.tokens),
    )
    write_document(targets.description, description)
