"""Several data sets in one run: each gives samples by its weight, in an order that is computed place by place.

The samples of a run are shared out in rounds of 65,536. In each round a data set has its weight's share of the places,
spread evenly, and goes on in its own order, over as many epochs as it takes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from shardwright_formats.io import BadInput, Document, Value, read_document, sha256_of_value
from shardwright_train.data.description import DataFolder
from shardwright_train.data.sampling import Samples, open_samples
from shardwright_train.data.split import WHOLE, Part, Split

BLEND = "blend.json"
_ROUND = 1 << 16


class Ingredient(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A data set of a blend."""

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
    """The samples of several data sets: to train on, by their weights; to evaluate, all of each, one after another."""

    parts: tuple[Samples, ...]
    weights: tuple[float, ...]
    part: Part

    @property
    def seed(self) -> int:
        """Return the seed of the sample order."""
        return self.parts[0].seed

    @property
    def per_epoch(self) -> int:
        """Return the number of samples of all data sets together."""
        return sum(samples.per_epoch for samples in self.parts)

    @property
    def sha256(self) -> str:
        """Identity of the data sets and of their weights."""
        return sha256_of_value([[samples.sha256 for samples in self.parts], self.weights])

    def read(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens [n, S + 1] of the samples with these numbers."""
        return self._gathered(indices, Samples.read)

    def documents(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the document numbers [n, S + 1] of each token of these samples."""
        return self._gathered(indices, Samples.documents)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise BadInput unless every token is below a model's vocabulary size."""
        for samples in self.parts:
            samples.check_vocabulary(vocab_size)

    def check_contents(self) -> None:
        """Read the files once; BadInput unless they hold what data.json says."""
        for samples in self.parts:
            samples.check_contents()

    def places(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each sample's data set and its number in that, counted over all epochs."""
        if self.part.split is not Split.TRAIN:
            ends = np.cumsum([samples.per_epoch for samples in self.parts])
            within = indices % self.per_epoch
            chosen = np.searchsorted(ends, within, "right")
            return chosen, within - (ends[chosen] - np.array([s.per_epoch for s in self.parts])[chosen])
        rounds, place = np.divmod(indices, _ROUND)
        chosen = self._round[0][place]
        return chosen, rounds * self._quotas[chosen] + self._round[1][place]

    @property
    def leaves_out(self) -> bool:
        """Return whether some data set's weight is too small for one sample of a round."""
        return bool((self._quotas == 0).any())

    @cached_property
    def _quotas(self) -> NDArray[np.int64]:
        """Return each data set's number of samples in a round: its share, the largest remainders rounded up."""
        exact = _ROUND * np.array(self.weights) / sum(self.weights)
        quotas = exact.astype(np.int64)
        for most in np.argsort(quotas - exact, kind="stable")[: _ROUND - quotas.sum()]:
            quotas[most] += 1
        return quotas

    @cached_property
    def _round(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return [places]: the data set of each place of a round, and how many of its samples come before."""
        sets = np.repeat(np.arange(len(self.parts)), self._quotas)
        numbers = np.concatenate([np.arange(quota) for quota in self._quotas])
        order = np.argsort((numbers + 0.5) / self._quotas[sets], kind="stable")
        return sets[order], numbers[order]

    def _gathered(
        self, indices: NDArray[np.int64], read: Callable[[Samples, NDArray[np.int64]], NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        chosen, numbers = self.places(indices)
        found = np.empty((len(indices), self.parts[0].sequence_length + 1), np.int64)
        for number in np.unique(chosen):
            found[chosen == number] = read(self.parts[number], numbers[chosen == number])
        return found


def check_described(folder: Path) -> None:
    """Raise BadInput where blend.json, or a folder's data.json, cannot be read; image folders need neither."""
    file = folder / BLEND
    if file.is_file():
        for part in read_document(file, BlendedData).datasets:
            DataFolder(folder / part.folder).read_description()
    elif not (files := DataFolder(folder)).images.exists():
        files.read_description()


def open_data(folder: Path, sequence_length: int, seed: int, part: Part = WHOLE) -> Samples | Blend:
    """Open a folder of prepared data, or one whose blend.json names several.

    Raises BadInput where one cannot be opened, they have not the same tokenizer, or a weight is too small to count.
    """
    file = folder / BLEND
    if not file.is_file():
        return open_samples(folder, sequence_length, seed, part)
    blended = read_document(file, BlendedData)
    parts = tuple(open_samples(folder / each.folder, sequence_length, seed, part) for each in blended.datasets)
    for samples in parts:
        if samples.tokenizer_sha256 != parts[0].tokenizer_sha256:
            what = f"{samples.folder} has another tokenizer than {parts[0].folder}"
            raise BadInput(file, what, "prepare both with one")
    blend = Blend(parts, tuple(each.weight for each in blended.datasets), part)
    if blend.leaves_out:
        raise BadInput(file, f"a weight is less than 1/{_ROUND} of all", "leave that data set out")
    return blend
