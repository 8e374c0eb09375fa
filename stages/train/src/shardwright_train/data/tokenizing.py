"""Tokenizers: a byte-level BPE trained on a text, or a model's own."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shardwright_formats.io import BadInput, read_bytes, read_object
from shardwright_train.data.description import END_OF_TEXT

TOKENIZER = "tokenizer.json"
SETTINGS = (TOKENIZER, "tokenizer_config.json")
"""The files of a model's tokenizer."""
_LEAST_VOCABULARY = 257  # every byte and the end of text
_MAX_WORD = 100_000
"""Largest number of consecutive characters of one kind: training takes time quadratic in it, here seconds."""
_WORD = re.compile(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+")  # as ByteLevel tells them apart
_ENDS = ("eos_token", "sep_token")


class Tokenizing(NamedTuple):
    """A tokenizer, and the token that closes each document."""

    tokenizer: Tokenizer
    end: int

    @property
    def vocab_size(self) -> int:
        """Return the vocabulary size; every token is below it."""
        return rows_of(self.tokenizer)


def rows_of(tokenizer: Tokenizer) -> int:
    """Return the number of rows of a model's table that a tokenizer's tokens need."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def trained(texts: Iterator[str], vocab_size: int) -> Tokenizing:
    """Train a tokenizer on texts; raise BadInput where the vocabulary has no room for all bytes."""
    if vocab_size < _LEAST_VOCABULARY:
        raise BadInput("--vocab-size", f"{vocab_size} is too small for bytes", f"ask for {_LEAST_VOCABULARY} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
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
        what = f"has no {' or '.join(_ENDS)} that is one of {file.name}"
        raise BadInput(settings, what, "name the token that closes a document")
    return Tokenizing(tokenizer, ends[0])


def learnable(texts: Iterator[str], text: str) -> Iterator[str]:
    """Yield the texts to train on; raise BadInput where a word is too long to learn from in reasonable time."""
    for each in texts:
        longest = max(_WORD.finditer(each), key=lambda word: word.end() - word.start(), default=None)
        if longest is not None and longest.end() - longest.start() > _MAX_WORD:
            beginning = each[longest.start() : longest.start() + 20]
            what = f"a word of {longest.end() - longest.start()} characters, over {_MAX_WORD}: {beginning!r}..."
            raise BadInput(text, what, "break it up, or leave it out")
        yield each


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
