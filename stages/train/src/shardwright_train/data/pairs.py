"""Texts with images or a sound each as data: a folder of arrays in NumPy's own format.

images.npy: uint8 [images, channels, height, width], or features.npy: float32 [sounds, bins, frames]. tokens.npy: int32,
the tokens of all texts, -1 where an image stands in its text. samples.npy: int64 [samples, 3]: the first token of a
text, the number of its tokens, and the number of its sound or first image, -1 without one. Further images of a text
follow that one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwright_formats.io import BadInput, sha256_of_file, sha256_of_value
from shardwright_train.data.images import described, mapped
from shardwright_train.data.share import Batch, BatchShare
from shardwright_train.data.shuffled import Shuffled
from shardwright_train.data.split import SplitPart
from shardwright_train.parallel.vocab import IGNORED

TOKENS, SAMPLES = "tokens.npy", "samples.npy"
PLACE = -1
"""The token that stands in the place of a text's image."""
Text = NDArray[np.int32]


class Paired(Protocol):
    """What an objective makes of texts and of what belongs to them."""

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens of the model."""

    @property
    def inputs_file(self) -> str:
        """Return the name of the file that holds images or sounds."""

    @property
    def inputs_form(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return the format of an image or a sound, and its shape."""

    @property
    def max_inputs(self) -> int:
        """Return the most images or sounds of a sample."""

    def inputs_of(self, text: Text) -> int:
        """Return the number of images or sounds of a text that has some."""

    def of_texts(self, texts: Sequence[Text]) -> Batch:
        """Return the tokens and labels of texts."""

    def of_inputs(self, inputs: NDArray[Any]) -> Batch:
        """Return what a model reads of images or sounds [n, max_inputs, ...]."""

    def unfit(self, text: Text, has_input: bool) -> str | None:
        """Return why a text cannot be a sample, or None."""


@dataclass(frozen=True)
class Pairs:
    """A split of texts with images or sounds: to train on, in another order each epoch; to evaluate, in one."""

    inputs: NDArray[Any]
    """Images or sounds, mapped from the file."""
    tokens: Text
    """Tokens of all texts, mapped from the file."""
    samples: NDArray[np.int64]
    """First token, number of tokens and number of the input of each sample [samples, 3]."""
    objective: Paired
    order: Shuffled
    sha256: str
    """SHA-256 of the contents of the files, and of the split."""

    @property
    def per_epoch(self) -> int:
        """Return the number of samples of the split; in evaluation, those from 0 to it are all of it once."""
        return self.order.per_epoch

    def read(self, first: int, share: BatchShare) -> Batch:
        """Return the inputs and labels of a rank's share of a batch; images that a text lacks are black."""
        chosen = self.order.chosen(first + share.rows)
        texts, numbers = self._texts(chosen), self.samples[chosen, 2]
        counts = np.array([self.objective.inputs_of(text) for text in texts], np.int64)
        further = np.arange(self.objective.max_inputs)
        is_there = (numbers[:, None] >= 0) & (further < counts[:, None])
        places = np.where(is_there, numbers[:, None] + further, 0)
        inputs = self.inputs[places] if len(self.inputs) else self._nothing(places.shape)
        inputs = np.where(is_there.reshape(*places.shape, *(1,) * (inputs.ndim - 2)), inputs, np.zeros_like(inputs))
        batch = {**self.objective.of_texts(texts), **self.objective.of_inputs(inputs)}
        return {name: x for name, x in batch.items() if name not in share.left_out}

    def counted(self, first: int, samples: int) -> int:
        """Return the number of labels of a batch that count."""
        texts = self._texts(self.order.chosen(np.arange(first, first + samples)))
        return int((self.objective.of_texts(texts)["labels"] != IGNORED).sum().item())

    def check_contents(self) -> None:
        """Do nothing: the files were read for their identity when they were opened."""

    def _texts(self, chosen: NDArray[np.int64]) -> list[Text]:
        return [self.tokens[begin : begin + count] for begin, count, _ in self.samples[chosen].tolist()]

    def _nothing(self, places: tuple[int, ...]) -> NDArray[Any]:
        dtype, shape = self.objective.inputs_form
        return np.zeros((*places, *shape), dtype)


def open_pairs(folder: Path, objective: Paired, seed: int, part: SplitPart) -> Pairs:
    """Open a split of a folder of texts with images or sounds; files are mapped, but read once for their identity.

    Raises BadInput where a file is absent or damaged, they do not belong together, or do not fit the model.
    """
    input_file, token_file, sample_file = (folder / name for name in (objective.inputs_file, TOKENS, SAMPLES))
    inputs, tokens, samples = mapped(input_file), mapped(token_file), mapped(sample_file)
    dtype, shape = objective.inputs_form
    if inputs.dtype != dtype or inputs.shape[1:] != shape:
        problem = f"is {described(inputs)}, the model takes {dtype} [any, {', '.join(map(str, shape))}]"
        raise BadInput(input_file, problem, "prepare the folder for this model")
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise BadInput(token_file, f"is {described(tokens)}", "write int32 [tokens]")
    if samples.dtype != np.int64 or samples.ndim != 2 or samples.shape[1] != 3 or not len(samples):
        raise BadInput(sample_file, f"is {described(samples)}", "write int64 [samples, 3]")
    if len(tokens) and not (tokens.min() >= PLACE and tokens.max() < objective.vocab_size):
        problem = f"has tokens from {tokens.min()} to {tokens.max()}, the model's are below {objective.vocab_size}"
        raise BadInput(token_file, problem, "prepare the folder with the model's own tokenizer")
    _check_samples(sample_file, samples, len(tokens), len(inputs))
    for number, (begin, count, place) in enumerate(samples.tolist()):
        if (unfit := objective.unfit(tokens[begin : begin + count], place >= 0)) is not None:
            raise BadInput(sample_file, f"sample {number} {unfit}", "leave it out, or describe another model or length")
        if place >= 0 and place + objective.inputs_of(tokens[begin : begin + count]) > len(inputs):
            raise BadInput(sample_file, f"sample {number} has images behind the last one", "prepare it again")
    files = [sha256_of_file(file) for file in (input_file, token_file, sample_file)]
    order = Shuffled(len(samples), seed, part)
    if not order.per_epoch:
        raise BadInput(sample_file, f"{len(samples)} samples leave none to the {part.split} split", "take more")
    identity = sha256_of_value([*files, repr(objective), *part.identity])
    return Pairs(inputs, tokens, samples, objective, order, identity)


def _check_samples(file: Path, samples: NDArray[np.int64], tokens: int, inputs: int) -> None:
    begin, count, place = samples.T
    # No sum: those of damaged files may be over the highest number.
    wrong = (begin < 0) | (count < 0) | (begin > tokens) | (count > tokens - begin) | (place < -1) | (place >= inputs)
    if wrong.any():
        raise BadInput(file, f"sample {int(wrong.argmax())} lies outside of the other files", "prepare it again")


def padded(texts: Sequence[NDArray[np.int64]], length: int, padding: int) -> Tensor:
    """Return texts [n, length], each cut or filled up."""
    rows = np.full((len(texts), length), padding, np.int64)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text[:length]
    return torch.from_numpy(rows)
