"""Parameters read straight into a rank's shards: of each tensor the part that the rank holds, and no more."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwright_formats.io import BadInput, sha256_of_file, sha256_of_value
from shardwright_formats.semantics.layout import Box
from shardwright_formats.types import Model
from shardwright_train.models.base import Family
from shardwright_train.parallel.world import World
from shardwright_train.weights.agreement import Agreement, agree
from shardwright_train.weights.folder import Stored


@dataclass(frozen=True)
class Weights:
    """The weights that a run begins with instead of drawn ones."""

    agreement: Agreement

    @classmethod
    def of(cls, folder: Path, model: Model, family: Family, allow_new: bool) -> "Weights":
        """Return the weights of a folder that agrees with a plan's model; see `agree`."""
        return cls(agree(folder, model, family, allow_new))

    def read(self, window: Tensor, name: str, shape: Sequence[int], box: Box) -> bool:
        """Fill a tensor with the part `box` of a parameter of a `shape`; False where it must be drawn.

        Raises BadInput where the file has changed since, or holds two different values of a tied parameter.
        """
        first, *others = self.agreement.tensors.get(self.agreement.aliases.get(name, name), (None,))
        if first is None:
            return False
        _read(first, window, shape, box)
        for other in others:
            again = torch.empty_like(window)
            _read(other, again, shape, box)
            if not torch.equal(again, window):
                what = f"{other.key} is not {first.key}, the model has one for both"
                raise BadInput(other.file, what, "describe the model with tie_word_embeddings false, if it can be so")
        return True

    def sha256(self, world: World) -> str:
        """Return the identity of the files, which all ranks hash together."""
        files = self.agreement.files
        share = files[world.rank :: world.size]
        hashes = world.together(lambda: {file.name: sha256_of_file(file) for file in share})
        parts = world.all_say(hashes, dict[str, str])
        return sha256_of_value({name: digest for part in parts for name, digest in part.items()})


def _read(stored: Stored, window: Tensor, shape: Sequence[int], box: Box) -> None:
    if not window.numel():
        return
    try:
        with safe_open(stored.file, "pt") as opened:
            tensor = opened.get_slice(stored.key)
            for place, part in _parts(tuple(shape), stored.shape, box):
                window[place].copy_(tensor[part])
    except (SafetensorError, OSError) as error:
        raise BadInput(stored.file, f"{stored.key} cannot be read ({error})", "fetch the folder again") from None


_Slices = tuple[slice | int, ...]


def _parts(shape: tuple[int, ...], stored: tuple[int, ...], box: Box) -> Iterator[tuple[_Slices, tuple[slice, ...]]]:
    """Yield slices of a window and of a stored tensor for the parts of a box: one per matrix side by side."""
    ranges = tuple(slice(low, high) for low, high in box)
    if shape == stored:
        yield (...,), ranges  # type: ignore[misc]
        return
    dim = next(i for i, (own, length) in enumerate(zip(shape, stored, strict=False)) if own != length)
    width, (low, high) = shape[dim + 1], box[dim + 1]
    for place, number in enumerate(range(*box[dim])):
        columns = slice(number * width + low, number * width + high)
        yield (*(slice(None),) * dim, place), (*ranges[:dim], columns, *ranges[dim + 2 :])
