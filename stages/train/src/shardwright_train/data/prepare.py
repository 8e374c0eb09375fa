"""Preparation of data: a corpus becomes shards of tokens, and these a token file; Megatron's own files are copied.

The text is cut into the same shards each time, and a process writes the tokens of a shard to a file, completely or not
at all. After a kill, shards that already exist are not tokenized again.
"""

import os
import shutil
import signal
import sys
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from itertools import chain, islice, starmap
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shardwright.io.errors import BadInput, RunFailed
from shardwright.io.json import (
    atomic_path,
    check_writable,
    sha256_of_file,
    sha256_of_value,
    write_bytes,
    write_document,
)
from shardwright.types import MIB
from shardwright_train.data.completions import Form, Reader, form_of
from shardwright_train.data.corpora import Corpus, Source, TextPiece, check_plain, open_corpus, plain, source_of
from shardwright_train.data.split import LossOn
from shardwright_train.data.tokenizer import (
    CONSULTED,
    TOKENIZER,
    DocumentEnds,
    Tokenizing,
    given,
    library_faults,
    trained,
)
from shardwright_train.data.tokens import DataFolder, PreparedData, only_writer, read_tokens, token_dtype, write_index

_SAY_EVERY_S = 10.0
_BLOCK = 1 << 20
_BEGUN = "begun.json"
_SHARD_CHARACTERS, _SHARD_PIECES = 1 << 21, 1 << 16
"""Largest number of characters and pieces of a shard: a kill loses about a second of a process's work; they also bound
its memory."""
_BATCH_CHARACTERS = 1 << 19
_AHEAD = 2
"""Number of shards in progress per process, which bounds memory independently of the corpus's size."""


class How(NamedTuple):
    """The secondary options of `prepare`."""

    source: Source = Source.AUTO
    field: str = "text"
    """Field of JSON lines and of rows that contains the document."""
    dataset_split: str = "train"
    tokenizer_mib: float = 64.0
    """Largest amount of text that a tokenizer is trained on, in MiB."""
    workers: int | None = None
    """Number of processes; None: one per core."""
    loss_on: LossOn = LossOn.ALL


_USUAL = How()


class _Begun(msgspec.Struct, frozen=True):
    """The state of a preparation, from which a later start of the same request resumes."""

    request: str
    """Hash of source and options; equal hashes mean equal tokens."""
    ends: DocumentEnds
    vocab_size: int
    form: Form | None = None
    """Form of examples of which a part is learned; None: documents are texts."""


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

    Each document has the tokens around it that its tokenizer adds, and ends with an end-of-text token. If the text
    exceeds `max_mib` (MiB), a plain file is cut there, at the end of a line; other documents beyond it are left out.
    Killed and started again, it resumes from the shards on the disk. A text too short for `vocab_size` gives a smaller
    vocabulary, which data.json records. With `tokenizer_folder` that model's tokenizer is used, and none is trained.
    Loss on completions also writes OUT/targets.bin, which marks the completions' tokens.

    Raises BadInput if there is no text, if it is damaged, or unless exactly one of vocabulary size and tokenizer is
    given: then nothing that was written is left.
    """
    source = source_of(text, glob) if how.source is Source.AUTO else how.source
    if source is Source.MEGATRON:
        _import_megatron(Path(text), tokenizer_folder, DataFolder(out))
        return
    if (vocab_size is None) == (tokenizer_folder is None):
        raise BadInput("prepare", "it needs either --vocab-size or --tokenizer", "train a tokenizer, or pass a model's")
    max_bytes = None if max_mib is None else int(max_mib * MIB)
    learns_part = how.loss_on is LossOn.COMPLETIONS
    if learns_part:
        _check_examples(source, tokenizer_folder, how)
    corpus = open_corpus(text, source, glob, None if learns_part else how.field, how.dataset_split, max_bytes)
    if corpus.strips_markup:
        check_plain(text)
    targets = DataFolder(out)
    check_writable(targets.description)
    with only_writer(out):
        _write(corpus, _begun(corpus, vocab_size, tokenizer_folder, how, targets), how.workers, targets)


def _check_examples(source: Source, tokenizer_folder: Path | None, how: How) -> None:
    """Raise BadInput unless a source may contain examples, and a model's tokenizer is given for them."""
    if source not in (Source.JSONL, Source.DATASETS):
        problem = f"a source of {source} has no prompts and completions"
        raise BadInput("--loss-on completions", problem, "pass JSON lines or a folder of datasets")
    if tokenizer_folder is None:
        raise BadInput("--loss-on completions", "needs a tokenizer", "pass the model's with --tokenizer")
    if how.field != _USUAL.field:
        raise BadInput("--field", "examples have fields of their own: docs/data.md", "leave it out")


def _begun(
    corpus: Corpus, vocab_size: int | None, tokenizer_folder: Path | None, how: How, targets: DataFolder
) -> _Begun:
    """Return the state of a killed start of the same request, or begin with a tokenizer."""
    tokenizer: object = [vocab_size, how.tokenizer_mib]
    if tokenizer_folder is not None:
        files = [tokenizer_folder / name for name in CONSULTED]
        tokenizer = [version("transformers"), *(sha256_of_file(file) if file.is_file() else "" for file in files)]
    folder = targets.unfinished
    request = sha256_of_value([corpus.identity, tokenizer, _SHARD_CHARACTERS, _SHARD_PIECES])
    learns_part = how.loss_on is LossOn.COMPLETIONS
    try:
        begun = msgspec.json.decode((folder / _BEGUN).read_bytes(), type=_Begun)
    except (OSError, msgspec.DecodeError):
        begun = None
    if begun is not None and begun.request == request and (folder / TOKENIZER).is_file():
        _say(f"resuming after {len(list(folder.glob('*.npz')))} finished shards")
        return begun
    shutil.rmtree(folder, ignore_errors=True)
    tokenizing = given(tokenizer_folder) if tokenizer_folder else _trained(corpus, vocab_size or 0, how.tokenizer_mib)
    tokenizing.write(folder)
    first = next(corpus.pieces(), None) if learns_part else None
    form = None if first is None else form_of(first)
    ends = tokenizing.ends if form is None else form.ends(tokenizing.ends)
    begun = _Begun(request, ends, tokenizing.vocab_size, form)
    write_bytes(folder / _BEGUN, msgspec.json.encode(begun))
    return begun


def _trained(corpus: Corpus, vocab_size: int, mib: float) -> Tokenizing:
    def texts() -> Iterator[str]:
        room = int(mib * MIB)
        for piece in corpus.pieces():
            text = plain(piece.text) if corpus.strips_markup else piece.text
            yield text
            room -= len(text.encode())
            if room <= 0:
                return

    _say(f"training a tokenizer on at most the first {mib:g} MiB")
    return trained(texts(), vocab_size, corpus.name)


def _write(corpus: Corpus, begun: _Begun, workers: int | None, targets: DataFolder) -> None:
    """Tokenize the shards that are missing, and concatenate all of them."""
    folder = targets.unfinished
    tokenizer_sha256 = sha256_of_file(folder / TOKENIZER)
    encoder = Encoder(
        folder / TOKENIZER, tokenizer_sha256, begun.ends, begun.vocab_size, corpus.strips_markup, begun.form
    )
    shards: list[Path] = []

    def missing() -> Iterator[tuple[Path, list[TextPiece]]]:
        for pieces in _batches(corpus.pieces(), _SHARD_CHARACTERS, _SHARD_PIECES):
            shards.append(folder / f"{len(shards):09}.npz")
            if not shards[-1].exists():
                yield shards[-1], pieces

    _follow(_made(encoder, missing(), workers), corpus.size)
    if not shards:
        within = f" within {corpus.max_bytes} bytes" if corpus.max_bytes is not None else ""
        problem = f"no text in files {corpus.glob!r}{within}" if corpus.glob else f"no text{within}"
        raise BadInput(corpus.name, problem, "check --text, --glob and --max-mib")
    learned = None if begun.form is None else _learned(shards, corpus.name)
    targets.description.unlink(missing_ok=True)
    targets.targets.unlink(missing_ok=True)
    documents, tokens, text_bytes = _join(shards, targets, begun.vocab_size)
    if learned is not None:
        _join_marks(shards, targets)
    targets.settings.unlink(missing_ok=True)
    for file in (targets.tokenizer, targets.settings):
        if (folder / file.name).exists():
            os.replace(folder / file.name, file)
    description = PreparedData(
        text=corpus.name,
        source=corpus.source.value,
        glob=corpus.glob,
        vocab_size=begun.vocab_size,
        documents=documents,
        text_bytes=text_bytes,
        tokens=tokens,
        tokens_before=begun.ends.before,
        tokens_after=begun.ends.after,
        tokenizer_sha256=tokenizer_sha256,
        tokens_sha256=sha256_of_file(targets.tokens),
        targets=learned,
        targets_sha256=None if learned is None else sha256_of_file(targets.targets),
    )
    write_document(targets.description, description)
    shutil.rmtree(folder, ignore_errors=True)
    part = "" if learned is None else f", {learned / tokens:.1%} of them learned ({begun.form})"
    _say(f"{tokens} tokens of {documents} documents{part}, vocabulary {begun.vocab_size}")


def _batches(pieces: Iterable[TextPiece], most_characters: int, most_pieces: int) -> Iterator[list[TextPiece]]:
    batch: list[TextPiece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= most_characters or len(batch) == most_pieces:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@dataclass(frozen=True)
class Encoder:
    """A tokenizer that can be passed between processes."""

    tokenizer: Path
    sha256: str
    """SHA-256 of the tokenizer's file."""
    document: DocumentEnds
    vocab_size: int
    strips_markup: bool
    form: Form | None = None
    """Form of examples of which a part is learned; None: documents are texts."""

    def __call__(self, shard: Path, pieces: list[TextPiece]) -> tuple[int, int]:
        """Write a shard, and return its number of tokens and the position in the corpus after it.

        Raises BadInput if the tokenizer cannot encode a piece.
        """
        ids, ends, text_bytes = array("i"), [], 0
        targets = array("b")
        for batch in _batches(pieces, _BATCH_CHARACTERS, _SHARD_PIECES):
            if self.form is not None:
                for example in _reader(self).learned(batch):
                    ids.extend(example.ids)
                    targets.extend(example.targets)
                    ends.append(len(ids))
                text_bytes += sum(len(piece.text.encode()) for piece in batch)
                continue
            texts = [plain(piece.text) if self.strips_markup else piece.text for piece in batch]
            text_bytes += sum(len(text.encode()) for text in texts)
            for piece, encoding in zip(batch, self._encodings(texts), strict=True):
                if piece.begins:
                    ids.extend(self.document.before)
                ids.extend(encoding.ids)
                if piece.ends:
                    ids.extend(self.document.after)
                    ends.append(len(ids))
        tokens = np.frombuffer(ids, np.int32)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise BadInput(TOKENIZER, f"produces tokens that are not below {self.vocab_size}", "take another")
        tokens = tokens.astype(token_dtype(self.vocab_size))
        with atomic_path(shard) as temporary, temporary.open("wb") as file:
            marks: dict[str, Any] = {} if self.form is None else {"targets": np.frombuffer(targets, np.uint8)}
            np.savez(file, tokens=tokens, ends=np.array(ends, np.int64), text_bytes=np.int64(text_bytes), **marks)
        return len(tokens), pieces[-1].at

    def _encodings(self, texts: list[str]) -> list[Any]:
        remedy = "use a tokenizer with a token for unknown text"
        with library_faults(TOKENIZER, "cannot encode a text", remedy):
            return list(_tokenizer(self.tokenizer, self.sha256).encode_batch_fast(texts, add_special_tokens=False))


@lru_cache(maxsize=1)
def _reader(encoder: Encoder) -> Reader:
    assert encoder.form is not None
    return Reader(encoder.tokenizer.parent, encoder.form, encoder.document, encoder.vocab_size)


@lru_cache(maxsize=1)
def _tokenizer(file: Path, _sha256: str) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(file))
    # The spelling of a special token in a text is ordinary text.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _made(
    encoder: Encoder, work: Iterator[tuple[Path, list[TextPiece]]], workers: int | None
) -> Iterator[tuple[int, int]]:
    """Make shards, in this process or in workers, and yield the encoder's result for each, in order.

    Workers, one per core by default, end with this process however it ends.
    """
    few = list(islice(work, 2))
    workers = workers or len(os.sched_getaffinity(0))
    if len(few) < 2 or workers == 1:  # a single shard is made before worker processes would have started
        yield from starmap(encoder, chain(few, work))
        return
    pool, ahead = ProcessPoolExecutor(workers, get_context("spawn"), _start), deque[Future[tuple[int, int]]]()
    try:
        for shard, pieces in chain(few, work):
            ahead.append(pool.submit(encoder, shard, pieces))
            if len(ahead) == _AHEAD * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    except BrokenProcessPool:
        raise RunFailed("a worker process was killed: run the same command again to resume") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the number of processes is as requested
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _follow(made: Iterator[tuple[int, int]], size: int) -> None:
    """Print the progress and the remaining time while shards are made from a corpus.

    `made`: the number of tokens of each shard, and the position in the corpus after it. `size`: the size of the corpus,
    in the unit of these positions: bytes, or rows of a data set.
    """
    began_s = said_s = time.monotonic()
    tokens, first_at = 0, None
    for more, at in made:
        tokens, now_s = tokens + more, time.monotonic()
        first_at = at if first_at is None else first_at
        if now_s - said_s >= _SAY_EVERY_S and at > first_at:
            said_s, left_s = now_s, (size - at) * (now_s - began_s) / (at - first_at)
            rate = tokens / (now_s - began_s) / 1e6
            _say(f"{100 * at / size:.1f} % of the text, {rate:.2f} million tokens/s, {left_s / 60:.0f} min left")


def _join(shards: Sequence[Path], targets: DataFolder, vocab_size: int) -> tuple[int, int, int]:
    """Write the tokens and the index of all shards; return the numbers of documents, tokens and bytes of text."""
    begin = total = text_bytes = 0  # `begin`: the first token of the document that a shard may leave open
    dtype, spool = token_dtype(vocab_size), targets.unfinished / "lengths"
    with atomic_path(targets.tokens) as temporary, temporary.open("wb") as file, spool.open("wb") as lengths:
        for shard in shards:
            tokens, ends, shard_text_bytes = _read_shard(shard, "tokens", "ends", "text_bytes")
            file.write(tokens.tobytes())
            ends = total + ends
            lengths.write(np.diff(ends, prepend=begin).astype("<i8").tobytes())
            begin, total = int(ends[-1]) if len(ends) else begin, total + len(tokens)
            text_bytes += int(shard_text_bytes)
    documents = spool.stat().st_size // 8
    write_index(targets.index, np.memmap(spool, "<i8", mode="r", shape=(documents,)), dtype)
    return documents, total, text_bytes


def _join_marks(shards: Sequence[Path], targets: DataFolder) -> None:
    """Write the marks of learned tokens of all shards into one file."""
    with atomic_path(targets.targets) as temporary, temporary.open("wb") as file:
        for shard in shards:
            file.write(_read_shard(shard, "targets")[0].tobytes())


def _learned(shards: Sequence[Path], name: object) -> int:
    """Return the number of learned tokens in all shards; raise BadInput if there are none."""
    learned = sum(int(_read_shard(shard, "targets")[0].sum()) for shard in shards)
    if not learned:
        raise BadInput(name, "no example has a token to learn", "check the completions, labels or messages")
    return learned


def _read_shard(shard: Path, *names: str) -> list[NDArray[Any]]:
    """Return arrays of a shard by name: its tokens, the ends of its documents, the bytes of its text, its marks.

    Raises RunFailed if it is damaged.
    """
    try:
        with np.load(shard) as held:
            return [held[name] for name in names]
    except (BadZipFile, EOFError, KeyError, ValueError, zlib.error):
        shard.unlink()
        raise RunFailed(f"{shard} was damaged and has been removed: run the same command again") from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _import_megatron(index: Path, tokenizer_folder: Path | None, targets: DataFolder) -> None:
    """Copy Megatron's token file into a folder of prepared data, after checking it against its tokenizer's vocabulary.

    Raises BadInput if a file is damaged, a token is not in the vocabulary, or no tokenizer is given.
    """
    if tokenizer_folder is None:
        raise BadInput(
            index, "its tokens need the tokenizer that made them", "pass the folder of its model with --tokenizer"
        )
    if index.suffix != ".idx":
        raise BadInput(index, "is not an .idx file", "pass the .idx of Megatron's token file")
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
            raise BadInput(token_file, problem, "pass the tokenizer that made these tokens")
    targets.description.unlink(missing_ok=True)
    with atomic_path(targets.tokens) as temporary:
        shutil.copyfile(token_file, temporary)
    write_index(targets.index, opened.lengths, opened.dtype, opened.documents)
    tokenizing.write(targets.tokenizer.parent)
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
