"""Tokenization of a corpus into a token file, with a given tokenizer or one trained on the corpus."""

import os
import sys
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from shardwright_formats.io import BadInput, check_writable, sha256_of_file, sha256_of_value, write_document
from shardwright_launch.lock import only_run
from shardwright_launch.nodes import Nodes
from shardwright_train.data.corpora.open import Source, glob_of, open_corpus, source_of
from shardwright_train.data.corpora.piece import Corpus, Piece
from shardwright_train.data.description import DataFolder, PreparedData
from shardwright_train.data.encoding import Encoder, batches, check_plain, encoding, plain
from shardwright_train.data.imported import import_megatron
from shardwright_train.data.token_index import write_index
from shardwright_train.data.tokenizing import SETTINGS, Tokenizing, given, learnable, trained
from shardwright_train.data.tokens import token_dtype
from shardwright_train.data.unfinished import Done, Unfinished

_MIB = 1 << 20
_FEW = 16
"""Number of batches."""
_SAY_EVERY_S = 10.0


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
        import_megatron(Path(text), tokenizer_folder, out)
        return
    if (vocab_size is None) == (tokenizer_folder is None):
        raise BadInput("prepare", "it takes either --vocab-size or --tokenizer", "train a tokenizer, or name a model's")
    glob = glob_of(text, source) if glob is None else glob
    most_bytes = None if max_mib is None else int(max_mib * _MIB)
    corpus = open_corpus(text, source, glob, how.field, how.dataset_split, most_bytes)
    if corpus.is_wikitext:
        check_plain(text)
    asked = _Asked(text, source, glob, corpus, most_bytes, vocab_size, tokenizer_folder, how)
    is_new, targets = not out.exists(), DataFolder(out)
    check_writable(targets.description)
    with only_run(out.with_name(f"{out.name}.lock"), Nodes()):
        try:
            _prepare(asked, targets, Unfinished(targets.unfinished))
        except BadInput:
            Unfinished(targets.unfinished).remove()
            if is_new:
                out.rmdir()
            raise


class _Asked(NamedTuple):
    text: str
    source: Source
    glob: str
    corpus: Corpus
    most_bytes: int | None
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
        return sha256_of_value([self.corpus.identity, self.most_bytes, tokenizer])

    def tokenizing(self) -> Tokenizing:
        """Return the given tokenizer, or train one."""
        if self.tokenizer_folder is not None:
            return given(self.tokenizer_folder)
        assert self.vocab_size is not None
        most = int(self.how.tokenizer_mib * _MIB)
        _say(f"training a tokenizer on the first {most / _MIB:g} MiB at most")
        return trained(learnable(self._texts(most), self.text), self.vocab_size)

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces to tokenize, up to the limit of text."""
        room = self.most_bytes
        for piece in self.corpus.pieces():
            if room is not None:
                room -= len(piece.text.encode())
                if room < 0:
                    return
            yield piece

    def _texts(self, most_bytes: int) -> Iterator[str]:
        for piece in self.pieces():
            text = plain(piece.text) if self.corpus.is_wikitext else piece.text
            yield text
            most_bytes -= len(text.encode())
            if most_bytes <= 0:
                return


def _prepare(asked: _Asked, targets: DataFolder, unfinished: Unfinished) -> None:
    done = unfinished.read(asked.identity)
    if done is None:
        tokenizing = asked.tokenizing()
        done = unfinished.begin(asked.identity, tokenizing)
    else:
        _say(f"going on behind document {done.documents}")
    encoder = Encoder(unfinished.tokenizer, done.tokenizer_sha256, done.end, done.vocab_size, asked.corpus.is_wikitext)
    done = _encoded(asked, unfinished, encoder, done)
    if not done.documents:
        within = "" if asked.most_bytes is None else f" within {asked.most_bytes} bytes"
        what = f"no text in files {asked.glob!r}{within}" if asked.glob else f"no text{within}"
        raise BadInput(asked.text, what, "check --text, --glob and --max-mib")
    targets.description.unlink(missing_ok=True)
    write_index(targets.index, unfinished.all_lengths(done.documents), token_dtype(done.vocab_size))
    os.replace(unfinished.tokenizer, targets.tokenizer)
    os.replace(unfinished.tokens, targets.tokens)
    description = PreparedData(
        text=asked.text,
        source=asked.source.value,
        glob=asked.glob,
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


def _encoded(asked: _Asked, unfinished: Unfinished, encoder: Encoder, done: Done) -> Done:
    """Tokenize the rest of the corpus."""
    work = batches(islice(asked.pieces(), done.pieces, None))
    # Few are made into tokens before worker processes would have started.
    few = list(islice(work, _FEW))
    workers = 1 if len(few) < _FEW else asked.how.workers or len(os.sched_getaffinity(0))
    progress = _Progress(asked.corpus.size, done)
    with (
        unfinished.appended(done, token_dtype(done.vocab_size).itemsize) as appender,
        encoding(encoder, workers) as encode,
    ):
        for encoded in encode(chain(few, work)):
            appender.write(encoded)
            progress.say(appender.done)
    return appender.done


class _Progress:
    """A progress report of preparing, with the remaining time, every few seconds on standard error."""

    def __init__(self, size: int, begun: Done) -> None:
        self._size, self._begun = max(size, 1), begun
        self._began = self._said = time.monotonic()

    def say(self, done: Done) -> None:
        """Print the progress if it is due."""
        now = time.monotonic()
        if now - self._said < _SAY_EVERY_S:
            return
        self._said = now
        rate = (done.tokens - self._begun.tokens) / (now - self._began)
        left_s = (self._size - done.at) * (now - self._began) / max(done.at - self._begun.at, 1)
        share = f"{100 * done.at / self._size:.1f} % of the text, {done.tokens / 1e6:.1f} million tokens"
        _say(f"{share}, {rate / 1e6:.2f} million tokens/s, {left_s / 60:.0f} min left")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
