"""Images and their classes as data: a folder with images.npy and labels.npy, in NumPy's own format.

images.npy: uint8 [images, channels, height, width]. labels.npy: integers [images], each the number of a class.
"""

from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from shardwright_formats.io import BadInput, sha256_of_file, sha256_of_value
from shardwright_train.data.share import Batch, BatchShare
from shardwright_train.data.shuffled import Shuffled
from shardwright_train.data.split import WHOLE, SplitPart

_BRIGHTEST = 255


class ImageForm(NamedTuple):
    """The form of the images that a model takes, and its number of classes."""

    channels: int
    height: int
    width: int
    classes: int


@dataclass(frozen=True)
class Images:
    """A split of images: to train on, in another order each epoch; to evaluate, in one that no seed changes."""

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
        """Return the number of images of the split; in evaluation, those from 0 to it are all of it once."""
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
        """Return the number of labels of a batch that count."""
        return samples

    def check_contents(self) -> None:
        """Do nothing: the files were read for their identity when they were opened."""


def open_images(folder: Path, form: ImageForm, seed: int, part: SplitPart = WHOLE) -> Images:
    """Open a split of a folder of images for a model; they are mapped, but read once for their identity.

    Raises BadInput when a file is absent or damaged, they do not belong together, or do not fit the model.
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
        raise BadInput(label_file, f"{len(labels)} images leave none to the {part.split} split", "take more of them")
    return images


def mapped(path: Path) -> NDArray[Any]:
    """Return an array mapped from its file; raise BadInput where it is none."""
    try:
        return open_memmap(path, mode="r")
    except OSError as error:
        raise BadInput(path, error.strerror or str(error), "check the path") from None
    except (ValueError, SyntaxError, TokenError, OverflowError) as error:  # NumPy reads a header as Python
        raise BadInput(path, f"is no whole array ({error})", "write it with numpy.save") from None


def described(array: NDArray[Any]) -> str:
    """Return the format and the shape of an array in words."""
    return f"{array.dtype} {list(array.shape)}"
