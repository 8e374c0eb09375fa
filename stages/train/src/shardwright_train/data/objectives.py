"""Objectives of training: how text or images become the inputs and labels of each step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwright.io import BadInput, RunFailed, sha256_of_value
from shardwright.models.families.llava import IMAGES
from shardwright.types import EMBEDDING, HEAD
from shardwright_train.data.arrays import PLACE, ImageForm, Images, Pairs, TextTokens, open_images, open_pairs, padded
from shardwright_train.data.sampling import Blend, Samples, open_data
from shardwright_train.data.share import Batch, BatchShare, with_boundaries
from shardwright_train.data.split import ACROSS, WHOLE, Boundaries, LossOn, Split, SplitPart
from shardwright_train.parallel.rng import seed_of
from shardwright_train.parallel.vocab import IGNORED

RANDOM = Path("random")
"""Name instead of a data folder that selects random samples, only for timing: no data is read."""
_RANDOM_EPOCH = 1 << 20
# Devlin et al. 2019, section 3.1: the share of positions that are labels, and the shares of these that show the mask
# token and a random token; the rest are shown unchanged.
_CHOSEN, _MASKED, _RANDOM = 0.15, 0.8, 0.1


@dataclass(frozen=True)
class Text(ABC):
    """An objective over a text that is cut into samples."""

    no_inputs: ClassVar[int] = 0
    """Number of positions of a sample without an input."""
    read_by: ClassVar[Mapping[str, str]] = {"labels": HEAD}
    """Tensors of a batch that only one type of layer reads, with that type."""
    beside_positions: ClassVar[frozenset[str]] = frozenset()
    """Tensors of a batch whose dim 1 is not a sample's positions, such as the channels of an image."""
    is_random: ClassVar[bool] = False
    """Whether making a batch needs random numbers."""
    predicts_next: ClassVar[bool] = False
    """Whether each label is the token after its position."""
    keeps_boundaries: ClassVar[bool] = True
    """Whether the documents within a sample can be distinguished."""
    learns_part: ClassVar[bool] = False
    """Whether the loss may be on completions only."""
    vocab_size: int
    sequence_length: int
    loss_on: LossOn | None = field(default=None, kw_only=True, repr=False)
    """The tokens that are learned; None: completions if the data marks them, else all."""

    @classmethod
    def from_config(cls, config: Any, sequence_length: int) -> Self:
        """Return the objective of a configuration; raise ValueError if a value is missing or wrong."""
        return cls(config.vocab_size, sequence_length)

    @property
    def labels(self) -> int:
        """The number of positions of a sample for which the head computes a loss."""
        return self.sequence_length

    @property
    def identity(self) -> tuple[object, ...]:
        """Return values that distinguish its samples from the default objective's samples; empty for the default."""
        return ()

    def counted(self, samples: int, text: Callable[[], Tensor]) -> int:
        """Return the number of labels in `samples` samples; `text` reads them if that depends on the text."""
        return samples * self.labels

    @property
    def stream_tokens(self) -> int:
        """The number of tokens of a sample in the token stream; one more is read, as the last label."""
        return self.sequence_length

    @abstractmethod
    def batch(self, samples: Tensor, generator: torch.Generator) -> Batch:
        """Return the inputs and labels of samples [n, stream_tokens + 1]."""

    def random_batch(self, samples: int, generator: torch.Generator) -> Batch:
        """Return the inputs and labels of samples of random tokens."""
        shape = (samples, self.stream_tokens + 1)
        return self.batch(torch.randint(0, self.vocab_size, shape, generator=generator), generator)

    def open(
        self, folder: Path, seed: int, part: SplitPart = WHOLE, boundaries: Boundaries = ACROSS
    ) -> "TextBatches | RandomBatches | Pairs":
        """Open a split of a folder of prepared text, or of a blend of several; RANDOM gives random tokens.

        Raises BadInput if a file is damaged, or if the split has less than one sample or does not fit the model.
        """
        if any(boundaries) and not self.keeps_boundaries:
            problem = "the samples of this family do not mark where documents meet"
            raise BadInput("--reset-attention-mask, --reset-position-ids", problem, "leave them out")
        if folder == RANDOM:
            if self.loss_on is LossOn.COMPLETIONS:
                raise BadInput("--loss-on completions", "random samples have no completions", "leave it out")
            return random_batches(self, seed, part)
        return self.opened(folder, seed, part, boundaries)

    def opened(self, folder: Path, seed: int, part: SplitPart, boundaries: Boundaries) -> "TextBatches | Pairs":
        """Return a split of a folder, from the files that the objective reads."""
        samples = open_data(folder, self.stream_tokens, seed, part, self.loss_on if self.learns_part else LossOn.ALL)
        samples.check_vocabulary(self.vocab_size)
        return TextBatches(samples, self, boundaries)


@dataclass(frozen=True)
class TextBatches:
    """The global batches of a split of a text: a function of data, seed and step, independent of the plan."""

    samples: Samples | Blend
    objective: Text
    boundaries: Boundaries = ACROSS

    @property
    def sha256(self) -> str:
        """The hash of the token stream, the split, and the treatment of boundaries and samples."""
        made = [*(self.boundaries if any(self.boundaries) else ()), *self.objective.identity]
        made += [] if self.samples.marks_sha256 is None else [self.samples.marks_sha256]
        return sha256_of_value([self.samples.sha256, *made]) if made else self.samples.sha256

    @property
    def per_epoch(self) -> int:
        """Return the number of samples of the split.

        In evaluation, this many samples from 0 are the whole split once, in order.
        """
        return self.samples.per_epoch

    def read(self, first: int, share: BatchShare) -> Batch:
        """Return a rank's share of the batch that begins with sample `first`; every rank makes the same samples."""
        indices = first + share.rows
        text = torch.from_numpy(self.samples.read(indices))
        if self.objective.is_random:
            made = [self._drawn(*pair) for pair in zip(text.split(1), indices.tolist(), strict=True)]
            batch = {name: torch.cat([one[name] for one in made]) for name in made[0]}
        else:
            batch = self.objective.batch(text, torch.Generator())
        if self.samples.marks_sha256 is not None and "labels" not in share.left_out:
            targets = torch.from_numpy(self.samples.targets(indices)[:, 1:])
            batch["labels"] = batch["labels"].masked_fill(targets == 0, IGNORED)
        if any(self.boundaries):
            documents = torch.from_numpy(self.samples.documents(indices))
            predicts_next = self.objective.predicts_next
            batch = with_boundaries(batch, documents, self.boundaries, predicts_next=predicts_next)
        return {name: x for name, x in batch.items() if name not in share.left_out}

    def counted_ahead(self, first: int, samples: int, ahead: int) -> int:
        """Return how many of a batch's labels count if they are predicted `ahead` positions earlier than usual."""
        indices = np.arange(first, first + samples)
        if self.samples.marks_sha256 is not None:
            return int(self._targets(indices, ahead).sum())
        if self.boundaries.reset_attention_mask:
            documents = self.samples.documents(indices)
            return int((documents[:, 1 + ahead :] == documents[:, : -1 - ahead]).sum())
        return samples * max(0, self.objective.labels - ahead)

    def counted(self, first: int, samples: int) -> int:
        """Return the number of labels of a batch that count, over all ranks; raise RunFailed if there are none."""
        indices = np.arange(first, first + samples)
        if self.samples.marks_sha256 is not None:
            return self._learned(indices)
        labels = self.objective.counted(samples, lambda: torch.from_numpy(self.samples.read(indices)))
        if self.boundaries.reset_attention_mask and self.objective.predicts_next:
            labels -= int(self.samples.documents(indices)[:, -1].sum())
        if not labels:
            raise RunFailed("a batch contains only padding: shuffle the text, or check pad_token_id")
        return labels

    def check_contents(self) -> None:
        """Read the files once; raise BadInput unless they match data.json."""
        self.samples.check_contents()

    def _learned(self, indices: NDArray[np.int64]) -> int:
        targets = self._targets(indices)
        if not targets.any():
            problem = f"samples {indices[0]} to {indices[-1]}, which are a batch, hold no token of a completion"
            raise RunFailed(f"{problem}: take a larger batch or longer samples, or leave out such documents")
        return int(targets.sum())

    def _targets(self, indices: NDArray[np.int64], ahead: int = 0) -> NDArray[Any]:
        """Return which labels count if they are predicted `ahead` positions earlier [n, positions - ahead]."""
        targets = self.samples.targets(indices)[:, 1 + ahead :]
        if self.boundaries.reset_attention_mask:
            documents = self.samples.documents(indices)
            targets = targets * (documents[:, 1 + ahead :] == documents[:, : -1 - ahead])
        return targets

    def _drawn(self, text: Tensor, index: int) -> Batch:
        generator = torch.Generator().manual_seed(seed_of(self.samples.seed, "sample", index))
        return self.objective.batch(text, generator)


class Causal(Text):
    """Causal language modelling: each token is the label of the position before it."""

    predicts_next: ClassVar[bool] = True
    learns_part: ClassVar[bool] = True

    def batch(self, samples: Tensor, generator: torch.Generator) -> Batch:
        """Return the inputs and labels of samples; draw no random numbers."""
        return {"tokens": samples[:, :-1], "labels": samples[:, 1:]}


@dataclass(frozen=True)
class Masked(Text):
    """Masked language modelling: some tokens are hidden, and are the labels (Devlin et al. 2019)."""

    is_random: ClassVar[bool] = True
    mask: int | None
    """Token that hides others; None if the configuration has none, in which case no text can be trained on."""
    padding: int | None
    """Token of padding; None if nothing is padded."""

    @classmethod
    def from_config(cls, config: Any, sequence_length: int) -> Self:
        """Return the objective; published files have no `mask_token_id`, as only the tokenizer knows the mask token."""
        mask, padding = getattr(config, "mask_token_id", None), config.pad_token_id
        for name, token in (("mask_token_id", mask), ("pad_token_id", padding)):
            if token is not None and not 0 <= token < config.vocab_size:
                raise ValueError(f"{name} {token} is not below vocab_size {config.vocab_size}")
        if mask == padding is not None:
            raise ValueError(f"mask_token_id and pad_token_id are both {mask}")
        return cls(config.vocab_size, sequence_length, mask, padding)

    def open(
        self, folder: Path, seed: int, part: SplitPart = WHOLE, boundaries: Boundaries = ACROSS
    ) -> "TextBatches | RandomBatches | Pairs":
        """Open a split of prepared text as any objective does; raise BadInput if the mask token is unknown."""
        if self.mask is None and folder != RANDOM:
            remedy = "add the number of a token that no text contains ([MASK]'s), and describe the model again"
            raise BadInput("config.json", "mask_token_id is missing", remedy)
        return super().open(folder, seed, part, boundaries)

    def batch(self, samples: Tensor, generator: torch.Generator) -> Batch:
        """Return `tokens` [n, sequence_length] with some hidden, `labels`, and `attention_mask`, false on padding."""
        return self.hide(samples[:, :-1], generator)

    def random_batch(self, samples: int, generator: torch.Generator) -> Batch:
        """Return a batch of random tokens, of which up to a quarter at the end is padding."""
        length = self.sequence_length
        text = self.random_text((samples, length), generator)
        if self.padding is not None:
            kept = length - torch.randint(0, length // 4 + 1, (samples, 1), generator=generator)
            text = text.masked_fill(torch.arange(length) >= kept, self.padding)
        return self.hide(text, generator)

    def counted(self, samples: int, text: Callable[[], Tensor]) -> int:
        """Return the number of masked positions; `text` is only read if there is padding."""
        if self.padding is None:
            return samples * int(_chosen_of(torch.tensor(self.sequence_length)).item())
        return int(_chosen_of(self.real(text()[:, :-1]).sum(1)).sum().item())

    def real(self, text: Tensor) -> Tensor:
        """Return a mask that is true on every token of a text that is not padding."""
        return torch.ones_like(text, dtype=torch.bool) if self.padding is None else text != self.padding

    def hide(self, text: Tensor, generator: torch.Generator) -> Batch:
        """Hide tokens of a batch: 15 % of each sample's positions that are not padding, at least one, are labels."""
        real = self.real(text)
        # Random numbers, ranked: the lowest few of each sample are chosen.
        rank = (
            torch.rand(text.shape, dtype=torch.float32, generator=generator)
            .masked_fill(~real, 2.0)
            .argsort(1)
            .argsort(1)
        )
        chosen = real & (rank < _chosen_of(real.sum(1, keepdim=True)))
        random_values = torch.rand(text.shape, dtype=torch.float32, generator=generator)
        shown = text.where(random_values >= _MASKED + _RANDOM, self.random_text(text.shape, generator))
        if self.mask is not None:  # otherwise the text is random, and any token will do
            shown = shown.where(random_values >= _MASKED, torch.tensor(self.mask))
        labels = text.where(chosen, torch.tensor(IGNORED))
        return {"tokens": shown.where(chosen, text), "attention_mask": real, "labels": labels}

    def random_text(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return random tokens that are not padding."""
        if self.padding is None:
            return torch.randint(0, self.vocab_size, shape, generator=generator)
        tokens = torch.randint(0, self.vocab_size - 1, shape, generator=generator)
        return tokens + (tokens >= self.padding)


@dataclass(frozen=True)
class Classification:
    """Image classification: each image has one class."""

    no_inputs: ClassVar[int] = 1
    """Number of positions without input: the position from which the class is predicted, if there is one."""
    read_by: ClassVar[Mapping[str, str]] = {"pixel_values": EMBEDDING, "labels": HEAD}
    beside_positions: ClassVar[frozenset[str]] = frozenset(read_by)
    keeps_boundaries: ClassVar[bool] = False
    form: ImageForm

    @classmethod
    def from_config(cls, config: Any, sequence_length: int) -> Self:
        """Return the objective for a configuration's images and classes; the patches determine the sequence length."""
        if config.num_labels < 1:
            raise ValueError("there are no classes: give num_labels or id2label")
        height, width = _pair(config.image_size)
        patch_height, patch_width = _pair(config.patch_size)
        positions = (height // patch_height) * (width // patch_width) + cls.no_inputs
        if sequence_length != positions:
            counted = "the patches and the class" if cls.no_inputs else "the patches"
            raise ValueError(f"sequence length {sequence_length} differs from the number of {counted}: {positions}")
        return cls(ImageForm(config.num_channels, height, width, config.num_labels))

    @property
    def labels(self) -> int:
        """The number of labels of a sample: one class."""
        return 1

    def random_batch(self, samples: int, generator: torch.Generator) -> Batch:
        """Return random pixels in [-1, 1) and random classes."""
        form = self.form
        pixels = torch.rand(samples, form.channels, form.height, form.width, dtype=torch.float32, generator=generator)
        labels = torch.randint(0, form.classes, (samples, 1), generator=generator)
        return {"pixel_values": 2 * pixels - 1, "labels": labels}

    def open(
        self, folder: Path, seed: int, part: SplitPart = WHOLE, boundaries: Boundaries = ACROSS
    ) -> "Images | RandomBatches":
        """Open a split of a folder of images; RANDOM gives random images."""
        if any(boundaries):
            raise BadInput("--reset-attention-mask, --reset-position-ids", "images have no documents", "leave them out")
        if folder == RANDOM:
            return random_batches(self, seed, part)
        return open_images(folder, self.form, seed, part)


@dataclass(frozen=True)
class ClassificationOfAll(Classification):
    """Image classification by the mean of all patches, with no position for the class."""

    no_inputs: ClassVar[int] = 0


@dataclass(frozen=True)
class RandomBatches:
    """The global batches of a run on random samples: a function of seed and step, independent of the plan."""

    objective: Text | Classification
    seed: int

    @property
    def sha256(self) -> str:
        """Return a hash of the kind of samples."""
        return sha256_of_value([str(RANDOM), repr(self.objective)])

    @property
    def per_epoch(self) -> int:
        """The nominal length of an epoch; the samples are endless."""
        return _RANDOM_EPOCH

    def read(self, first: int, share: BatchShare) -> Batch:
        """Return a rank's share of the batch that begins with sample `first`; every rank makes the same samples."""
        made = [self._sample(first + int(row)) for row in share.rows]
        return {name: torch.cat([one[name] for one in made]) for name in made[0] if name not in share.left_out}

    def counted(self, first: int, samples: int) -> int:
        """Return the number of labels in a batch, without ignored positions."""
        made = (self._sample(first + number)["labels"] for number in range(samples))
        return sum(int((labels != IGNORED).sum().item()) for labels in made)

    def counted_ahead(self, first: int, samples: int, ahead: int) -> int:
        """Return the number of labels in a batch that count if they are predicted `ahead` positions earlier."""
        made = (self._sample(first + number)["labels"] for number in range(samples))
        return sum(int((labels[:, ahead:] != IGNORED).sum().item()) for labels in made)

    def check_contents(self) -> None:
        """Do nothing: there are no files to check."""

    def _sample(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(seed_of(self.seed, "random sample", index))
        return self.objective.random_batch(1, generator)


def random_batches(objective: Text | Classification, seed: int, part: SplitPart) -> RandomBatches:
    """Return random samples to train on; raise BadInput for any other split."""
    if part.split is not Split.TRAIN:
        raise BadInput(RANDOM, f"random samples have no {part.split} split", "evaluate on data")
    return RandomBatches(objective, seed)


def _chosen_of(real: Tensor) -> Tensor:
    """Return the number of labels in samples with `real` positions that are not padding."""
    return (_CHOSEN * real.float()).round().clamp(min=1).minimum(real)


def _pair(size: int | Iterable[int]) -> tuple[int, int]:
    """Return height and width; a single number is used for both."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


Batches = TextBatches | RandomBatches | Images | Pairs
"""Any source of the global batches of a run."""


# Texts with images in them (Liu et al. 2023).


_WITHOUT_IMAGE = 0.25
"""The share of random samples that have no image, as texts among captions."""
_BRIGHTEST = 255
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of the pixels with which CLIP was trained (Radford et al. 2021, their code)."""


@dataclass(frozen=True)
class ImageText(Causal):
    """Next-token prediction for texts with images; an image takes one position for each of its hidden states.

    The positions of images are not labels.
    """

    read_by: ClassVar[Mapping[str, str]] = {"pixel_values": EMBEDDING, "labels": HEAD}
    beside_positions: ClassVar[frozenset[str]] = frozenset({"pixel_values"})
    keeps_boundaries: ClassVar[bool] = False
    learns_part: ClassVar[bool] = False
    image_token: int
    """Token at each position of an image."""
    image_tokens: int
    """Number of positions of an image."""
    form: tuple[int, int, int]
    """Channels, height and width of an image."""
    mean: tuple[float, ...]
    """Mean of the pixels in [0, 1] with which the vision tower was trained, by channel."""
    deviation: tuple[float, ...]
    """Standard deviation of these pixels, by channel."""
    images: int = 1
    """The largest number of images in a sample; above 1, pixels have a dim of this size."""

    @classmethod
    def from_config(cls, config: Any, sequence_length: int) -> Self:
        """Return the objective of a configuration, which determines how many positions an image takes."""
        vision = config.vision_config
        form = vision.num_channels, vision.image_size, vision.image_size
        mean, deviation = (
            _CLIP if vision.model_type == "clip_vision_model" and len(_CLIP[0]) == form[0] else ((0.5,), (0.5,))
        )
        tokens = config.vocab_size, sequence_length, config.image_token_index, config.image_seq_length
        return cls(*tokens, form, mean, deviation, getattr(config, IMAGES, 1))

    def batch(self, samples: Tensor, generator: torch.Generator) -> Batch:
        """Return `tokens` and `labels` [n, sequence_length] of samples that may contain images' tokens."""
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

    def opened(self, folder: Path, seed: int, part: SplitPart, boundaries: Boundaries) -> Pairs:
        """Return a split of a folder of images and texts."""
        return open_pairs(folder, self, seed, part)

    @property
    def inputs_file(self) -> str:
        """Return the name of the file with the images."""
        return "images.npy"

    @property
    def inputs_form(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return the format and the shape of an image."""
        return np.dtype(np.uint8), self.form

    def of_texts(self, texts: Sequence[TextTokens]) -> Batch:
        """Return `tokens` and `labels` [n, sequence_length]; padding follows the text and is not a label."""
        whole = padded([self._with_image(text) for text in texts], self.sequence_length + 1, IGNORED)
        labels = whole[:, 1:]
        tokens = whole[:, :-1].masked_fill(whole[:, :-1] == IGNORED, 0)
        return {"tokens": tokens, "labels": labels.masked_fill(labels == self.image_token, IGNORED)}

    @property
    def max_inputs(self) -> int:
        """Return the largest number of images in a sample."""
        return self.images

    @property
    def _stacked(self) -> tuple[int, ...]:
        return (self.images,) if self.images > 1 else ()

    def inputs_of(self, text: TextTokens) -> int:
        """Return the number of images in a text."""
        return int((text == PLACE).sum())

    def of_inputs(self, inputs: NDArray[Any]) -> Batch:
        """Return `pixel_values` [n, images, channels, height, width], normalized as for the vision tower's pretraining.

        `inputs` have that shape; if samples have at most one image, the result has no dim of images.
        """
        mean, deviation = (
            torch.tensor(each, dtype=torch.float32)[:, None, None] for each in (self.mean, self.deviation)
        )
        pixels = torch.from_numpy(inputs).to(torch.float32)
        scaled = pixels.div_(_BRIGHTEST).sub_(mean).div_(deviation)
        return {"pixel_values": scaled if self.images > 1 else scaled[:, 0]}

    def unfit(self, text: TextTokens, has_input: bool) -> str | None:
        """Return the reason why a text cannot be a sample, or None: images need placeholders and room in the sample."""
        places = np.flatnonzero(text == PLACE)
        if bool(len(places)) != has_input:
            return f"has {len(places)} places for {int(has_input)} images"
        if len(places) > self.images:
            return f"has {len(places)} images, over the {self.images} of {IMAGES}"
        if (text == self.image_token).any():
            return f"contains the token {self.image_token} of an image, which only images may have"
        begins = places + np.arange(len(places)) * (self.image_tokens - 1)
        if has_input and begins[-1] + self.image_tokens > self.sequence_length:
            return f"has an image of {self.image_tokens} positions from {begins[-1]} on, over {self.sequence_length}"
        return None if len(text) > 1 else "has fewer than two tokens"

    def _with_image(self, text: TextTokens) -> NDArray[np.int64]:
        repeats = np.where(text == PLACE, self.image_tokens, 1)
        return np.repeat(np.where(text == PLACE, self.image_token, text).astype(np.int64), repeats)
