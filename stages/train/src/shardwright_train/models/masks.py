"""What attention is told of the positions that it must not attend to, in the form that each kernel wants."""

import torch
from torch import Tensor

from shardwright_formats.types.plan import Attention
from shardwright_models.facts import Mask
from shardwright_train.data.share import Batch

MASK = "mask"
"""What a microbatch has beside its tensors: the mask that all its layers share, of the form of `document_mask`."""


def mask_for(mask: Mask, states: Tensor, batch: Batch, kernel: str) -> Tensor | None:
    """The mask of a block for states [b, s, h] and a kernel; a causal one is of all positions of the batch's tokens."""
    if MASK in batch:
        return batch[MASK]
    if mask is Mask.PADDING:
        return padding_mask(batch["attention_mask"], states.dtype, kernel)
    return causal_mask(states, batch["tokens"], kernel) if mask is Mask.CAUSAL else None


def causal_mask(states: Tensor, tokens: Tensor, kernel: str) -> Tensor | None:
    """What the eager kernel must be told, to be added to scores [b, heads, s, s]; the others are causal unasked."""
    if kernel != Attention.EAGER.value:
        return None
    length = tokens.shape[1]
    after = torch.full((length, length), torch.finfo(states.dtype).min, dtype=states.dtype, device=states.device)
    return after.triu(1)[None, None]


def document_mask(documents: Tensor, dtype: torch.dtype, padding: Tensor | None) -> Tensor:
    """What is added to scores [b, heads, s, s] where each position attends to its own document alone.

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
    """What a kernel wants instead of a mask [b, s] that is false on padding.

    flash_attention_2 takes it as it is; the others add [b, 1, 1, s] to their scores.
    """
    if kernel == Attention.FLASH_ATTENTION_2.value:
        return mask
    nothing = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return nothing.masked_fill(~mask, torch.finfo(dtype).min)[:, None, None]
