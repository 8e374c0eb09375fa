"""Attention masks in the form that each kernel expects."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from shardwright.models.traits import Mask
from shardwright.types import Attention
from shardwright_train.data.share import DOCUMENTS, Batch

_SHARED = "mask"
_HELD: WeakValueDictionary[tuple[object, ...], Tensor] = WeakValueDictionary()
"""Masks of windows and of slopes that some layer holds."""


class Places(NamedTuple):
    """A rank's places in a sample, and the positions at all places if a plan changes their order."""

    length: int
    computed: slice
    """Places whose states enter the matrix products on this rank."""
    attending: slice
    """Places that attend on this rank."""
    order: Tensor | None = None
    """Positions [s] at all places; None if the order is unchanged."""

    @classmethod
    def whole(cls, length: int) -> "Places":
        """Return the places of a rank that has whole samples."""
        return cls(length, slice(0, length), slice(0, length))

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions [s] at all places."""
        return torch.arange(self.length, device=device) if self.order is None else self.order

    def pairs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions [q, 1] that attend on this rank, and all positions [s]."""
        positions = self.positions(device)
        return positions[self.attending, None], positions

    @property
    def key(self) -> tuple[object, ...]:
        """Return a cache key for masks of these places."""
        rows, order = self.attending, self.order
        return self.length, rows.start, rows.stop, None if order is None else tuple(order.tolist())


def shared_mask(window: int | None, attending: slice) -> str:
    """Return the key, in a microbatch, of the mask shared by layers with a window; the mask is as in `document_mask`.

    `window`: None for layers without one. `attending`: the places of the mask's rows.
    """
    rows = f"{_SHARED} {attending.start} to {attending.stop}"
    return rows if window is None else f"{rows} in {window}"


def mask_for(mask: Mask, states: Tensor, batch: Batch, constants: Mapping[str, Any]) -> Tensor | None:
    """Return the mask of a block for states [b, s, h]; a causal one covers all positions of the tokens.

    `constants`: the block's kernel, its window and places, and the mask of the window or of slopes, or None. A kernel
    that attends to other ranks' positions makes a causal mask itself, and receives only the documents.
    """
    if (shared := batch.get(shared_mask(constants["window"], constants["places"].attending))) is not None:
        return shared
    kernel, held = constants["kernel"], constants["mask"]
    if mask is Mask.PADDING:
        padding = padding_mask(batch["attention_mask"], states.dtype, kernel)
        return padding if held is None else torch.minimum(padding, held)
    if held is not None:
        return held  # type: ignore[no-any-return]
    if mask is not Mask.CAUSAL:
        return None
    return batch.get(DOCUMENTS, causal_mask(states, batch["tokens"], kernel))


def causal_mask(states: Tensor, tokens: Tensor, kernel: str) -> Tensor | None:
    """Return the causal mask to add to scores [b, heads, s, s] for the eager kernel.

    None for other kernels, which are causal without it.
    """
    if kernel != Attention.EAGER.value:
        return None
    length = tokens.shape[1]
    after = torch.full((length, length), torch.finfo(states.dtype).min, dtype=states.dtype, device=states.device)
    return after.triu(1)[None, None]


def window_mask(places: Places, window: int, example: Tensor, mask: Mask) -> Tensor:
    """Return the mask [1, 1, q, s] to add to scores for a window of `window` positions up to each position.

    If the family's `mask` is not causal, the window has the same length after each position. The mask is in the dtype
    and on the device of `example`; as long as an equal one exists, it is returned again.
    """
    behind = 0 if mask is Mask.CAUSAL else window - 1
    key = places.key, window, behind, example.dtype, example.device
    if (made := _HELD.get(key)) is None:
        queries, keys = places.pairs(example.device)
        hidden = (keys > queries + behind) | (keys <= queries - window)
        _HELD[key] = made = _added(hidden, example.dtype)[None, None]
    return made


def alibi_mask(places: Places, slopes: Sequence[float], example: Tensor) -> Tensor:
    """Return the causal mask [1, heads, q, s] to add to scores for ALiBi, with the heads' slopes.

    It is in the dtype and on the device of `example`; as long as an equal one exists, it is returned again.
    """
    key = places.key, tuple(slopes), example.dtype, example.device
    if (mask := _HELD.get(key)) is None:
        queries, keys = places.pairs(example.device)
        distances, after = keys - queries, keys > queries
        mask = torch.empty(1, len(slopes), *distances.shape, dtype=example.dtype, device=example.device)
        # In float32, as in the code of the paper, and a head at a time, which takes less memory.
        for head, slope in enumerate(torch.tensor(slopes, dtype=torch.float32, device=example.device)):
            mask[0, head] = distances * slope
        mask = mask.masked_fill_(after, torch.finfo(example.dtype).min)
        _HELD[key] = mask
    return mask


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes for a number of heads (Press et al. 2022; their code for numbers that are no powers of two)."""
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes if power == heads else slopes + alibi_slopes(2 * power)[0::2][: heads - power]


def document_mask(documents: Tensor, dtype: torch.dtype, padding: Tensor | None, places: Places) -> Tensor:
    """Return the mask to add to scores [b, heads, q, s] so that each position attends only to its own document.

    `documents` [b, s]: each position's document number. `padding` [b, s]: false on padding; None: the mask is causal.
    """
    queries, keys = places.pairs(documents.device)
    hidden = documents[:, None, places.attending, None] != documents[:, None, None, :]
    if padding is None:
        hidden |= keys > queries
    else:
        # A row without visible keys would give NaN: padding sees itself.
        hidden |= ~(padding[:, None, None] | (keys == queries))
    return _added(hidden, dtype)


def _added(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to scores that leaves out what is hidden."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min)


def image_masks(
    batch: Batch, config: Mapping[str, Any], wanted: Sequence[tuple[int | None, Places]], dtype: torch.dtype
) -> Batch:
    """Return the shared masks of a micro-batch for some windows, in which positions of an image attend to all of it."""
    inside = batch["tokens"] == config["image_token_index"]
    return {shared_mask(window, places.attending): image_mask(inside, window, dtype) for window, places in wanted}


def image_mask(inside: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the causal mask [b, 1, s, s] to add to scores, in which positions of an image attend to all of it.

    `inside` [b, s] is true on images' positions; adjacent images count as one, as in transformers. A window hides what
    lies further before a position.
    """
    before = torch.nn.functional.pad(inside, (1, 0))[:, :-1]
    images = (inside & ~before).cumsum(1).masked_fill_(~inside, 0)
    after = torch.ones(inside.shape[1], inside.shape[1], dtype=torch.bool, device=inside.device).triu_(1)
    hidden = after & ~(inside[:, :, None] & (images[:, :, None] == images[:, None]))
    if window is not None:
        hidden |= torch.ones_like(after).tril_(-window)
    return _added(hidden, dtype)[:, None]


def padding_mask(mask: Tensor, dtype: torch.dtype, kernel: str) -> Tensor:
    """Return, in a kernel's form, a mask [b, s] that is false on padding.

    flash_attention_2 uses it as it is; the other kernels add [b, 1, 1, s] to their scores.
    """
    if kernel == Attention.FLASH_ATTENTION_2.value:
        return mask
    return _added(~mask, dtype)[:, None, None]
