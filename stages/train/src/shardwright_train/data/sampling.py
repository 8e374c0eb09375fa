"""The tokens of each step: a function only of data, seed and step, whatever the plan.

The shuffled order of an epoch's samples is computed per place, without storing a permutation. Several data sets may
be blended: the samples of a run are divided into rounds of 65,536. In each round a data set has a share of the places
in proportion to its weight, spread evenly. It goes on in its own order, over as many epochs as are needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from shardwright.io import BadInput, Document, Value, read_document, sha256_of_file, sha256_of_value
from shardwright_train.data.corpora import Source
from shardwright_train.data.split import WHOLE, LossOn, Split, SplitPart
from shardwright_train.data.tokens import AGAIN, DataFolder, PreparedData, TokenFile, TokenIndex, read_tokens

_ROUNDS = 8
"""Number of Feistel rounds: twice as many as make a permutation hard to tell from random (Luby & Rackoff 1988)."""
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
"""Multipliers of splitmix64 (Steele, Lea & Flood 2014)."""
_FOLD = np.uint64(32)
BLEND = "blend.json"
_ROUND = 1 << 16
_ORDER_OF_SPLITS = 2**40
"""Seed that no run has, which assigns samples to splits independently of the run."""


def samples_at(indices: NDArray[np.int64], per_epoch: int, seed: int) -> NDArray[np.int64]:
    """Return the indices of samples by their numbers over all epochs, each epoch in its own order."""
    epochs, places = np.divmod(indices, per_epoch)
    samples = np.empty_like(places)
    for epoch in np.unique(epochs):
        is_there = epochs == epoch
        samples[is_there] = _permuted(places[is_there].astype(np.uint64), per_epoch, _keys(seed, int(epoch)))
    return samples


@lru_cache(maxsize=4)
def _keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    return tuple(np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64))


def _permuted(places: NDArray[np.uint64], size: int, keys: tuple[np.uint64, ...]) -> NDArray[np.int64]:
    """Return places of `range(size)` under a pseudo-random permutation.

    A Feistel network permutes the numbers below the next power of four; results outside of the range are permuted again
    until they are inside (cycle walking: Black & Rogaway 2002, section 3), at most four times on average.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    images = _feistel(places, half, keys)
    while (outside := images >= size).any():
        images[outside] = _feistel(images[outside], half, keys)
    return images.astype(np.int64)


def _feistel(x: NDArray[np.uint64], half: int, keys: tuple[np.uint64, ...]) -> NDArray[np.uint64]:
    """Return the images of numbers of 2 x `half` bits under a permutation."""
    width, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> width, x & mask
    for key in keys:
        mixed = (right ^ key) * _FIRST
        mixed = (mixed ^ (mixed >> _FOLD)) * _SECOND
        left, right = right, left ^ ((mixed ^ (mixed >> _FOLD)) & mask)
    return (left << width) | right


class Shuffled(NamedTuple):
    """The shuffled order of a split of `samples` samples.

    Files often contain samples sorted by kind, so splits are parts of one shuffled order of all samples.
    """

    samples: int
    seed: int
    part: SplitPart = WHOLE

    @property
    def per_epoch(self) -> int:
        """Return the number of samples of the split."""
        first, end = self._bounds
        return end - first

    def chosen(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples' places in the files, by their numbers over all epochs."""
        if self.part.split is Split.TRAIN:
            indices = samples_at(indices, self.per_epoch, self.seed)
        if self.part == WHOLE:
            return indices
        return samples_at(self._bounds[0] + indices % self.per_epoch, self.samples, _ORDER_OF_SPLITS)

    @property
    def _bounds(self) -> tuple[int, int]:
        begin, end = (round(share * self.samples) for share in self.part.bounds)
        return begin, end


@dataclass(frozen=True)
class Samples:
    """A split of a token stream, cut into samples: reshuffled each epoch for training; in order for evaluation.

    With samples of S positions, sample i has the split's tokens i * S to i * S + S inclusive, so that each token except
    the first is a label once an epoch.
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
    tokens_before: tuple[int, ...] | None
    """Tokens before each document; None: unknown."""
    first: int = 0
    """Index of the split's first token in the file."""
    shuffled: bool = True
    marks: NDArray[np.uint8] | None = None
    """Whether each token of the split is learned [tokens], mapped from the file; None: all are."""
    marks_sha256: str | None = None

    @property
    def per_epoch(self) -> int:
        """The number of samples of one epoch; the rest of the stream is not used."""
        return (len(self.tokens) - 1) // self.sequence_length

    def read(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return tokens [n, S + 1] of the samples with these numbers over all epochs: inputs [:-1], labels [1:].

        Raises BadInput if the stream contains a token that is not in the vocabulary.
        """
        firsts = self.numbers(indices) * self.sequence_length
        length = self.sequence_length + 1
        tokens = np.stack([self.tokens[first : first + length] for first in firsts]).astype(np.int64)
        strange = (tokens < 0) | (tokens >= self.vocab_size)
        if strange.any():
            problem = f"a token after number {self.first + firsts[strange.any(1)][0]} is not in the vocabulary"
            raise BadInput(DataFolder(self.folder).tokens, f"{problem} of {self.vocab_size}", AGAIN)
        return tokens

    def targets(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each token [n, S + 1] of these samples 1 if it is learned, else 0."""
        length = self.sequence_length + 1
        if self.marks is None:
            return np.ones((len(indices), length), np.int64)
        firsts = self.numbers(indices) * self.sequence_length
        return np.stack([self.marks[first : first + length] for first in firsts]).astype(np.int64)

    def documents(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the document number [n, S + 1] of each token of these samples, counted from 0 in each sample."""
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
        """Return the indices in the split of the samples with these numbers over all epochs."""
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
        digests = {files.tokens: described.tokens_sha256, files.tokenizer: described.tokenizer_sha256}
        if self.marks_sha256 is not None:
            digests[files.targets] = self.marks_sha256
        for file, digest in digests.items():
            if sha256_of_file(file) != digest:
                raise BadInput(file, f"its SHA-256 differs from the one in {files.description.name}", AGAIN)


def open_samples(
    folder: Path, sequence_length: int, seed: int, part: SplitPart = WHOLE, loss_on: LossOn | None = None
) -> Samples:
    """Open a split of a folder of prepared data; the tokens are mapped, not read.

    `loss_on` None: on completions if the folder marks them, otherwise on all tokens.

    Raises BadInput if a file is damaged or does not belong to the others, or if the split has less than one sample.
    """
    files = DataFolder(folder)
    described = files.read_description()
    opened = read_tokens(files.tokens, files.index)
    if len(opened.tokens) != described.tokens:
        problem = f"has {len(opened.tokens)} tokens, data.json reports {described.tokens}"
        raise BadInput(files.tokens, problem, AGAIN)
    marks = None if loss_on is LossOn.ALL else _marks(files, described, loss_on)
    first, end = _tokens_of(opened.index, part)
    _check_splits(files, opened, part)
    if end - first <= sequence_length:
        of_split = "" if part == WHOLE else f" of the {part.split} split"
        problem = f"{end - first} tokens{of_split} are fewer than one sample of {sequence_length} + 1"
        raise BadInput(files.tokens, problem, "prepare more text or shorten the sequence")
    return Samples(
        folder=folder,
        tokens=opened.tokens[first:end],
        vocab_size=described.vocab_size,
        sequence_length=sequence_length,
        seed=seed,
        sha256=sha256_of_value([described.sha256, *part.identity]) if part.identity else described.sha256,
        index=opened.index,
        tokenizer_sha256=described.tokenizer_sha256,
        tokens_before=None if described.source == Source.MEGATRON else described.tokens_before or (),
        first=first,
        shuffled=part.split is Split.TRAIN,
        marks=None if marks is None else marks[first:end],
        marks_sha256=None if marks is None else described.targets_sha256,
    )


def _marks(files: DataFolder, described: PreparedData, loss_on: LossOn | None) -> NDArray[np.uint8] | None:
    """Return the marks of a folder's tokens, or None; raise BadInput if they are damaged, or missing but required."""
    if described.targets_sha256 is None:
        if loss_on is LossOn.COMPLETIONS:
            remedy = "prepare the data with --loss-on completions"
            raise BadInput(files.description, "does not mark completions", remedy)
        return None
    try:
        marks = np.memmap(files.targets, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise BadInput(files.targets, f"cannot be read ({error})", AGAIN) from None
    if len(marks) != described.tokens:
        raise BadInput(files.targets, f"has {len(marks)} bytes for {described.tokens} tokens", AGAIN)
    return marks


def _check_splits(files: DataFolder, opened: TokenFile, part: SplitPart) -> None:
    """Raise BadInput if document boundaries leave the requested split empty."""
    for split in Split:
        each = SplitPart(split, part.fractions)
        begin, end = each.bounds
        first, last = _tokens_of(opened.index, each)
        if begin < end and first == last:
            share = f"{end - begin:.3g} of {opened.index.num_documents} documents, which are not cut,"
            problem = f"{share} leave no tokens to the {split} split"
            remedy = "prepare it in more documents (files, or lines with --source jsonl), or give --valid-data"
            raise BadInput(files.tokens, problem, remedy)


def _tokens_of(index: TokenIndex, part: SplitPart) -> tuple[int, int]:
    """Return the range of a split's tokens: whole documents, from the first one that begins inside the split."""
    documents = (index.first_document_from(round(share * index.total)) for share in part.bounds)
    begin, end = map(index.document_start, documents)
    return begin, end


class Ingredient(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A data set of a blend, and its weight."""

    folder: str
    """Folder that `prepare` wrote; relative to the folder of blend.json unless absolute."""
    weight: Annotated[float, Meta(gt=0, le=1e9)]
    """Share of the samples, in proportion to the weights of the other data sets."""


class BlendedData(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """blend.json: data sets and their weights."""

    FORMAT = "shardwright.blend"

    datasets: Annotated[tuple[Ingredient, ...], Meta(min_length=1, max_length=1000)]


@dataclass(frozen=True)
class Blend:
    """The samples of several data sets: mixed by weight for training.

    For evaluation all samples of each data set, one set after the other.
    """

    parts: tuple[Samples, ...]
    weights: tuple[float, ...]
    part: SplitPart

    @property
    def seed(self) -> int:
        """Return the seed of the sample order."""
        return self.parts[0].seed

    @property
    def per_epoch(self) -> int:
        """The number of samples of all data sets together."""
        return sum(samples.per_epoch for samples in self.parts)

    @property
    def marks_sha256(self) -> str | None:
        """Return a hash of the marks of learned tokens; None if no data set has any."""
        marks = [samples.marks_sha256 for samples in self.parts]
        return sha256_of_value(marks) if any(marks) else None

    @property
    def sha256(self) -> str:
        """A hash of the data sets and of their weights."""
        return sha256_of_value([[samples.sha256 for samples in self.parts], self.weights])

    def read(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens [n, S + 1] of the samples with these numbers."""
        return self._gathered(indices, Samples.read)

    def targets(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each token [n, S + 1] of these samples 1 if it is learned, else 0."""
        return self._gathered(indices, Samples.targets)

    def documents(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the document numbers [n, S + 1] of each token of these samples."""
        return self._gathered(indices, Samples.documents)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise BadInput unless every token is below a model's vocabulary size."""
        for samples in self.parts:
            samples.check_vocabulary(vocab_size)

    def check_contents(self) -> None:
        """Read the files once; raise BadInput unless they match data.json."""
        for samples in self.parts:
            samples.check_contents()

    def places(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the index of each sample's data set, and its number there over all epochs."""
        if self.part.split is not Split.TRAIN:
            starts = np.cumsum([0, *(samples.per_epoch for samples in self.parts)])
            within = indices % self.per_epoch
            chosen = np.searchsorted(starts, within, "right") - 1
            return chosen, within - starts[chosen]
        rounds, place = np.divmod(indices, _ROUND)
        chosen = self._round[0][place]
        return chosen, rounds * self._quotas[chosen] + self._round[1][place]

    @property
    def leaves_out(self) -> bool:
        """Whether some data set's weight is too small for one sample of a round."""
        return bool((self._quotas == 0).any())

    @cached_property
    def _quotas(self) -> NDArray[np.int64]:
        """Each data set's number of samples in a round: its share, rounded up if its remainder is among the largest."""
        exact = _ROUND * np.array(self.weights) / sum(self.weights)
        quotas = exact.astype(np.int64)
        quotas[np.argsort(quotas - exact, kind="stable")[: _ROUND - quotas.sum()]] += 1
        return quotas

    @cached_property
    def _round(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the data set of each place of a round [places], and how many samples of that set come before."""
        sets = np.repeat(np.arange(len(self.parts)), self._quotas)
        numbers = np.concatenate([np.arange(quota) for quota in self._quotas])
        order = np.argsort((numbers + 0.5) / self._quotas[sets], kind="stable")
        return sets[order], numbers[order]

    def _gathered(
        self, indices: NDArray[np.int64], read: Callable[[Samples, NDArray[np.int64]], NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        chosen, numbers = self.places(indices)
        rows = np.empty((len(indices), self.parts[0].sequence_length + 1), np.int64)
        for number in np.unique(chosen):
            rows[chosen == number] = read(self.parts[number], numbers[chosen == number])
        return rows


def check_described(folder: Path) -> None:
    """Raise BadInput if blend.json, or a folder's data.json, cannot be read; folders of arrays need neither."""
    file, files = folder / BLEND, DataFolder(folder)
    if file.is_file():
        for part in read_document(file, BlendedData).datasets:
            DataFolder(folder / part.folder).read_description()
    elif not any(array.exists() for array in files.arrays):
        files.read_description()


def open_data(
    folder: Path, sequence_length: int, seed: int, part: SplitPart = WHOLE, loss_on: LossOn | None = None
) -> Samples | Blend:
    """Open a folder of prepared data, or one whose blend.json names several.

    Raises BadInput if one cannot be opened, if their tokenizers differ, or if a weight is too small to count.
    """
    file = folder / BLEND
    if not file.is_file():
        return open_samples(folder, sequence_length, seed, part, loss_on)
    blended = read_document(file, BlendedData)
    parts = tuple(open_samples(folder / each.folder, sequence_length, seed, part, loss_on) for each in blended.datasets)
    for samples in parts:
        if samples.tokenizer_sha256 != parts[0].tokenizer_sha256:
            problem = f"{samples.folder} has another tokenizer than {parts[0].folder}"
            raise BadInput(file, problem, "prepare both with one")
    known = [samples for samples in parts if samples.tokens_before is not None]
    for samples in known:
        if samples.tokens_before != known[0].tokens_before:
            problem = f"documents of {samples.folder} begin with different tokens from documents of {known[0].folder}"
            raise BadInput(file, problem, "prepare again what an earlier version prepared")
    blend = Blend(parts, tuple(each.weight for each in blended.datasets), part)
    if blend.leaves_out:
        raise BadInput(file, f"a weight is less than 1/{_ROUND} of all", "leave out that data set")
    return blend
