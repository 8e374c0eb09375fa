"""Data in NumPy's format: images with classes, and texts with images or sounds.

Images with classes: images.npy: uint8 [images, channels, height, width], and labels.npy: integers [images], each the
number of a class.

Texts: images.npy as above, or features.npy: float32 [sounds, bins, frames]. tokens.npy: int32, the tokens of all texts,
with -1 in the place of an image. samples.npy: int64 [samples, 3]: the index of a text's first token, its number of
tokens, and the index of its sound or first image, or -1. Further images of a text follow its first one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor

from shardwright.io import BadInput, sha256_of_file, sha256_of_value
from shardwright_train.data.sampling import Shuffled
from shardwright_train.data.share import Batch, BatchShare
from shardwright_train.data.split import WHOLE, SplitPart
from shardwright_train.parallel.vocab import IGNORED

# Images and their classes.


_BRIGHTEST = 255


class ImageForm(NamedTuple):
    """The form of a model's input images, and its number of classes."""

    channels: int
    height: int
    width: int
    classes: int


@dataclass(frozen=True)
class Images:
    """A split of images: for training in another order each epoch; for evaluation in a fixed order."""

    pixels: NDArray[np.uint8]
    """Pixels [images, channels, height, width], mapped from the file."""
    labels: NDArray[np.int64]
    """Class of each image [images]."""
    seed: int
    sha256: str
    """SHA-256 of the contents of both files, and of the split."""
    part: SplitPart = WHOLE

    @property
    def per_epoch(self) -> int:
        """The number of images of the split; in evaluation, this many images from 0 are the whole split once."""
        return self._order.per_epoch

    def read(self, first: int, share: BatchShare) -> Batch:
        """Return `pixel_values` [samples, channels, height, width] in [-1, 1] and `labels` [samples, 1]."""
        indices = first + share.rows
        chosen = self._order.chosen(indices)
        batch = {} if "labels" in share.left_out else {"labels": torch.from_numpy(self.labels[chosen])[:, None]}
        if "pixel_values" not in share.left_out:
            pixels = torch.from_numpy(self.pixels[chosen]).to(torch.float32)
            batch["pixel_values"] = pixels.div_(_BRIGHTEST / 2).sub_(1)
        return batch

    @property
    def _order(self) -> Shuffled:
        return Shuffled(len(self.labels), self.seed, self.part)

    def counted(self, first: int, samples: int) -> int:
        """Return the number of labels in a batch: one for each image."""
        return samples

    def check_contents(self) -> None:
        """Do nothing: the files were read for their identity when they were opened."""


def open_images(folder: Path, form: ImageForm, seed: int, part: SplitPart = WHOLE) -> Images:
    """Open a split of a folder of images for a model; files are memory-mapped, but read once for their hash.

    Raises BadInput if a file is absent or damaged, or if files do not belong together or do not fit the model.
    """
    image_file, label_file = folder / "images.npy", folder / "labels.npy"
    pixels, labels = mapped(image_file), mapped(label_file)
    if pixels.dtype != np.uint8 or pixels.ndim != 4:
        raise BadInput(image_file, f"is {described(pixels)}", "write uint8 [images, channels, height, width]")
    if not np.issubdtype(labels.dtype, np.integer) or labels.ndim != 1:
        raise BadInput(label_file, f"is {described(labels)}", "write integers [images]")
    if len(labels) != len(pixels) or not len(labels):
        raise BadInput(label_file, f"{len(labels)} labels for {len(pixels)} images", "write one for each image")
    if pixels.shape[1:] != form[:3]:
        shapes = [" x ".join(map(str, shape)) for shape in (pixels.shape[1:], form[:3])]
        raise BadInput(image_file, f"images of {shapes[0]}, the model takes {shapes[1]}", "resize them")
    if not 0 <= labels.min() <= labels.max() < form.classes:
        problem = f"labels from {labels.min()} to {labels.max()}, the model has {form.classes} classes, from 0"
        raise BadInput(label_file, problem, "number the classes from 0, or describe a model with more")
    identity = sha256_of_value([sha256_of_file(image_file), sha256_of_file(label_file), *part.identity])
    images = Images(pixels, labels.astype(np.int64), seed, identity, part)
    if not images.per_epoch:
        raise BadInput(label_file, f"{len(labels)} images are too few for the {part.split} split", "take more of them")
    return images


def mapped(path: Path) -> NDArray[Any]:
    """Return an array mapped from its file; raise BadInput if the file does not contain one."""
    try:
        return open_memmap(path, mode="r")
    except OSError as error:
        raise BadInput(path, error.strerror or str(error), "check the path") from None
    except (ValueError, SyntaxError, TokenError, OverflowError) as error:  # NumPy reads a header as Python
        raise BadInput(path, f"is not a valid array ({error})", "write it with numpy.save") from None


def described(array: NDArray[Any]) -> str:
    """Return the format and the shape of an array in words."""
    return f"{array.dtype} {list(array.shape)}"


# Texts with images or sounds.


TOKENS, SAMPLES = "tokens.npy", "samples.npy"
PLACE = -1
"""The token that marks the place of an image in a text."""
TextTokens = NDArray[np.int32]


class Paired(Protocol):
    """How an objective makes samples from texts and their images or sounds."""

    @property
    def vocab_size(self) -> int:
        """Return the size of the model's vocabulary."""

    @property
    def inputs_file(self) -> str:
        """The name of the file with images or sounds."""

    @property
    def inputs_form(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """The format of an image or a sound, and its shape."""

    @property
    def max_inputs(self) -> int:
        """Return the largest number of images or sounds in a sample."""

    def inputs_of(self, text: TextTokens) -> int:
        """Return the number of images or sounds of a text that has any."""

    def of_texts(self, texts: Sequence[TextTokens]) -> Batch:
        """Return the tokens and labels of texts."""

    def of_inputs(self, inputs: NDArray[Any]) -> Batch:
        """Return the model's inputs for images or sounds [n, max_inputs, ...]."""

    def unfit(self, text: TextTokens, has_input: bool) -> str | None:
        """Return the reason why a text cannot be a sample, or None."""


@dataclass(frozen=True)
class Pairs:
    """A split of texts with images or sounds: reshuffled each epoch for training; in a fixed order for evaluation."""

    inputs: NDArray[Any]
    """Images or sounds, mapped from the file."""
    tokens: TextTokens
    """Tokens of all texts, mapped from the file."""
    samples: NDArray[np.int64]
    """Index of the first token, number of tokens and index of the first input of each sample [samples, 3]."""
    objective: Paired
    order: Shuffled
    sha256: str
    """SHA-256 of the contents of the files, and of the split."""

    @property
    def per_epoch(self) -> int:
        """The number of samples of the split; in evaluation, this many samples from 0 are the whole split once."""
        return self.order.per_epoch

    def read(self, first: int, share: BatchShare) -> Batch:
        """Return the inputs and labels of a rank's share of a batch; missing images are black."""
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
        """Return the number of labels in a batch, without ignored positions."""
        texts = self._texts(self.order.chosen(np.arange(first, first + samples)))
        return int((self.objective.of_texts(texts)["labels"] != IGNORED).sum().item())

    def check_contents(self) -> None:
        """Do nothing: the files were read for their identity when they were opened."""

    def _texts(self, chosen: NDArray[np.int64]) -> list[TextTokens]:
        return [self.tokens[begin : begin + count] for begin, count, _ in self.samples[chosen].tolist()]

    def _nothing(self, places: tuple[int, ...]) -> NDArray[Any]:
        dtype, shape = self.objective.inputs_form
        return np.zeros((*places, *shape), dtype)


def open_pairs(folder: Path, objective: Paired, seed: int, part: SplitPart) -> Pairs:
    """Open a split of a folder of texts with images or sounds; files are memory-mapped, but read once for their hash.

    Raises BadInput if a file is absent or damaged, or if files do not belong together or do not fit the model.
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
            raise BadInput(sample_file, f"sample {number} refers to images past the last one", "prepare it again")
    files = [sha256_of_file(file) for file in (input_file, token_file, sample_file)]
    order = Shuffled(len(samples), seed, part)
    if not order.per_epoch:
        raise BadInput(sample_file, f"{len(samples)} samples are too few for the {part.split} split", "take more")
    identity = sha256_of_value([*files, repr(objective), *part.identity])
    return Pairs(inputs, tokens, samples, objective, order, identity)


def _check_samples(file: Path, samples: NDArray[np.int64], tokens: int, inputs: int) -> None:
    begin, count, place = samples.T
    # Not `begin + count`, which may overflow in damaged files.
    wrong = (begin < 0) | (count < 0) | (begin > tokens) | (count > tokens - begin) | (place < -1) | (place >= inputs)
    if wrong.any():
        raise BadInput(file, f"sample {int(wrong.argmax())} points outside the other files", "prepare it again")


def padded(texts: Sequence[NDArray[np.int64]], length: int, padding: int) -> Tensor:
    """Return texts [n, length], each truncated or padded."""
    rows = np.full((len(texts), length), padding, np.int64)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text[:length]
    return torch.from_numpy(rows)
