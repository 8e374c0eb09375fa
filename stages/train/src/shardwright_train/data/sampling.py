"""Which tokens each step trains on: a function of data, seed and step alone, whatever the plan."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.json import sha256_of_file
from shardwright_train.data.description import DataFolder
from shardwright_train.data.order import samples_at
from shardwright_train.data.tokens import read_tokens


@dataclass(frozen=True)
class Samples:
    """A token stream cut into samples, in another order each epoch.

    Sample i of the stream is its tokens [i * S, i * S + S], so that each token but the first is a label once an epoch.
    """

    folder: Path
    tokens: NDArray[Any]
    """[all tokens], mapped from the file."""
    vocab_size: int
    sequence_length: int
    seed: int
    sha256: str
    """Identity of the token stream."""

    @property
    def per_epoch(self) -> int:
        """Number of samples of one epoch; what is left of the stream is not used."""
        return (len(self.tokens) - 1) // self.sequence_length

    def read(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens [n, S + 1] of the samples with these numbers, counted over all epochs: inputs [:-1], labels [1:].

        Raises BadInput when the stream holds a token that is not in the vocabulary.
        """
        firsts = samples_at(indices, self.per_epoch, self.seed) * self.sequence_length
        found = np.stack([self.tokens[first : first + self.sequence_length + 1] for first in firsts]).astype(np.int64)
        strange = (found < 0) | (found >= self.vocab_size)
        if strange.any():
            raise BadInput(
                DataFolder(self.folder).tokens,
                f"a token after number {firsts[strange.any(1)][0]} is not in the vocabulary of {self.vocab_size}",
                "prepare the data again",
            )
        return found

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise BadInput unless every token is below a model's vocabulary size."""
        if self.vocab_size > vocab_size:
            raise BadInput(
                DataFolder(self.folder).description,
                f"vocab_size {self.vocab_size} is more than the model's {vocab_size}",
                f"prepare the data with --vocab-size {vocab_size} or less",
            )

    def check_contents(self) -> None:
        """Read the files once; BadInput unless they are those that data.json was written for."""
        files = DataFolder(self.folder)
        described = files.read_description()
        for file, said in (
            (files.tokens, described.tokens_sha256),
            (files.tokenizer, described.tokenizer_sha256),
        ):
            if sha256_of_file(file) != said:
                raise BadInput(file, f"its SHA-256 is not what {files.description.name} says", "prepare the data again")


def open_samples(folder: Path, sequence_length: int, seed: int) -> Samples:
    """Open a folder of prepared data; the tokens are mapped, not read.

    Raises BadInput when a file is damaged, does not belong to the others, or holds less than one sample.
    """
    files = DataFolder(folder)
    described = files.read_description()
    tokens = read_tokens(files.tokens, files.index).tokens
    if len(tokens) != described.tokens:
        raise BadInput(
            files.tokens, f"has {len(tokens)} tokens, data.json says {described.tokens}", "prepare the data again"
        )
    if len(tokens) <= sequence_length:
        raise BadInput(
            files.tokens,
            f"{len(tokens)} tokens are less than one sample of {sequence_length} + 1",
            "prepare more text or shorten the sequence",
        )
    return Samples(folder, tokens, described.vocab_size, sequence_length, seed, described.sha256)
