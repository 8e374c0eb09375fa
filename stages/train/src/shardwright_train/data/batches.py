"""What each step trains on, as its model family wants it: a function of data, seed and step alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from shardwright_formats.types.model import Model
from shardwright_train.data.images import open_images
from shardwright_train.data.sampling import Samples, open_samples
from shardwright_train.models.base import Batch, Family
from shardwright_train.parallel.rng import seed_of

__all__ = ["Batches", "open_batches"]


class Batches(Protocol):
    """The global batches of a run."""

    @property
    def sha256(self) -> str:
        """Identity of the data."""

    def batch(self, step: int, samples: int) -> Batch:
        """The batch of a step, counted from 1; the same on every rank."""


@dataclass(frozen=True)
class _TextBatches:
    samples: Samples
    model: Model
    family: Family

    @property
    def sha256(self) -> str:
        return self.samples.sha256

    def batch(self, step: int, samples: int) -> Batch:
        text = torch.from_numpy(self.samples.global_batch(step - 1, samples))
        generator = torch.Generator().manual_seed(seed_of(self.samples.seed, "batch", step))
        return self.family.batch(self.model, text, generator)


def open_batches(folder: Path, model: Model, family: Family, seed: int) -> Batches:
    """Open a folder of prepared text for a model, or of images where its family takes those.

    Raises BadInput when a file is damaged, holds less than one sample, or does not fit the model.
    """
    length = family.stream_tokens(model.sequence_length)
    if length is None:
        return open_images(folder, family.image_form(model), seed)
    samples = open_samples(folder, length, seed)
    samples.check_vocabulary(model.config["vocab_size"])
    return _TextBatches(samples, model, family)
