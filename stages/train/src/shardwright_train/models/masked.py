"""What language models that fill in hidden tokens have in common: how a text becomes inputs and labels."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright_formats.io.errors import RunFailed
from shardwright_formats.types.plan import Attention
from shardwright_train.models.base import Batch
from shardwright_train.parallel.vocab import IGNORED

__all__ = ["Vocabulary", "mask_of_kernel"]

# Devlin et al. 2019, section 3.1: the share of positions that are labels, and of these the shares that show the mask
# token and a random one; the rest show themselves.
_CHOSEN, _MASKED, _RANDOM = 0.15, 0.8, 0.1


@dataclass(frozen=True)
class Vocabulary:
    """The number of tokens, and those with a meaning of their own; `padding` is None where nothing is padded."""

    size: int
    mask: int
    padding: int | None

    @classmethod
    def of(cls, config: Any) -> "Vocabulary":
        """That of a configuration; raises ValueError saying what is missing or wrong in it."""
        mask, padding = getattr(config, "mask_token_id", None), config.pad_token_id
        if mask is None:
            raise ValueError("mask_token_id is missing: add the number of a token that no text holds ([MASK]'s)")
        for name, token in (("mask_token_id", mask), ("pad_token_id", padding)):
            if token is not None and not 0 <= token < config.vocab_size:
                raise ValueError(f"{name} {token} is not below vocab_size {config.vocab_size}")
        if mask == padding:
            raise ValueError(f"mask_token_id and pad_token_id are both {mask}")
        return cls(config.vocab_size, mask, padding)

    def masked_batch(self, text: Tensor, generator: torch.Generator) -> Batch:
        """Tokens [b, s] with some hidden, which are the labels; `attention_mask` is false on padding.

        Of each sample's positions that are not padding 15 %, and one at least, are labels. Raises RunFailed where all
        is padding.
        """
        real = torch.ones_like(text, dtype=torch.bool) if self.padding is None else text != self.padding
        if not real.any():
            raise RunFailed("a batch is nothing but padding: shuffle the text or see what pad_token_id stands for")
        # Random numbers, ranked: the lowest few of each sample are chosen.
        rank = torch.rand(text.shape, generator=generator).masked_fill(~real, 2.0).argsort(1).argsort(1)
        chosen = real & (rank < (_CHOSEN * real.sum(1, keepdim=True)).round().clamp(min=1))
        draw = torch.rand(text.shape, generator=generator)
        shown = text.where(draw >= _MASKED + _RANDOM, self.random_text(text.shape, generator))
        shown = shown.where(draw >= _MASKED, torch.tensor(self.mask))
        labels = text.where(chosen, torch.tensor(IGNORED))
        return {"tokens": shown.where(chosen, text), "attention_mask": real, "labels": labels}

    def random_text(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Tokens that are not padding."""
        if self.padding is None:
            return torch.randint(0, self.size, shape, generator=generator)
        tokens = torch.randint(0, self.size - 1, shape, generator=generator)
        return tokens + (tokens >= self.padding)

    def padded_text(self, samples: int, length: int, generator: torch.Generator) -> Tensor:
        """Random text [samples, length] with up to a quarter of padding at its end."""
        text = self.random_text((samples, length), generator)
        if self.padding is None:
            return text
        kept = length - torch.randint(0, length // 4 + 1, (samples, 1), generator=generator)
        return text.masked_fill(torch.arange(length) >= kept, self.padding)


def mask_of_kernel(mask: Tensor, dtype: torch.dtype, kernel: str) -> Tensor:
    """What a kernel wants instead of a mask [b, s] that is false on padding.

    flash_attention_2 takes it as it is; the others add [b, 1, 1, s] to their scores.
    """
    if kernel == Attention.FLASH_ATTENTION_2.value:
        return mask
    nothing = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return nothing.masked_fill(~mask, torch.finfo(dtype).min)[:, None, None]
