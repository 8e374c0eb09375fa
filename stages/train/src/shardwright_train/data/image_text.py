"""The objective of a model that reads a text with images in it (Liu et al. 2023): the text's next token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwright_formats.types import EMBEDDING, HEAD
from shardwright_models.families.towers import IMAGES
from shardwright_train.data.objectives import RANDOM, Causal, RandomBatches, TextBatches
from shardwright_train.data.pairs import PLACE, Pairs, Text, open_pairs, padded
from shardwright_train.data.share import Batch
from shardwright_train.data.split import ACROSS, WHOLE, Boundaries, SplitPart
from shardwright_train.parallel.vocab import IGNORED

_WITHOUT_IMAGE = 0.25
"""The share of random samples that have no image, as texts among captions."""
_BRIGHTEST = 255
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of the pixels that CLIP was trained with (Radford et al. 2021, their code)."""


@dataclass(frozen=True)
class ImageText(Causal):
    """The next token of a text, in which an image takes as many positions as it has states; these are no labels."""

    read_by: ClassVar[Mapping[str, str]] = {"pixel_values": EMBEDDING, "labels": HEAD}
    beside_positions: ClassVar[frozenset[str]] = frozenset({"pixel_values"})
    keeps_boundaries: ClassVar[bool] = False
    image_token: int
    """Token that stands at each position of an image."""
    image_tokens: int
    """Positions of an image."""
    form: tuple[int, int, int]
    """Channels, height and width of an image."""
    mean: tuple[float, ...]
    """Mean of pixels in [0, 1] that a vision tower was trained with, by channel."""
    deviation: tuple[float, ...]
    """Their standard deviation, by channel."""
    images: int = 1
    """The most images of a sample; pixels have a dim of so many where it is above 1."""

    @classmethod
    def from_config(cls, config: Any, sequence_length: int) -> Self:
        """Return the objective of a configuration, which says how many positions an image takes."""
        vision = config.vision_config
        form = vision.num_channels, vision.image_size, vision.image_size
        mean, deviation = (
            _CLIP if vision.model_type == "clip_vision_model" and len(_CLIP[0]) == form[0] else ((0.5,), (0.5,))
        )
        tokens = config.vocab_size, sequence_length, config.image_token_index, config.image_seq_length
        return cls(*tokens, form, mean, deviation, getattr(config, IMAGES, 1))

    def batch(self, samples: Tensor, generator: torch.Generator) -> Batch:
        """Return `tokens` and `labels` [n, sequence_length] of samples that hold an image's tokens or none."""
        labels = samples[:, 1:]
        return {"tokens": samples[:, :-1], "labels": labels.masked_fill(labels == self.image_token, IGNORED)}

    def random_batch(self, samples: int, generator: torch.Generator) -> Batch:
        """Return random texts, most with images somewhere inside, and random pixels in [-1, 1)."""
        shape = samples, self.sequence_length + 1
        text = torch.randint(0, self.vocab_size - 1, shape, generator=generator)
        text = text + (text >= self.image_token)
        free = self.sequence_length - self.images * self.image_tokens + 1
        first = torch.randint(0, free, (samples, self.images), generator=generator).sort(1).values
        first = first + torch.arange(self.images) * self.image_tokens
        absent = torch.rand(samples, self.images, dtype=torch.float32, generator=generator) < _WITHOUT_IMAGE
        behind = torch.arange(shape[1])[:, None] - first[:, None]
        inside = ((behind >= 0) & (behind < self.image_tokens) & ~absent[:, None]).any(-1)
        pixels = torch.rand(samples, *self._stacked, *self.form, dtype=torch.float32, generator=generator)
        return {**self.batch(text.masked_fill(inside, self.image_token), generator), "pixel_values": 2 * pixels - 1}

    def open(
        self, folder: Path, seed: int, part: SplitPart = WHOLE, boundaries: Boundaries = ACROSS
    ) -> TextBatches | RandomBatches | Pairs:
        """Open a split of a folder of images and texts; RANDOM gives random ones."""
        if folder == RANDOM or any(boundaries):
            return super().open(folder, seed, part, boundaries)
        return open_pairs(folder, self, seed, part)

    @property
    def inputs_file(self) -> str:
        """Return the name of the file that holds the images."""
        return "images.npy"

    @property
    def inputs_form(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return the format of an image, and its shape."""
        return np.dtype(np.uint8), self.form

    def of_texts(self, texts: Sequence[Text]) -> Batch:
        """Return `tokens` and `labels` [n, sequence_length]; what fills a text up is behind it, and no label."""
        whole = padded([self._with_image(text) for text in texts], self.sequence_length + 1, IGNORED)
        labels = whole[:, 1:]
        tokens = whole[:, :-1].masked_fill(whole[:, :-1] == IGNORED, 0)
        return {"tokens": tokens, "labels": labels.masked_fill(labels == self.image_token, IGNORED)}

    @property
    def max_inputs(self) -> int:
        """Return the most images of a sample."""
        return self.images

    @property
    def _stacked(self) -> tuple[int, ...]:
        return (self.images,) if self.images > 1 else ()

    def inputs_of(self, text: Text) -> int:
        """Return the number of images in a text."""
        return int((text == PLACE).sum())

    def of_inputs(self, inputs: NDArray[Any]) -> Batch:
        """Return `pixel_values` [n, images, channels, height, width], scaled as the vision tower was trained with.

        `inputs` are of that shape; where a sample has one image, the result lacks its dim.
        """
        mean, deviation = (
            torch.tensor(each, dtype=torch.float32)[:, None, None] for each in (self.mean, self.deviation)
        )
        pixels = torch.from_numpy(inputs).to(torch.float32)
        scaled = pixels.div_(_BRIGHTEST).sub_(mean).div_(deviation)
        return {"pixel_values": scaled if self.images > 1 else scaled[:, 0]}

    def unfit(self, text: Text, has_input: bool) -> str | None:
        """Return why a text cannot be a sample, or None: its images must have places in it, and leave some text."""
        places = np.flatnonzero(text == PLACE)
        if bool(len(places)) != has_input:
            return f"has {len(places)} places for {int(has_input)} images"
        if len(places) > self.images:
            return f"has {len(places)} images, over the {self.images} of {IMAGES}"
        if (text == self.image_token).any():
            return f"holds the token {self.image_token} of an image, which is put in its place"
        begins = places + np.arange(len(places)) * (self.image_tokens - 1)
        if has_input and begins[-1] + self.image_tokens > self.sequence_length:
            return f"has an image of {self.image_tokens} positions from {begins[-1]} on, over {self.sequence_length}"
        return None if len(text) > 1 else "has less than two tokens"

    def _with_image(self, text: Text) -> NDArray[np.int64]:
        repeats = np.where(text == PLACE, self.image_tokens, 1)
        return np.repeat(np.where(text == PLACE, self.image_token, text).astype(np.int64), repeats)
