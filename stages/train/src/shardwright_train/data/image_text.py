"""The objective of a model that reads a text with images in it (Liu et al. 2023): the text's next token."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from shardwright_formats.io import BadInput
from shardwright_formats.types import EMBEDDING, HEAD
from shardwright_train.data.objectives import RANDOM, Causal, RandomBatches, TextBatches
from shardwright_train.data.share import Batch
from shardwright_train.data.split import ACROSS, WHOLE, Boundaries, SplitPart
from shardwright_train.parallel.vocab import IGNORED

_WITHOUT_IMAGE = 0.25
"""The share of random samples that have no image, as texts among captions."""


@dataclass(frozen=True)
class ImageText(Causal):
    """The next token of a text, in which an image takes as many positions as it has states; these are no labels."""

    read_by: ClassVar[Mapping[str, str]] = {"pixel_values": EMBEDDING, "labels": HEAD}
    keeps_boundaries: ClassVar[bool] = False
    image_token: int
    """Token that stands at each position of an image."""
    image_tokens: int
    """Positions of an image."""
    form: tuple[int, int, int]
    """Channels, height and width of an image."""

    @classmethod
    def from_config(cls, config: Any, sequence_length: int) -> Self:
        """Return the objective of a configuration, which says how many positions an image takes."""
        vision = config.vision_config
        form = vision.num_channels, vision.image_size, vision.image_size
        return cls(config.vocab_size, sequence_length, config.image_token_index, config.image_seq_length, form)

    def batch(self, samples: Tensor, generator: torch.Generator) -> Batch:
        """Return `tokens` and `labels` [n, sequence_length] of samples that hold an image's tokens or none."""
        labels = samples[:, 1:]
        return {"tokens": samples[:, :-1], "labels": labels.masked_fill(labels == self.image_token, IGNORED)}

    def random_batch(self, samples: int, generator: torch.Generator) -> Batch:
        """Return random texts, most with an image somewhere inside, and random pixels in [-1, 1)."""
        shape = samples, self.sequence_length + 1
        text = torch.randint(0, self.vocab_size - 1, shape, generator=generator)
        text = text + (text >= self.image_token)
        first = torch.randint(0, self.sequence_length - self.image_tokens + 1, (samples, 1), generator=generator)
        plain = torch.rand(samples, 1, dtype=torch.float32, generator=generator) < _WITHOUT_IMAGE
        places = torch.arange(shape[1])
        inside = (places >= first) & (places < first + self.image_tokens) & ~plain
        pixels = torch.rand(samples, *self.form, dtype=torch.float32, generator=generator)
        return {**self.batch(text.masked_fill(inside, self.image_token), generator), "pixel_values": 2 * pixels - 1}

    def open(
        self, folder: Path, seed: int, part: SplitPart = WHOLE, boundaries: Boundaries = ACROSS
    ) -> TextBatches | RandomBatches:
        """Open random samples; raise BadInput for folders, which hold no images beside texts."""
        if folder != RANDOM:
            raise BadInput(folder, "images beside texts are read from no folder yet", f"train on --data {RANDOM}")
        return super().open(folder, seed, part, boundaries)
