"""The tokens of each step: a function of data, seed and step alone, whatever the plan."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright_formats.io import BadInput, sha256_of_file, sha256_of_value
from shardwright_train.data.description import DataFolder
from shardwright_train.data.order import samples_at
from shardwright_train.data.split import WHOLE, Part, Split
from shardwright_train.data.token_index import TokenIndex
from shardwright_train.data.tokens import TokenFile, read_tokens


@dataclass(frozen=True)
class Samples:
    """A split of a token stream cut into samples: to train on, in another order each epoch; to evaluate, in their own.

    Sample i of the split is its tokens [i * S, i * S + S], so that each token but the first is a label once an epoch.
    """

    folder: Path
    tokens: NDArray[Any]
    """Tokens of the split [tokens], mapped from the file."""
    vocab_size: int
    sequence_length: int
    seed: int
    sha256: str
    """SHA-256 of the token stream and of the split."""
    index: TokenIndex
    tokenizer_sha256: str
    first: int = 0
    """Index of the split's first token in the file."""
    shuffled: bool = True

    @property
    def per_epoch(self) -> int:
        """Return the number of samples of one epoch; the remainder of the stream is not used."""
        return (len(self.tokens) - 1) // self.sequence_length

    def read(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return tokens [n, S + 1] of the samples with these numbers over all epochs: inputs [:-1], labels [1:].

        Raises BadInput when the stream holds a token that is not in the vocabulary.
        """
        firsts = self.numbers(indices) * self.sequence_length
        found = np.stack([self.tokens[first : first + self.sequence_length + 1] for first in firsts]).astype(np.int64)
        strange = (found < 0) | (found >= self.vocab_size)
        if strange.any():
            what = f"a token after number {self.first + firsts[strange.any(1)][0]} is not in the vocabulary"
            raise BadInput(DataFolder(self.folder).tokens, f"{what} of {self.vocab_size}", "prepare the data again")
        return found

    def documents(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the document [n, S + 1] of each token of these samples, numbered from 0 in each sample."""
        firsts = self.first + self.numbers(indices) * self.sequence_length
        return np.stack([self._documents_from(int(first)) for first in firsts])

    def _documents_from(self, first: int) -> NDArray[np.int64]:
        begun = np.zeros(self.sequence_length + 1, np.int64)
        document = self.index.first_document_from(first + 1)
        while document < self.index.num_documents:
            start = self.index.document_start(document)
            if start > first + self.sequence_length:
                break
            begun[start - first] = 1
            document += 1
        return np.cumsum(begun)

    def numbers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples of the split, from 0, that have these numbers counted over all epochs."""
        return samples_at(indices, self.per_epoch, self.seed) if self.shuffled else indices % self.per_epoch

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise BadInput unless every token is below a model's vocabulary size."""
        if self.vocab_size > vocab_size:
            raise BadInput(
                DataFolder(self.folder).description,
                f"vocab_size {self.vocab_size} is more than the model's {vocab_size}",
                f"prepare the data with --vocab-size {vocab_size} or less",
            )

    def check_contents(self) -> None:
        """Read the files once; raise BadInput unless they match data.json."""
        files = DataFolder(self.folder)
        described = files.read_description()
        for file, said in (
            (files.tokens, described.tokens_sha256),
            (files.tokenizer, described.tokenizer_sha256),
        ):
            if sha256_of_file(file) != said:
                raise BadInput(file, f"its SHA-256 is not what {files.description.name} says", "prepare the data again")


def open_samples(folder: Path, sequence_length: int, seed: int, part: Part = WHOLE) -> Samples:
    """Open a split of a folder of prepared data; the tokens are mapped, not read.

    Raises BadInput when a file is damaged, does not belong to the others, or the split holds less than one sample.
    """
    files = DataFolder(folder)
    described = files.read_description()
    opened = read_tokens(files.tokens, files.index)
    if len(opened.tokens) != described.tokens:
        what = f"has {len(opened.tokens)} tokens, data.json says {described.tokens}"
        raise BadInput(files.tokens, what, "prepare the data again")
    first, end = _tokens_of(opened, part)
    _check_splits(files, opened, part)
    if end - first <= sequence_length:
        of_split = "" if part == WHOLE else f" of the {part.split} split"
        what = f"{end - first} tokens{of_split} are less than one sample of {sequence_length} + 1"
        raise BadInput(files.tokens, what, "prepare more text or shorten the sequence")
    return Samples(
        folder=folder,
        tokens=opened.tokens[first:end],
        vocab_size=described.vocab_size,
        sequence_length=sequence_length,
        seed=seed,
        sha256=sha256_of_value([described.sha256, *part.identity]) if part.identity else described.sha256,
        index=opened.index,
        tokenizer_sha256=described.tokenizer_sha256,
        first=first,
        shuffled=part.split is Split.TRAIN,
    )


def _check_splits(files: DataFolder, opened: TokenFile, part: Part) -> None:
    """Raise BadInput where document boundaries leave the requested split empty."""
    for split in Split:
        each = Part(split, part.fractions)
        begin, end = each.bounds
        first, last = _tokens_of(opened, each)
        if begin < end and first == last:
            share = f"{end - begin:.3g} of {opened.index.num_documents} documents, which are not cut,"
            what = f"{share} leave no tokens to the {split} split"
            remedy = "prepare it in more documents (files, or lines with --source jsonl), or give --valid-data"
            raise BadInput(files.tokens, what, remedy)


def _tokens_of(opened: TokenFile, part: Part) -> tuple[int, int]:
    """Return the range of a split's tokens: whole documents, from the first that begins inside the split."""
    begin, end = (_document_start(opened.index, share) for share in part.bounds)
    return begin, end


def _document_start(index: TokenIndex, share: float) -> int:
    return index.document_start(index.first_document_from(round(share * index.total)))
