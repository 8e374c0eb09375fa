"""Tokens of a corpus in preparation: after a kill, preparing continues from what has reached the disk."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwright_formats.io import sha256_of_file, sync_path, write_bytes
from shardwright_train.data.tokenizing import Encoded, Tokenizing
from shardwright_train.data.tokens import token_dtype

_SAVE_EVERY_S = 5.0


class Done(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The progress of preparing a corpus."""

    request: str
    """Identity of the request: source and options."""
    tokenizer_sha256: str
    """SHA-256 of the tokenizer's file."""
    end: int
    """The token that closes a document."""
    vocab_size: int
    """Vocabulary size of the tokenizer."""
    pieces: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    open_tokens: int = 0
    """Number of the tokens so far that belong to a document that has not ended."""
    at: int = 0
    """Position in the corpus up to which it has been read."""


class Unfinished:
    """The folder of an unfinished preparation: tokens, document lengths, and progress."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens = folder / "tokens"
        """File of the tokens so far, in the .bin's format."""
        self.lengths = folder / "lengths"
        """File of the document lengths so far, int64."""
        self.tokenizer = folder / "tokenizer.json"
        """File of the tokenizer that made the tokens."""
        self.state = folder / "state.json"
        """File of the progress, which says how much of both files counts."""

    def read(self, request: str) -> Done | None:
        """Return the progress of the same request; None where nothing is left of it, or it is damaged."""
        try:
            done = msgspec.json.decode(self.state.read_bytes(), type=Done)
            sizes = self.tokens.stat().st_size, self.lengths.stat().st_size
        except (OSError, msgspec.DecodeError):
            return None
        itemsize = token_dtype(done.vocab_size).itemsize
        is_whole = sizes[0] >= itemsize * done.tokens and sizes[1] >= 8 * done.documents
        return done if is_whole and done.request == request and self.tokenizer.is_file() else None

    def begin(self, request: str, tokenizing: Tokenizing) -> Done:
        """Start from the beginning, removing previous contents."""
        self.remove()
        tokenizing.write(self.tokenizer)
        self.tokens.touch()
        self.lengths.touch()
        sha256 = sha256_of_file(self.tokenizer)
        done = Done(request=request, tokenizer_sha256=sha256, end=tokenizing.end, vocab_size=tokenizing.vocab_size)
        self.save(done)
        return done

    def all_lengths(self, documents: int) -> NDArray[np.int64]:
        """Return the lengths of all documents [documents], mapped."""
        return np.memmap(self.lengths, "<i8", mode="r", shape=(documents,))

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def save(self, done: Done) -> None:
        """Record the progress of files that are on the disk."""
        write_bytes(self.state, msgspec.json.encode(done))

    @contextmanager
    def appended(self, done: Done) -> Iterator["Appender"]:
        """Append after what is done; saves every few seconds, and when the block ends without an error."""
        with self.tokens.open("r+b") as tokens, self.lengths.open("r+b") as lengths:
            tokens.truncate(done.tokens * token_dtype(done.vocab_size).itemsize)
            lengths.truncate(8 * done.documents)
            tokens.seek(0, os.SEEK_END)
            lengths.seek(0, os.SEEK_END)
            appender = Appender(self, done, tokens, lengths)
            yield appender
            appender.save()


class Appender:
    """A writer of encoded pieces to the unfinished files."""

    def __init__(self, unfinished: Unfinished, done: Done, tokens: BinaryIO, lengths: BinaryIO) -> None:
        self.unfinished, self.done = unfinished, done
        self._tokens, self._lengths = tokens, lengths
        self._saved = time.monotonic()

    def write(self, encoded: Encoded) -> None:
        """Append the tokens of some pieces."""
        done, open_tokens = self.done, self.done.open_tokens
        ends = np.cumsum(encoded.lengths)[encoded.ends]
        lengths = np.diff(ends, prepend=0)
        if len(lengths):
            lengths[0] += open_tokens
            open_tokens = 0
        count = int(encoded.lengths.sum())
        self._tokens.write(encoded.tokens)
        self._lengths.write(lengths.astype("<i8").tobytes())
        self.done = msgspec.structs.replace(
            done,
            pieces=done.pieces + len(encoded.lengths),
            documents=done.documents + len(lengths),
            tokens=done.tokens + count,
            text_bytes=done.text_bytes + encoded.text_bytes,
            open_tokens=open_tokens + count - (int(ends[-1]) if len(ends) else 0),
            at=encoded.at,
        )
        if time.monotonic() - self._saved > _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Flush the files to disk, then record the progress."""
        for file in (self._tokens, self._lengths):
            file.flush()
            sync_path(Path(file.name))
        self.unfinished.save(self.done)
        self._saved = time.monotonic()
