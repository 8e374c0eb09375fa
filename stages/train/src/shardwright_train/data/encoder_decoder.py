"""Objectives of encoder-decoders: predicting a text after its prefix, span corruption, or transcribing speech.

Source: Raffel et al. 2020, sections 3.1.4 and 3.2.3.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from shardwright.io import BadInput
from shardwright.types import EMBEDDING, HEAD
from shardwright_train.data.arrays import PLACE, Pairs, TextTokens, open_pairs, padded
from shardwright_train.data.objectives import RandomBatches, Text, TextBatches
from shardwright_train.data.sampling import Blend, Samples
from shardwright_train.data.share import Batch
from shardwright_train.data.split import ACROSS, WHOLE, Boundaries, SplitPart
from shardwright_train.data.tokenizer import read_tokenizer
from shardwright_train.data.tokens import DataFolder
from shardwright_train.parallel.vocab import IGNORED

# Raffel et al. 2020, section 3.3.4: the values that T5 was trained with.
_NOISE_DENSITY, _MEAN_SPAN = 0.15, 3


class Lengths(NamedTuple):
    """Lengths of one sample, in tokens."""

    noise: int
    """Number of tokens that are cut out."""
    spans: int
    """Number of spans that are cut out."""
    kept: int

    @property
    def inputs(self) -> int:
        """Return the length of the inputs: the unmasked tokens, a sentinel for each span, and the end of sequence."""
        return self.kept + self.spans + 1

    @property
    def targets(self) -> int:
        """The length of the targets: the tokens cut out, a sentinel before each span, and the end of sequence."""
        return self.noise + self.spans + 1

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the text."""
        return self.noise + self.kept

    @classmethod
    def of_text(cls, tokens: int) -> Self:
        """Return the lengths for a text of `tokens` tokens, rounded as in T5's random_spans_noise_mask."""
        noise = min(max(round(tokens * _NOISE_DENSITY), 1), tokens - 1)
        return cls(noise, max(round(noise / _MEAN_SPAN), 1), tokens - noise)


@cache
def lengths_filling(inputs: int) -> Lengths:
    """Return the lengths of the longest text with at most `inputs` input tokens; raise ValueError if there is none."""
    longest = Lengths.of_text(2)
    if longest.inputs > inputs:
        raise ValueError(
            f"sequence length {inputs} is too short for span corruption, which needs at least {longest.inputs}"
        )
    while (longer := Lengths.of_text(longest.tokens + 1)).inputs <= inputs:
        longest = longer
    return longest


@dataclass(frozen=True)
class Prefix(Text):
    """Prefix language modelling (Raffel et al. 2020, section 3.2.3): encode a prefix, decode its continuation."""

    keeps_boundaries: ClassVar[bool] = False
    first_token: int
    """Token that the decoder starts with."""

    @classmethod
    def from_config(cls, config: Any, sequence_length: int) -> Self:
        """Return the objective; its decoder starts with decoder_start_token_id, or else with padding."""
        given = getattr(config, "decoder_start_token_id", None)
        first = config.pad_token_id if given is None else given
        if first is None:
            raise ValueError("there is no pad_token_id for the decoder to start with")
        return cls(config.vocab_size, sequence_length, first)

    @property
    def stream_tokens(self) -> int:
        """The number of tokens that the encoder reads and the decoder predicts."""
        return 2 * self.sequence_length

    def batch(self, samples: Tensor, generator: torch.Generator) -> Batch:
        """Return `tokens`, `decoder_tokens` and `labels`, [n, sequence_length] each."""
        tokens, labels, _ = samples.split([self.sequence_length, self.sequence_length, 1], 1)
        before = pad(labels[:, :-1], (1, 0), value=self.first_token)
        return {"tokens": tokens, "decoder_tokens": before, "labels": labels}


@dataclass(frozen=True)
class SpanCorruption(Text):
    """Span corruption: 15 % of a text's tokens, in spans of 3 on average, are replaced by sentinels and predicted.

    The encoder's input fills all `sequence_length` positions. The decoder has as many positions; after its targets
    comes padding, whose labels are ignored.
    """

    is_random: ClassVar[bool] = True
    keeps_boundaries: ClassVar[bool] = False
    first_token: int
    """Token that the decoder starts with."""
    end: int
    """Token of the end of sequence, which closes inputs and targets."""
    sentinels: tuple[int, ...] = ()
    """Sentinel tokens of the first span, the second and so on; set when the data is opened."""

    @classmethod
    def from_config(cls, config: Any, sequence_length: int) -> Self:
        """Return the objective, whose decoder starts as in `Prefix`; raise ValueError if there is no eos_token_id."""
        lengths_filling(sequence_length)
        if config.eos_token_id is None:
            raise ValueError("there is no eos_token_id to close inputs and targets with")
        first = Prefix.from_config(config, sequence_length).first_token
        return cls(config.vocab_size, sequence_length, first, config.eos_token_id)

    @property
    def lengths(self) -> Lengths:
        """The lengths of a sample, which are the same for all samples."""
        return lengths_filling(self.sequence_length)

    @property
    def stream_tokens(self) -> int:
        """The number of tokens from which a sample is made, which exceeds its number of inputs."""
        return self.lengths.tokens

    def counted(self, samples: int, text: Callable[[], Tensor]) -> int:
        """Return the number of target tokens of the samples."""
        return samples * self.lengths.targets

    def open(
        self, folder: Path, seed: int, part: SplitPart = WHOLE, boundaries: Boundaries = ACROSS
    ) -> TextBatches | RandomBatches | Pairs:
        """Open a split as any objective does; raise BadInput if there are too few sentinels for a sample's spans."""
        opened = super().open(folder, seed, part, boundaries)
        if not isinstance(opened, TextBatches):
            return opened
        sentinels = sentinels_of(opened.samples, self.vocab_size)
        if len(sentinels) < self.lengths.spans:
            problem = f"{len(sentinels)} sentinel tokens for the {self.lengths.spans} spans of a sample"
            remedy = "raise the model's vocab_size beyond the tokenizer's, or train with --objective prefix"
            raise BadInput(folder, problem, remedy)
        return replace(opened, objective=replace(self, sentinels=sentinels[: self.lengths.spans]))

    @property
    def identity(self) -> tuple[object, ...]:
        """Return values that distinguish these samples from the prefix objective's samples."""
        return ("span corruption", _NOISE_DENSITY, _MEAN_SPAN, self.end, self.sentinels)

    def batch(self, samples: Tensor, generator: torch.Generator) -> Batch:
        """Return `tokens`, `decoder_tokens` and `labels`, [n, sequence_length] each; the last text token is unused."""
        made = [self._corrupted(text[: self.stream_tokens], generator) for text in samples]
        tokens, labels = (torch.stack(each) for each in zip(*made, strict=True))
        before = pad(labels[:, :-1], (1, 0), value=self.first_token)
        return {"tokens": tokens, "decoder_tokens": before.where(before != IGNORED, self.first_token), "labels": labels}

    def random_batch(self, samples: int, generator: torch.Generator) -> Batch:
        """Return a batch of random tokens, including sentinels."""
        ends = tuple(range(self.vocab_size - 1, max(self.vocab_size - 1 - self.lengths.spans, -1), -1))
        return Text.random_batch(replace(self, sentinels=ends), samples, generator)

    def _corrupted(self, text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels of one sample."""
        lengths = self.lengths
        kept = _segments(lengths.kept, lengths.spans, generator)
        noise = _segments(lengths.noise, lengths.spans, generator)
        pieces = text.split([length for pair in zip(kept, noise, strict=True) for length in pair])
        signs, end = torch.tensor(self.sentinels)[:, None], torch.tensor([self.end])
        inputs = [each for pair in zip(pieces[::2], signs, strict=True) for each in pair]
        targets = [each for pair in zip(signs, pieces[1::2], strict=True) for each in pair]
        padding = torch.full((self.sequence_length - lengths.targets,), IGNORED)
        return torch.cat((*inputs, end)), torch.cat((*targets, end, padding))


def sentinels_of(samples: Samples | Blend, vocab_size: int) -> tuple[int, ...]:
    """Return the sentinel tokens in order: <extra_id_0> and so on, as in the tokenizer of the data.

    If the tokenizer has none: the model's rows beyond the tokenizer's tokens, from the end of the vocabulary downwards.
    """
    parts = samples.parts if isinstance(samples, Blend) else (samples,)
    tokenizer = read_tokenizer(DataFolder(parts[0].folder).tokenizer)
    named: list[int] = []
    while (number := tokenizer.token_to_id(f"<extra_id_{len(named)}>")) is not None:
        named.append(number)
    return tuple(named or range(vocab_size - 1, max(part.vocab_size for part in parts) - 1, -1))


def _segments(items: int, segments: int, generator: torch.Generator) -> list[int]:
    """Return the lengths of segments, at least 1 each, drawn uniformly among all ways to divide the items."""
    starts = torch.randperm(items - 1, generator=generator)[: segments - 1].sort().values + 1
    edges = [0, *starts.tolist(), items]
    return [end - begin for begin, end in pairwise(edges)]


# Speech and its transcription.


@dataclass(frozen=True)
class Transcription(Prefix):
    """The objective of transcription: the words in a spectrogram, as tokens."""

    read_by: ClassVar[Mapping[str, str]] = {"input_features": EMBEDDING, "labels": HEAD}
    beside_positions: ClassVar[frozenset[str]] = frozenset({"input_features"})
    bins: int = 0
    """Number of frequencies of a spectrogram."""
    frames: int = 0
    """Number of frames of each sample's spectrogram."""

    @classmethod
    def from_config(cls, config: Any, sequence_length: int) -> Self:
        """Return the objective; the encoder's second convolution halves the number of frames."""
        first = config.decoder_start_token_id
        if not 0 <= first < config.vocab_size:
            raise ValueError(f"decoder_start_token_id {first} is not below vocab_size {config.vocab_size}")
        return cls(config.vocab_size, sequence_length, first, config.num_mel_bins, 2 * config.max_source_positions)

    @property
    def stream_tokens(self) -> int:
        """The number of tokens that the decoder predicts."""
        return self.sequence_length

    def batch(self, samples: Tensor, generator: torch.Generator) -> Batch:
        """Return random `input_features` [n, bins, frames] in [-1, 1), `decoder_tokens` and `labels` [n, positions]."""
        labels = samples[:, :-1]
        features = torch.rand(len(samples), self.bins, self.frames, dtype=torch.float32, generator=generator)
        before = pad(labels[:, :-1], (1, 0), value=self.first_token)
        return {"input_features": 2 * features - 1, "decoder_tokens": before, "labels": labels}

    def opened(self, folder: Path, seed: int, part: SplitPart, boundaries: Boundaries) -> Pairs:
        """Return a split of a folder of spectrograms and transcripts."""
        return open_pairs(folder, self, seed, part)

    @property
    def inputs_file(self) -> str:
        """The name of the file with the spectrograms."""
        return "features.npy"

    @property
    def inputs_form(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return the format and the shape of a spectrogram."""
        return np.dtype(np.float32), (self.bins, self.frames)

    @property
    def max_inputs(self) -> int:
        """Return the largest number of spectrograms in a sample: one."""
        return 1

    def inputs_of(self, text: TextTokens) -> int:
        """Return the number of spectrograms of a text: one."""
        return 1

    def of_texts(self, texts: Sequence[TextTokens]) -> Batch:
        """Return `decoder_tokens` and `labels` [n, sequence_length]; padding is not a label.

        The decoder's first token is not predicted, even if the tokenizer has put it before the text.
        """
        words = [text[1:] if text[0] == self.first_token else text for text in texts]
        labels = padded([text.astype(np.int64) for text in words], self.sequence_length, IGNORED)
        before = pad(labels[:, :-1], (1, 0), value=self.first_token)
        return {"decoder_tokens": before.masked_fill(before == IGNORED, self.first_token), "labels": labels}

    def of_inputs(self, inputs: NDArray[Any]) -> Batch:
        """Return `input_features` [n, bins, frames] of spectrograms [n, 1, bins, frames]."""
        return {"input_features": torch.from_numpy(inputs[:, 0])}

    def unfit(self, text: TextTokens, has_input: bool) -> str | None:
        """Return why a text cannot be a sample, or None."""
        if not has_input:
            return "has no spectrogram"
        return "has no words" if not len(text) or (text == PLACE).any() else None
