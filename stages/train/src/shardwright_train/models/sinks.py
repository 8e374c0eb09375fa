"""Attention with sinks, exactly, by the kernels of scaled_dot_product_attention, which know none.

A sink is a further key before all others, whose value is zero. Queries get further features, of which the first is the
sink of their head over the scale, and keys the same features, of which the first is 1 for the sink and all are 0 for
others: so the score of the sink is its number. A further query before all others makes positions and keys alike many,
so that a causal kernel lets each position see the sink, itself and those before.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shardwright_models.stacks import SINK_FEATURES

SINK_ATTENTION = "shardwright_sinks"
"""Name under which transformers' modules find the attention below."""
_HELD = WeakTensorKeyDictionary()
"""Masks with a further key and query, by those without."""
_SPACE = (0, SINK_FEATURES, 1, 0)
"""Padding of queries, keys and values [b, heads, s, d]: features behind, and a position before."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    s_aux: Tensor,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention [b, s, heads, d] of a module; causal where there is no mask [b or 1, heads or 1, s, s]."""
    features, causal = query.shape[-1], attention_mask is None
    sinks = (s_aux / scaling).to(query.dtype)[None, :, None, None].expand(*query.shape[:3], 1)
    query = pad(torch.cat([query, pad(sinks, (0, SINK_FEATURES - 1))], -1), (0, 0, 1, 0))
    first = pad(key.new_ones(()).view(1, 1, 1, 1), (features, SINK_FEATURES - 1))
    key = torch.cat([first.expand(*key.shape[:2], 1, -1), pad(key, (0, SINK_FEATURES))], 2)
    value = pad(value, _SPACE)
    if attention_mask is not None:
        # Kernels that add a mask know no groups of heads; the further query sees all, and nothing is read of it.
        attention_mask = _padded(attention_mask)
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    result = scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=query.shape[1] > key.shape[1]
    )
    return result[:, :, 1:, :features].transpose(1, 2).contiguous(), None


def _padded(mask: Tensor) -> Tensor:
    """Return a mask with a further key and a further query; as long as the mask is there, the same for all layers."""
    if mask not in _HELD:
        _HELD[mask] = pad(mask, (1, 0, 1, 0))
    padded: Tensor = _HELD[mask]
    return padded


ALL_ATTENTION_FUNCTIONS.register(SINK_ATTENTION, _attention)
