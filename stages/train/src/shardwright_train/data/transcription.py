"""The objective of an encoder of spectrograms and a decoder of text (Radford et al. 2022)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from shardwright_formats.io import BadInput
from shardwright_formats.types import EMBEDDING, HEAD
from shardwright_train.data.encoder_decoder import Prefix
from shardwright_train.data.objectives import RANDOM, RandomBatches, TextBatches
from shardwright_train.data.share import Batch
from shardwright_train.data.split import ACROSS, WHOLE, Boundaries, SplitPart


@dataclass(frozen=True)
class Transcription(Prefix):
    """What is said in a spectrogram, token after token; so far of random samples, for timing alone."""

    read_by: ClassVar[Mapping[str, str]] = {"input_features": EMBEDDING, "labels": HEAD}
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
    ) -> TextBatches | RandomBatches:
        """Open random samples; raise BadInput for folders, which hold no spectrograms."""
        if folder != RANDOM:
            raise BadInput(folder, "spectrograms are read from no folder yet", f"train on --data {RANDOM}, for timing")
        return super().open(folder, seed, part, boundaries)
