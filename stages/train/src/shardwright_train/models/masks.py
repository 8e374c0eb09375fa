"""Attention masks in the form that each kernel expects."""

import math
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from shardwright_formats.types import Attention
from shardwright_models.facts import Mask
from shardwright_train.data.share import Batch

_SHARED = "mask"
_HELD: WeakValueDictionary[tuple[object, ...], Tensor] = WeakValueDictionary()
"""Masks of windows and of slopes that some layer holds."""


def shared_mask(window: int | None) -> str:
    """Return the key in a microbatch of the mask that its layers with a window share, of the form of `document_mask`.

    The window may be None: layers without one.
    """
    return _SHARED if window is None else f"{_SHARED} {window}"


def mask_for(mask: Mask, states: Tensor, batch: Batch, constants: Mapping[str, Any]) -> Tensor | None:
    """Return the mask of a block for states [b, s, h]; a causal one covers all positions of the tokens.

    `constants`: the block's kernel, its window, and the mask of that or of slopes, each None without one.
    """
    if (shared := batch.get(shared_mask(constants["window"]))) is not None:
        return shared
    kernel, held = constants["kernel"], constants["mask"]
    if mask is Mask.PADDING:
        padding = padding_mask(batch["attention_mask"], states.dtype, kernel)
        return padding if held is None else torch.minimum(padding, held)
    if held is not None:
        return held  # type: ignore[no-any-return]
    return causal_mask(states, batch["tokens"], kernel) if mask is Mask.CAUSAL else None


def causal_mask(states: Tensor, tokens: Tensor, kernel: str) -> Tensor | None:
    """Return the causal mask added to scores [b, heads, s, s] for the eager kernel; None for others, causal anyway."""
    if kernel != Attention.EAGER.value:
        return None
    length = tokens.shape[1]
    after = torch.full((length, length), torch.finfo(states.dtype).min, dtype=states.dtype, device=states.device)
    return after.triu(1)[None, None]


def window_mask(length: int, window: int, example: Tensor, mask: Mask) -> Tensor:
    """Return the mask [1, 1, s, s] to add to scores so that positions attend to `window`, themselves the last.

    Where the family's `mask` is not causal, they attend to as many behind them. It is in the dtype and on the device of
    `example`; as long as one exists, it is returned again.
    """
    behind = 0 if mask is Mask.CAUSAL else window - 1
    key = length, window, behind, example.dtype, example.device
    if (made := _HELD.get(key)) is None:
        seen = torch.ones(length, length, dtype=torch.bool, device=example.device).tril_(behind).triu_(1 - window)
        made = torch.zeros(length, length, dtype=example.dtype, device=example.device)
        made = made.masked_fill_(~seen, torch.finfo(example.dtype).min)[None, None]
        _HELD[key] = made
    return made


def alibi_mask(length: int, slopes: Sequence[float], example: Tensor) -> Tensor:
    """Return the causal mask [1, heads, s, s] to add to scores so that they fall with the distance, by heads' slopes.

    It is in the dtype and on the device of `example`; as long as one exists, it is returned again.
    """
    key = length, tuple(slopes), example.dtype, example.device
    if (mask := _HELD.get(key)) is None:
        distances = (
            torch.arange(length, device=example.device)[None] - torch.arange(length, device=example.device)[:, None]
        )
        after = torch.ones(length, length, dtype=torch.bool, device=example.device).triu_(1)
        mask = torch.empty(1, len(slopes), length, length, dtype=example.dtype, device=example.device)
        # In float32, as in the code of the paper, and a head at a time, which takes less memory.
        for head, slope in enumerate(torch.tensor(slopes, dtype=torch.float32, device=example.device)):
            mask[0, head] = distances * slope
        mask = mask.masked_fill_(after, torch.finfo(example.dtype).min)
        _HELD[key] = mask
    return mask


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of so many heads (Press et al. 2022, and their code for numbers that are no power of two)."""
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes if power == heads else slopes + alibi_slopes(2 * power)[0::2][: heads - power]


def document_mask(documents: Tensor, dtype: torch.dtype, padding: Tensor | None) -> Tensor:
    """Return the mask to add to scores [b, heads, s, s] so that each position attends to its own document alone.

    documents [b, s] number them; causal where there is no `padding` [b, s], which is false on what stands for nothing.
    """
    hidden = documents[:, None, :, None] != documents[:, None, None, :]
    if padding is None:
        hidden |= torch.ones(hidden.shape[-2:], dtype=torch.bool, device=hidden.device).triu(1)
    else:
        # A row that saw nothing would be no number: what stands for nothing sees itself.
        itself = torch.eye(documents.shape[1], dtype=torch.bool, device=documents.device)
        hidden |= ~(padding[:, None, None] | itself)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min)


def padding_mask(mask: Tensor, dtype: torch.dtype, kernel: str) -> Tensor:
    """Return a kernel's form of a mask [b, s] that is false on padding.

    flash_attention_2 takes it as it is; the others add [b, 1, 1, s] to their scores.
    """
    if kernel == Attention.FLASH_ATTENTION_2.value:
        return mask
    nothing = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return nothing.masked_fill(~mask, torch.finfo(dtype).min)[:, None, None]
