"""Tokenizers, trained on a text or of a model, and tokenization by worker processes, in the order of the texts."""

import os
import re
import signal
import sys
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shardwright_formats.io import BadInput, RunFailed, read_bytes, read_object, write_bytes
from shardwright_train.data.corpora import TextPiece
from shardwright_train.data.tokens import token_dtype

END_OF_TEXT = "<|endoftext|>"
"""The token that ends every document; its number is 0."""
TOKENIZER = "tokenizer.json"
SETTINGS = (TOKENIZER, "tokenizer_config.json")
"""The files of a model's tokenizer."""
_MIN_VOCABULARY = 257  # every byte and the end of text
_MAX_WORD = 100_000
"""Largest number of consecutive characters of one kind: training takes time quadratic in it, here seconds."""
_WORD = re.compile(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+")  # as ByteLevel tells them apart
_ENDS = ("eos_token", "sep_token")
_AHEAD = 3
"""Number of batches in progress per worker, which bounds memory independently of the corpus' size."""
_BATCH_CHARACTERS = 1 << 19
_BATCH_PIECES = 4096
_FEW = 16
"""Number of batches for which no worker process is started."""


class Tokenizing(NamedTuple):
    """A tokenizer, and the token that closes each document."""

    tokenizer: Tokenizer
    end: int

    @property
    def vocab_size(self) -> int:
        """Return the vocabulary size; every token is below it."""
        return rows_of(self.tokenizer)

    def write(self, file: Path) -> None:
        """Write the tokenizer as tokenizer.json."""
        write_bytes(file, (self.tokenizer.to_str(pretty=True) + "\n").encode())


def rows_of(tokenizer: Tokenizer) -> int:
    """Return the number of rows of a model's table that a tokenizer's tokens need."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def trained(texts: Iterator[str], vocab_size: int, source: str) -> Tokenizing:
    """Train a tokenizer on texts of a source.

    Raises BadInput where the vocabulary has no room for all bytes, or a word is too long to learn from.
    """
    if vocab_size < _MIN_VOCABULARY:
        raise BadInput("--vocab-size", f"{vocab_size} is too small for bytes", f"ask for {_MIN_VOCABULARY} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_learnable(texts, source), trainer)
    return Tokenizing(tokenizer, tokenizer.get_vocab()[END_OF_TEXT])


def given(folder: Path) -> Tokenizing:
    """Return the tokenizer of a model's folder, with truncation and padding off.

    Raises BadInput where tokenizer.json is none, or tokenizer_config.json names no token that can close a document.
    """
    file, settings = (folder / name for name in SETTINGS)
    tokenizer = read_tokenizer(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    named = (_text_of(read_object(settings, any_text=True).get(key)) for key in _ENDS)
    ends = [number for token in named if token and (number := tokenizer.token_to_id(token)) is not None]
    if not ends:
        problem = f"has no {' or '.join(_ENDS)} that is one of {file.name}"
        raise BadInput(settings, problem, "name the token that closes a document")
    return Tokenizing(tokenizer, ends[0])


def end_of(folder: Path) -> tuple[str, int] | None:
    """Return the token that ends a text by a folder's tokenizer, and its number; None where it names none.

    A folder without settings, as `prepare` writes it, names `END_OF_TEXT` by having it.
    """
    file, settings = (folder / name for name in SETTINGS)
    if not file.exists():
        return None
    token = _text_of(read_object(settings, any_text=True).get(_ENDS[0])) if settings.exists() else END_OF_TEXT
    number = None if token is None else read_tokenizer(file).token_to_id(token)
    return None if token is None or number is None else (token, number)


def _learnable(texts: Iterator[str], source: str) -> Iterator[str]:
    """Yield the texts to train on; raise BadInput where a word is too long to learn from in reasonable time."""
    for text in texts:
        longest = max((match[0] for match in _WORD.finditer(text)), key=len, default="")
        if len(longest) > _MAX_WORD:
            problem = f"a word of {len(longest)} characters, over {_MAX_WORD}: {longest[:20]!r}..."
            raise BadInput(source, problem, "break it up, or leave it out")
        yield text


def read_tokenizer(file: Path) -> Tokenizer:
    """Read a tokenizer from an untrusted file; raise BadInput where it is none."""
    read_object(file, any_text=True)
    try:
        return Tokenizer.from_str(read_bytes(file).decode())
    except Exception as error:
        if type(error) is not Exception:  # the library raises nothing narrower where it knows no such tokenizer
            raise
        raise BadInput(file, f"is no tokenizer ({error})", "take one that `tokenizers` has saved") from None


def _text_of(token: object) -> str | None:
    """Return the text of a token, which files hold as a text or with its properties."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


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
    strips_markup: bool

    def __call__(self, pieces: list[TextPiece]) -> Encoded:
        """Return the tokens of some pieces; raise BadInput where the tokenizer cannot encode one."""
        texts = [plain(piece.text) if self.strips_markup else piece.text for piece in pieces]
        ids, ends = array("i"), []
        for piece, encoding in zip(pieces, self._encodings(texts), strict=True):
            ids.extend(encoding.ids)
            if piece.ends:
                ids.append(self.end)
            ends.append(len(ids))
        tokens = np.frombuffer(ids, np.int32)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise BadInput(TOKENIZER, f"gives tokens that are not below {self.vocab_size}", "take another")
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
            remedy = "take a tokenizer that has a token for what it does not know"
            raise BadInput(TOKENIZER, f"cannot take a text ({error})", remedy) from None


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


def _batches(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    """Yield batches of pieces, large enough to be worth sending to another process."""
    batch: list[TextPiece] = []
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
def encoding(encoder: Encoder, pieces: Iterable[TextPiece], workers: int | None) -> Iterator[Iterator[Encoded]]:
    """Yield the tokens of pieces by batches, in order: made in this process, or in worker processes for many pieces.

    Worker processes, one per core where `workers` is None, end with the block, and with this process however it ends.
    """
    work = _batches(pieces)
    # Few are made into tokens before worker processes would have started.
    few = list(islice(work, _FEW))
    workers = 1 if len(few) < _FEW else workers or len(os.sched_getaffinity(0))
    if workers == 1:
        yield map(encoder, chain(few, work))
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start)
    try:
        yield _in_order(pool, encoder, chain(few, work), _AHEAD * workers)
    except BrokenProcessPool:
        raise RunFailed("a worker process was killed: run the same command again to go on") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, encoder: Encoder, work: Iterable[list[TextPiece]], limit: int
) -> Iterator[Encoded]:
    ahead: deque[Future[Encoded]] = deque()
    for batch in work:
        ahead.append(pool.submit(encoder, batch))
        if len(ahead) == limit:
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
