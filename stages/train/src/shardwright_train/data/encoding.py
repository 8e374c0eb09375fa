"""Tokenization by worker processes, in the order of the texts."""

import os
import signal
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shardwright_formats.io import BadInput, RunFailed
from shardwright_train.data.corpora.piece import Piece
from shardwright_train.data.tokens import token_dtype

_AHEAD = 3
"""Number of batches in progress per worker, which bounds memory independently of the corpus' size."""
_BATCH_CHARACTERS = 1 << 19
_BATCH_PIECES = 4096


class Encoded(NamedTuple):
    """The tokens of some pieces of text."""

    tokens: bytes
    lengths: NDArray[np.int64]
    """Tokens of each piece [pieces], those that end documents included."""
    ends: NDArray[np.bool_]
    """Whether a document ends with each piece [pieces]."""
    text_bytes: int
    at: int
    """Position in the corpus after these pieces, in the unit of `Corpus.size`."""


@dataclass(frozen=True)
class Encoder:
    """A tokenizer as processes hand it to one another."""

    tokenizer: Path
    sha256: str
    """SHA-256 of the tokenizer's file."""
    end: int
    """The token that closes a document."""
    vocab_size: int
    is_wikitext: bool

    def __call__(self, pieces: list[Piece]) -> Encoded:
        """Return the tokens of some pieces; raise BadInput where the tokenizer cannot encode one."""
        texts = [plain(piece.text) if self.is_wikitext else piece.text for piece in pieces]
        found, ends = array("i"), []
        for piece, encoding in zip(pieces, self._encodings(texts), strict=True):
            found.extend(encoding.ids)
            if piece.ends:
                found.append(self.end)
            ends.append(len(found))
        tokens = np.frombuffer(found, np.int32)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise BadInput("tokenizer.json", f"gives tokens that are not below {self.vocab_size}", "take another")
        return Encoded(
            tokens=tokens.astype(token_dtype(self.vocab_size)).tobytes(),
            lengths=np.array(ends, np.int64) - np.array([0, *ends[:-1]], np.int64),
            ends=np.array([piece.ends for piece in pieces]),
            text_bytes=sum(len(text.encode()) for text in texts),
            at=pieces[-1].at,
        )

    def _encodings(self, texts: list[str]) -> list[Any]:
        try:
            return list(_tokenizer(self.tokenizer, self.sha256).encode_batch_fast(texts, add_special_tokens=False))
        except Exception as error:
            if type(error) is not Exception:  # the library raises nothing narrower
                raise
            what = f"cannot take a text ({error})"
            raise BadInput(
                "tokenizer.json", what, "take a tokenizer that has a token for what it does not know"
            ) from None


@lru_cache(maxsize=1)
def _tokenizer(file: Path, _sha256: str) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(file))
    # A text that spells a special token is text.
    tokenizer.encode_special_tokens = True
    return tokenizer


def plain(wikitext: str) -> str:
    """Return an article without links, tables, templates and other markup, by mwparserfromhell."""
    import mwparserfromhell

    return str(mwparserfromhell.parse(wikitext).strip_code())


def check_plain(corpus: object) -> None:
    """Raise BadInput where the package that removes markup is not installed."""
    try:
        plain("")
    except ImportError:
        remedy = "pip install 'shardwright-train[wikipedia]', or take --source wikitext, markup and all"
        raise BadInput(corpus, "taking markup out takes the package `mwparserfromhell`", remedy) from None


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield batches of pieces, large enough to be worth sending to another process."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS or len(batch) == _BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@contextmanager
def encoding(encoder: Encoder, workers: int) -> Iterator[Callable[[Iterable[list[Piece]]], Iterator[Encoded]]]:
    """Yield a function that tokenizes batches in order: in this process for one worker, else in worker processes.

    Worker processes end with the block, and with this process however it ends.
    """
    if workers == 1:
        yield lambda work: map(encoder, work)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start)
    try:
        yield lambda work: _in_order(pool, encoder, work, _AHEAD * workers)
    except BrokenProcessPool:
        raise RunFailed("a worker process was killed: run the same command again to go on") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, encoder: Encoder, work: Iterable[list[Piece]], most: int) -> Iterator[Encoded]:
    ahead: deque[Future[Encoded]] = deque()
    for batch in work:
        ahead.append(pool.submit(encoder, batch))
        if len(ahead) == most:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def _start() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are as many as were asked for
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
