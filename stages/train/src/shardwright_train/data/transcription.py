"""The objective of an encoder of spectrograms and a decoder of text (Radford et al. 2022)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwright_formats.types import EMBEDDING, HEAD
from shardwright_train.data.encoder_decoder import Prefix
from shardwright_train.data.objectives import RANDOM, RandomBatches, TextBatches
from shardwright_train.data.pairs import PLACE, Pairs, open_pairs, padded
from shardwright_train.data.pairs import Text as Words
from shardwright_train.data.share import Batch
from shardwright_train.data.split import ACROSS, WHOLE, Boundaries, SplitPart
from shardwright_train.parallel.vocab import IGNORED


@dataclass(frozen=True)
class Transcription(Prefix):
    """The objective of transcription: the tokens of the words in a spectrogram, in order."""

    read_by: ClassVar[Mapping[str, str]] = {"input_features": EMBEDDING, "labels": HEAD}
    beside_positions: ClassVar[frozenset[str]] = frozenset({"input_features"})
    bins: int = 0
    """Frequencies of a spectrogram."""
    frames: int = 0
    """Frames of each sample's spectrogram."""

    @classmethod
    def from_config(cls, config: Any, sequence_length: int) -> Self:
        """Return the objective; the encoder's second convolution takes every other frame."""
        first = config.decoder_start_token_id
        if not 0 <= first < config.vocab_size:
            raise ValueError(f"decoder_start_token_id {first} is not below vocab_size {config.vocab_size}")
        return cls(config.vocab_size, sequence_length, first, config.num_mel_bins, 2 * config.max_source_positions)

    @property
    def stream_tokens(self) -> int:
        """Return the number of tokens that the decoder predicts."""
        return self.sequence_length

    def batch(self, samples: Tensor, generator: torch.Generator) -> Batch:
        """Return `input_features` [n, bins, frames] in [-1, 1), `decoder_tokens` and `labels` [n, sequence_length]."""
        labels = samples[:, :-1]
        features = torch.rand(len(samples), self.bins, self.frames, dtype=torch.float32, generator=generator)
        start = torch.full_like(labels[:, :1], self.first_token)
        before = torch.cat((start, labels[:, :-1]), 1)
        return {"input_features": 2 * features - 1, "decoder_tokens": before, "labels": labels}

    def open(
        self, folder: Path, seed: int, part: SplitPart = WHOLE, boundaries: Boundaries = ACROSS
    ) -> TextBatches | RandomBatches | Pairs:
        """Open a split of a folder of spectrograms and what is said in them; RANDOM gives random ones."""
        if folder == RANDOM or any(boundaries):
            return super().open(folder, seed, part, boundaries)
        return open_pairs(folder, self, seed, part)

    @property
    def inputs_file(self) -> str:
        """Return the name of the file that holds the spectrograms."""
        return "features.npy"

    @property
    def inputs_form(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return the format of a spectrogram, and its shape."""
        return np.dtype(np.float32), (self.bins, self.frames)

    @property
    def max_inputs(self) -> int:
        """Return the spectrograms of a sample."""
        return 1

    def inputs_of(self, text: Words) -> int:
        """Return the number of spectrograms of a text."""
        return 1

    def of_texts(self, texts: Sequence[Words]) -> Batch:
        """Return `decoder_tokens` and `labels` [n, sequence_length]; what fills a text up is no label."""
        labels = padded([text.astype(np.int64) for text in texts], self.sequence_length, IGNORED)
        start = torch.full_like(labels[:, :1], self.first_token)
        before = torch.cat((start, labels[:, :-1]), 1)
        return {"decoder_tokens": before.masked_fill(before == IGNORED, self.first_token), "labels": labels}

    def of_inputs(self, inputs: NDArray[Any]) -> Batch:
        """Return `input_features` [n, bins, frames] of spectrograms [n, 1, bins, frames]."""
        return {"input_features": torch.from_numpy(inputs[:, 0])}

    def unfit(self, text: Words, has_input: bool) -> str | None:
        """Return why a text cannot be a sample, or None."""
        if not has_input:
            return "has no spectrogram"
        return "has no words" if not len(text) or (text == PLACE).any() else None
