"""Attention of queries to blocks of keys, with the log-sum-exps that merge the results of several blocks.

The kernels that return them are the operators that `scaled_dot_product_attention` calls (Rabe and Staats 2021; Dao et
al. 2022). The gradients of a block follow from only the merged output and log-sum-exp (Liu et al. 2023).
"""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwright_train.torch_private import (
    cpu_attention,
    cpu_attention_backward,
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
)

_HEADS, _FEATURES = 1, -1
_SHORT = (torch.float16, torch.bfloat16)
_ROWS = 32
"""The memory-efficient kernel pads its log-sum-exps to a multiple of this many queries."""
_ALIGNMENT = 8
"""Row strides of masks for the memory-efficient kernel, and features of a head for flash, must be multiples of this."""
_WIDEST_FLASH, _FLASH_CAPABILITY = 256, (8, 0)
"""Largest number of features of a head, and lowest compute capability, for the flash kernel."""
Gradients = tuple[Tensor, Tensor, Tensor]


class Attended(NamedTuple):
    """The attention of queries to some keys: output and log-sum-exp."""

    output: Tensor
    """[b, heads, q, features of values]; 0 if a query sees nothing."""
    logsumexp: Tensor
    """Logarithms of the sums of exponentials [b, heads, q], in float32 at least; -inf if a query sees nothing."""

    def rows(self, queries: slice) -> "Attended":
        """Return the part for some queries, as views."""
        return Attended(self.output[:, :, queries], self.logsumexp[:, :, queries])

    def rounded(self, dtype: torch.dtype) -> "Attended":
        """Return the attention with its output in another format."""
        return Attended(self.output.to(dtype), self.logsumexp)

    def add(self, other: "Attended") -> None:
        """Merge the attention of the same queries to further keys into this one, in place."""
        merged = torch.logaddexp(self.logsumexp, other.logsumexp)
        finite = merged.masked_fill(merged == -inf, 0)
        before, more = ((each.logsumexp - finite).exp_()[..., None] for each in (self, other))
        self.output.mul_(before).addcmul_(other.output.to(self.output.dtype), more)
        self.logsumexp.copy_(merged)


def nothing_attended(query: Tensor, features: int) -> Attended:
    """Return the attention of queries [b, heads, q, d] to no keys, for values of `features`, in float32 or wider.

    Its output lies in memory as [b, q, heads, features], as the matrix product after attention reads it.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    shape = *query.transpose(1, 2).shape[:-1], features
    output = torch.zeros(shape, dtype=dtype, device=query.device)
    return Attended(output.transpose(1, 2), query.new_full(query.shape[:-1], -inf, dtype=dtype))


@dataclass(frozen=True)
class Block:
    """Attention of queries [b, heads, q, d] to a block of keys and values [b, kv_heads, k, d or other features].

    Kernels get equally many features: narrower tensors are padded with zeros, which change no score and are cut off
    the results.
    """

    scale: float
    """Factor of the scores."""
    is_causal: bool = False
    """Whether queries and keys are the same positions in ascending order, under a causal mask."""
    seen: Tensor | None = None
    """The keys that each query sees [b or 1, 1, q, k], unless `is_causal` implies it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Attended:
        """Return the attention of the queries."""
        output, logsumexp = self._forward(*_equally_wide(query, key, value))
        output = output[..., : value.shape[_FEATURES]]
        if self.seen is None:
            return Attended(output, logsumexp)
        blind = ~self.seen.any(-1)
        return Attended(output.masked_fill(blind[..., None], 0), logsumexp.masked_fill(blind, -inf))

    def backward(self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended) -> Gradients:
        """Return the gradients of queries, keys and values, given `attended`, the merged attention of the queries."""
        # A query that sees nothing has probabilities 0, not exp(-inf + inf).
        logsumexp = attended.logsumexp.masked_fill(attended.logsumexp == -inf, inf)
        *inputs, output = _equally_wide(gradient, query, key, value, attended.output)
        gradients = self._backward(Attended(output, logsumexp), *inputs)
        dq, dk, dv = (dx[..., : x.shape[_FEATURES]] for dx, x in zip(gradients, (query, key, value), strict=True))
        return dq, dk, dv

    def _backward(self, last: Attended, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Gradients:
        if query.device.type == "cpu":
            return self._cpu_backward(gradient, query, key, value, last)
        if self._is_flash(query):
            return self._flash_backward(gradient, query, key, value, last)
        return self._efficient_backward(gradient, query, key, value, last)

    def _forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp; for queries without visible keys these are arbitrary finite numbers."""
        causal, scale = self.is_causal, self.scale
        if query.device.type == "cpu":
            on_cpu = cpu_attention(query, key, value, 0.0, causal, attn_mask=self._bias(query), scale=scale)
            return on_cpu[0], on_cpu[1]
        if self._is_flash(query):
            fused = flash_attention(query, key, value, 0.0, causal, scale=scale)
            return fused[0], fused[1]
        key, value = _repeated(key, query), _repeated(value, query)
        fused = efficient_attention(query, key, value, self._bias(query), True, 0.0, causal, scale=scale)
        return fused[0], fused[1][..., : query.shape[-2]]

    def _cpu_backward(self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, last: Attended) -> Gradients:
        bias = self._bias(query)
        gradients: Gradients = cpu_attention_backward(
            gradient, query, key, value, *last, 0.0, self.is_causal, attn_mask=bias, scale=self.scale
        )
        return gradients

    def _flash_backward(self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, last: Attended) -> Gradients:
        lengths, unused = (query.shape[-2], key.shape[-2]), query.new_zeros(2, dtype=torch.int64)
        gradients: Gradients = flash_attention_backward(
            gradient,
            *(query, key, value, last.output, last.logsumexp.contiguous()),
            *(None, None, *lengths, 0.0, self.is_causal, unused, unused),
            scale=self.scale,
        )
        return gradients

    def _efficient_backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, last: Attended
    ) -> Gradients:
        heads, unused = key.shape[_HEADS], query.new_zeros((), dtype=torch.int64)
        padded = pad(last.logsumexp, (0, -last.logsumexp.shape[-1] % _ROWS), value=inf)
        dq, dk, dv, _ = efficient_attention_backward(
            gradient,
            *(query, _repeated(key, query), _repeated(value, query), self._bias(query), last.output, padded),
            *(unused, unused, 0.0, [True, True, True, False], self.is_causal),
            scale=self.scale,
        )
        return dq, _folded(dk, heads), _folded(dv, heads)

    def _is_flash(self, query: Tensor) -> bool:
        if query.dtype not in _SHORT or self.seen is not None or _only_efficient():
            return False
        features = query.shape[-1]
        takes_heads = features % _ALIGNMENT == 0 and features <= _WIDEST_FLASH
        return takes_heads and torch.cuda.get_device_capability(query.device) >= _FLASH_CAPABILITY

    def _bias(self, query: Tensor) -> Tensor | None:
        """Return a mask to add to scores; it is finite, so that queries without visible keys give numbers.

        Its rows have the stride that the memory-efficient kernel requires, whatever the number of keys.
        """
        if self.seen is None:
            return None
        keys = self.seen.shape[-1]
        rows = torch.zeros(*self.seen.shape[:-1], keys + -keys % _ALIGNMENT, dtype=query.dtype, device=query.device)
        hidden = rows[..., :keys].masked_fill_(~self.seen, torch.finfo(query.dtype).min)
        return hidden.expand(*query.shape[:2], -1, -1)


class Piece(NamedTuple):
    """A block of attention, with its slices of a rank's queries, and of keys and values joined in one tensor."""

    queries: slice
    keys: slice
    block: Block

    def add(self, total: Attended, query: Tensor, both: Tensor) -> None:
        """Merge this piece's attention into `total`, the attention of all queries, in place."""
        key, value = parted(both[..., self.keys, :], query.shape[_FEATURES])
        total.rows(self.queries).add(self.block.attend(query[:, :, self.queries], key, value))

    def add_gradients(
        self, of_query: Tensor, of_both: Tensor, gradient: Tensor, query: Tensor, both: Tensor, attended: Attended
    ) -> None:
        """Add this piece's gradients in place; `attended` and `gradient`: all queries' attention and its gradient."""
        features, rows = query.shape[_FEATURES], attended.rows(self.queries)
        key, value = parted(both[..., self.keys, :], features)
        inputs = query[:, :, self.queries], key, value
        dq, *others = self.block.backward(gradient[:, :, self.queries], *inputs, rows)
        of_query[:, :, self.queries] += dq
        for total, part in zip(parted(of_both[..., self.keys, :], features), others, strict=True):
            total += part


def joined(key: Tensor, value: Tensor) -> Tensor:
    """Return keys and values [b, kv_heads, k, features] in one tensor, for sending.

    [2, b, kv_heads, k, d] if both have the same features; [1, b, kv_heads, k, both features] otherwise.
    """
    if key.shape == value.shape:
        return torch.stack([key, value])
    return torch.cat([key, value], _FEATURES)[None]


def parted(both: Tensor, features: int) -> tuple[Tensor, Tensor]:
    """Return keys, of a given width, and values from one tensor, as views."""
    key, value = both if len(both) > 1 else both[0].tensor_split([features], _FEATURES)
    return key, value


def _only_efficient() -> bool:
    """Return whether PyTorch is set to use only the memory-efficient kernel."""
    return torch.backends.cuda.mem_efficient_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()


def _equally_wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors [..., features], the narrower ones padded with zeros."""
    widest = max(x.shape[_FEATURES] for x in tensors)
    return tuple(pad(x, (0, widest - x.shape[_FEATURES])) if x.shape[_FEATURES] < widest else x for x in tensors)


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    """Return keys or values, with heads repeated to the number of the queries' heads."""
    return x.repeat_interleave(query.shape[_HEADS] // x.shape[_HEADS], _HEADS)


def _folded(x: Tensor, heads: int) -> Tensor:
    """Return the gradients of repeated heads, summed over the repetitions."""
    groups: Tensor = x.unflatten(_HEADS, (heads, -1))
    return groups.sum(_HEADS + 1)
